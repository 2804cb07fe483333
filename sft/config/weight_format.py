"""Describes formats of weights in low bits: what a number takes, and which numbers share a scale.

`sft/low_bits` computes with these formats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """A format of matrices.

    name         as users know it, such as MXFP4
    bits         of a number
    rows         number of rows that share a scale; None: all rows of the matrix
    columns      number of columns that share a scale; None: all columns of the matrix
    scale_bytes  bytes of what a block of rows and columns has in addition to its numbers
    shares       by the weight's name in a layer, such as mlp.linear_fc2.weight: the share of its numbers, over all
                 layers, that are in this format; a weight without an entry has none
    """

    name: str
    bits: int
    rows: int | None = 1
    columns: int | None = None
    scale_bytes: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict)

    def num_bytes(self, rows: float, columns: float) -> float:
        """Bytes of a matrix whose blocks are all whole.  NF4, [2, 128] -> 2 * (64 + 2 * 4) = 144"""
        blocks = rows / (self.rows or rows) * columns / (self.columns or columns)
        return rows * columns * self.bits / 8 + blocks * self.scale_bytes


NF4 = WeightFormat(name="NF4", bits=4, columns=64, scale_bytes=4)
