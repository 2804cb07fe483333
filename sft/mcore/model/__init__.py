"""The model as megatron-core builds it: layers, their modules in order, the chunks of a rank."""
