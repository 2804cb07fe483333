"""The backends of `backend.py`, and which of them a run gets."""
