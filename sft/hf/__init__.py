"""Hugging Face's config.json and tensor names to ours and back; one table entry a family."""
