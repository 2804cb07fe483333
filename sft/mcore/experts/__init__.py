"""Mixtures of experts: the router, the experts, and the layer that combines them."""
