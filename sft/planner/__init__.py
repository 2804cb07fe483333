"""Searches the layouts of a recipe, ranks those that fit by predicted time, and says why."""
