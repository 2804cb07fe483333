"""Estimates the memory of a recipe and the time of its steps."""
