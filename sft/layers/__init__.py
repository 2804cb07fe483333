"""Kinds of layers: their matrices, their FLOPs, and the bytes that they save and send.  Needs no torch."""
