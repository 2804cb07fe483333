"""Formats of quantised weights: what is stored for a part of a matrix, and the values that it stands for.

Readers of files, the frozen base of LoRA, and exports use the same functions, so the values are equal in all of them.
"""
