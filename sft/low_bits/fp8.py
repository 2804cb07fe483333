"""FP8 numbers (E4M3) with one scale per tensor, matrix, row, or block of rows and columns.

A value is the stored number times its scale, computed in fp32.  `quantised` gives the largest magnitude of a block the
number 448, the largest of E4M3, so a value changes by at most 1/16 of itself or, if small, by 2^-10 of the scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sft.low_bits.part import StoredPart

LARGEST = 448.0  # largest number of E4M3


@dataclass(frozen=True, kw_only=True)
class ScaleIndex:
    """Along one axis of a part, the scale of each element: element i has scale (first + i * step) // block."""

    first: int
    count: int
    step: int
    block: int

    def of(self, scale: Tensor, axis: int) -> Tensor:
        """`scale` with `count` elements along `axis`, one for each element of the part."""
        last = self.first + self.count * self.step
        return scale.index_select(
            axis,
            torch.arange(self.first, last, self.step, device=scale.device) // self.block,
        )


@dataclass(frozen=True, kw_only=True)
class Fp8Part(StoredPart):
    """numbers: E4M3, of any shape
    scales: floating point, with as many axes; an axis of size 1 has one scale for all elements
    indices: for each axis, which scale an element has; None: the axis of `scales` fits by its size
    """

    numbers: Tensor
    scales: Tensor
    indices: tuple[ScaleIndex | None, ...]

    def values(self, dtype: torch.dtype) -> Tensor:
        scales = self.scales.float()
        for axis, index in enumerate(self.indices):
            scales = scales if index is None else index.of(scales, axis)
        return self.numbers.float().mul_(scales).to(dtype)


def quantised(
    values: Tensor,
    block: tuple[int, int],
    *,
    dtype: torch.dtype = torch.float32,
    powers: bool = False,
    largest: Tensor | None = None,
) -> Fp8Part:
    """Quantise a matrix [rows, columns] in blocks of `block` rows and columns; the last blocks may be smaller.

    dtype: type of the scales; powers: whether scales are powers of 2 (scale_fmt "ue8m0")
    largest: the magnitude to which every block is scaled; None: that of its own values
    A block of zeros has scale 1.
    """
    (rows, columns), (height, width) = values.shape, block
    padded = torch.nn.functional.pad(values.float(), (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))  # [row blocks, height, column blocks, width]
    own = blocks.abs().amax((1, 3)) if largest is None else largest.float().expand(blocks.shape[0], blocks.shape[2])
    scales = own / LARGEST
    if powers:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    scales = scales.to(dtype)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    numbers = (blocks / scales.float()[:, None, :, None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    indices = (
        ScaleIndex(first=0, count=rows, step=1, block=height),
        ScaleIndex(first=0, count=columns, step=1, block=width),
    )
    numbers = numbers.view(torch.uint8).flatten(2).flatten(0, 1)[:rows, :columns].contiguous()
    return Fp8Part(numbers=numbers.view(torch.float8_e4m3fn), scales=scales, indices=indices)
