"""Scores weights: losses on held-out sets, and a teacher's distributions for all data of a recipe."""
