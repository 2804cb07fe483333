"""Saves checkpoints, resumes runs from them, and reports the settings that changed since the save."""
