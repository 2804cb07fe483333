"""Reads Hugging Face models: config.json, tensor names and weight files, from a folder or from the hub."""
