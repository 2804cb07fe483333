"""Adapters and frozen weights in the model."""
