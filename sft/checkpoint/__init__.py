"""Checkpoint folders, how runs save into them and resume from them, and what changed since a save."""
