"""Writes folders for transformers and PEFT from checkpoints."""
