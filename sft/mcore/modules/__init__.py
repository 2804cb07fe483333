"""Provides the modules of layers: libraries of modules, norms, biases, activations, and duplicated linear layers."""
