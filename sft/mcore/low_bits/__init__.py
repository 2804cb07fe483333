"""Holds the frozen weights of a model in low bits, and dequantises them while they are used."""
