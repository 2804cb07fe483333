"""Selects the Linears with LoRA adapters, loads adapters, and identifies the weights beside which they were trained."""
