"""Writes the tokenizer, the chat templates and the end tokens that a server needs, and the flags to start it with."""
