"""Answers questions about a user's recipe, data and weights with the probes `leak`, `parity` and `data`."""
