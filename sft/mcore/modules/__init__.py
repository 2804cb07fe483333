"""Modules of layers: the libraries they come from, norms, biases, activations, linear layers that no rank splits."""
