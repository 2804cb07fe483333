"""FP4 numbers (E2M1), two in a byte, and scales that are powers of 2.

Source: OCP Microscaling Formats (MX) 1.0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sft.low_bits.part import StoredPart

GROUP = 32  # number of elements of a row that share a scale
EXPONENT_BIAS = 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # value by the lowest three bits; the fourth bit is the sign


def fp4_pairs(device: torch.device | None = None) -> Tensor:
    """fp32 [256, 2]: the two elements of each byte, without scale.  The lower four bits are the first element."""
    numbers = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((numbers[byte % 16], numbers[byte // 16]), dim=1)


def unpacked_fp4(octets: Tensor) -> Tensor:
    """uint8 [..., n] -> fp32 [..., 2 n], without scale"""
    pairs = fp4_pairs(octets.device).index_select(0, octets.flatten().to(torch.int32))
    return pairs.view(*octets.shape[:-1], -1)


def powers_of_2(scales: Tensor) -> Tensor:
    """fp32 powers of 2 of biased exponents (uint8): 128 -> 2.0"""
    ones = torch.ones(scales.shape, device=scales.device)
    return torch.ldexp(ones, scales.to(torch.int32) - EXPONENT_BIAS)


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """The dequantised values of MXFP4, fp32 [..., groups * 32].

    blocks: uint8 [..., groups, 16]; scales: uint8 [..., groups], biased exponents
    Byte 0x72 with scale 128, a factor of 2 -> 2.0 and 12.0
    """
    exponents = (scales.to(torch.int32) - EXPONENT_BIAS)[..., None]
    return torch.ldexp(unpacked_fp4(blocks), exponents).flatten(-2)


@dataclass(frozen=True, kw_only=True)
class TransposedMxfp4(StoredPart):
    """A part [..., columns, rows] of a tensor whose transpose [..., rows, columns] is stored in MXFP4 (gpt-oss).

    blocks: uint8 [..., rows, groups, 16]; scales: uint8 [..., rows, groups]
    first, count: the part's columns begin at column `first` of the first group
    """

    blocks: Tensor
    scales: Tensor
    first: int
    count: int

    def values(self, dtype: torch.dtype) -> Tensor:
        numbers = dequantised(self.blocks, self.scales).to(dtype)
        return numbers[..., self.first : self.first + self.count].mT
