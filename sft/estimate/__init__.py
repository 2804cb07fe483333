"""Computes the memory that a recipe needs."""
