"""Adds up the measurements of a step over all ranks, and logs the results."""
