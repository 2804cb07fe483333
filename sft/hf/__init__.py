"""Converts config.json and tensor names between Hugging Face and this trainer."""
