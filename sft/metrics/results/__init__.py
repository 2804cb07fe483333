"""Reads the metrics of finished and running runs: compares two runs, and draws curves."""
