"""Converts rows of data files to chats, then to cached samples, packs and microbatches."""
