"""Adapters and frozen weights within the model."""
