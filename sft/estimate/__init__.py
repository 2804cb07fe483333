"""Computes the memory that a recipe needs, and estimates the time of a step."""
