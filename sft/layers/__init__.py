"""What a layer is: its kind, its matrices, its FLOPs, and the bytes that it saves and sends.  Needs no torch."""
