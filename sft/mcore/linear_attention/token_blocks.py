"""Divides tokens into blocks for computations in fp32 or float64, so that such copies of the input stay small."""

from torch import Tensor

from sft.layers.mixers.recurrent import BLOCK_NUMBERS


def token_blocks(x: Tensor) -> list[slice]:
    """Slices of the rows of x [t, heads, width], one for each block; one empty slice if there are no tokens.

    The norms after a recurrence have about eight fp32 tensors of the size of a block at a time in backward.
    """
    size = max(1, BLOCK_NUMBERS[x.device.type] // 2 // (x.shape[1] * x.shape[2]))
    return [slice(start, start + size) for start in range(0, max(1, len(x)), size)]
