"""Supervised fine-tuning on Megatron for long context."""

__version__ = "0.1.0"
