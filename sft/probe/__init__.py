"""Answers questions about a user's own recipe, data and weights: leak, parity and data."""
