"""FP8 numbers (E4M3) with one scale per tensor, matrix, row, or block of rows and columns.

A value is the stored number times its scale, computed in fp32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sft.low_bits.part import StoredPart


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
        return scale.index_select(axis, torch.arange(self.first, last, self.step, device=scale.device) // self.block)


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
