"""LoRA outside of the model: what is adapted, where adapters and their base come from."""
