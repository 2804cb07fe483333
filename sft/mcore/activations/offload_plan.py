"""How many layers' activations wait in host memory.  Arithmetic only, no torch; used by the forward pass itself
(saved_tensors.py) and by sft/estimate."""

import math


def num_offloaded_layers(fraction: float, num_layers: float, *, backward_is_next: bool) -> float:
    """Of the layers of a model chunk, the first ones, which backward reaches last.

    backward_is_next: backward follows each forward pass at once, so that the last two layers stay

    4 layers: a fraction of 0.3 -> 2, 0.1 -> 1, 1 -> 4, or 2 where backward is next
    """
    return min(math.ceil(fraction * num_layers), max(0, num_layers - 2) if backward_is_next else num_layers)


def num_resident_layers(num_offloaded: float, num_layers: float) -> float:
    """Most layers whose activations are on the device at a time: an offloaded layer is fetched while the one behind it
    is computed, so that two are there at least."""
    return max(num_layers - num_offloaded, min(2.0, num_layers))
