"""Layers of experts: router, experts, and what they compute together."""
