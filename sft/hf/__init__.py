"""Converts config.json and tensor names of Hugging Face to ours and back.  Each family has one table entry."""
