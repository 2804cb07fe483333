"""Matrices in which a group of numbers of a row shares a scale, as the package compressed-tensors stores them.

    format                 number               scale                                         also stored
    pack-quantized         4 or 8 bits, int     floating point, per group of a row or row     weight_shape, zero points
    nvfp4-pack-quantized   4 bits, E2M1         E4M3 per 16 numbers, over a global scale      weight_global_scale
    mxfp4-pack-quantized   4 bits, E2M1         exponent of 2 per 32 numbers
    mxfp8-quantized        8 bits, E4M3         exponent of 2 per 32 numbers

Numbers of fewer than 8 bits are packed, the first one in the lowest bits.  Every operation and its type are as in
compressed-tensors, so the values are equal bit for bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sft.low_bits.fp4 import powers_of_2, unpacked_fp4
from sft.low_bits.part import StoredPart

WORD = 32  # bits of a stored word, which contains several packed integers


@dataclass(frozen=True, kw_only=True)
class GroupedPart(StoredPart):
    """Rows and columns of a matrix.

    format        name of the format in compressed-tensors
    num_bits      bits of a number
    numbers       int32 [rows, words], uint8 [rows, bytes] or E4M3 [rows, columns]
    in_groups     columns of `numbers`, after unpacking, that belong to the groups of `scales`
    wanted        the part's columns among these
    scales        [rows, groups], as stored
    global_scale  fp32 [1] or [], of NVFP4
    zero_points   int32 [words, groups]: packed along the rows; None: the number 0 stands for the value 0
    zero_rows     the part's rows among the rows of `zero_points`, after unpacking
    """

    format: str
    num_bits: int
    numbers: Tensor
    in_groups: slice
    wanted: slice
    scales: Tensor
    global_scale: Tensor | None = None
    zero_points: Tensor | None = None
    zero_rows: slice | None = None

    def values(self, dtype: torch.dtype) -> Tensor:
        scale = self._scales()[..., None]
        numbers = self._numbers()[:, self.in_groups].unflatten(1, (self.scales.shape[1], -1)).to(scale.dtype)
        if self.zero_points is not None:
            assert self.zero_rows is not None
            zero = unpacked(self.zero_points.T, self.num_bits).T[self.zero_rows]
            numbers = numbers - zero.to(scale.dtype)[..., None]
        values = (numbers * scale).flatten(1)
        values = values.bfloat16() if self.format == "nvfp4-pack-quantized" else values
        return values[:, self.wanted].to(dtype)

    def _numbers(self) -> Tensor:
        """The stored numbers, without scales: [rows, columns]"""
        if self.format == "pack-quantized":
            return unpacked(self.numbers, self.num_bits)
        return self.numbers.bfloat16() if self.format == "mxfp8-quantized" else unpacked_fp4(self.numbers).bfloat16()

    def _scales(self) -> Tensor:
        """The scales [rows, groups], in the type in which numbers are multiplied with them."""
        if self.format == "nvfp4-pack-quantized":
            assert self.global_scale is not None
            return self.scales.bfloat16() / self.global_scale
        return self.scales if self.format == "pack-quantized" else powers_of_2(self.scales).bfloat16()


def unpacked(words: Tensor, num_bits: int) -> Tensor:
    """The integers that are packed in int32 words [rows, words], as int8 [rows, numbers].  num_bits: 4 or 8

    Numbers are stored with an offset of 2^(num_bits - 1).  0x0000_00F1, 4 bits -> -7, 7, -8, -8, -8, -8, -8, -8
    """
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # a view needs a stride of 1
    if num_bits == 4:
        octets = torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(1)
    return (octets.to(torch.int16) - (1 << (num_bits - 1))).to(torch.int8)
