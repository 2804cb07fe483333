"""Builds the model: specs of layers, the classes that extend megatron-core's, and the model chunks of a rank."""
