"""Small modules of layers: norms, biases, activations, linears that every rank holds whole."""
