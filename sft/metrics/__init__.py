"""Adds up the quantities of a step over ranks, and logs the numbers."""
