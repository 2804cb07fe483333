"""Counts the layers of a model chunk that offload their activations to host memory, and those that do not."""

import math

SLAB_BYTES = 1 << 28  # host memory for activations is allocated in blocks of this size


def num_offloaded_layers(fraction: float, num_layers: float, *, backward_is_next: bool) -> float:
    """Number of layers of a model chunk that are offloaded.  The first layers are, because backward reaches them last.

    backward_is_next: backward follows each forward pass at once, so the last two layers stay on the device
    4 layers: a fraction of 0.3 -> 2; 0.1 -> 1; 1 -> 4, but 2 if backward is next
    """
    return min(math.ceil(fraction * num_layers), max(0, num_layers - 2) if backward_is_next else num_layers)


def num_resident_layers(num_offloaded: float, num_layers: float) -> float:
    """Largest number of layers whose activations are on the device at the same time.

    It is at least two if the chunk has two layers, because an offloaded layer is prefetched while backward computes the
    layer after it.
    """
    return max(num_layers - num_offloaded, min(2.0, num_layers))
