"""FP4 numbers (E2M1), two in a byte, and scales that are powers of 2.

Values are rounded to the nearest number, and ties to the number whose lowest bit is 0.  A group is scaled so that its
largest magnitude lies from 3.5 to below 7.  Numbers above 6 become 6, which is at most half a step away.

Source: OCP Microscaling Formats (MX) 1.0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sft.low_bits.part import StoredPart

GROUP = 32  # number of elements of a row that share a scale
EXPONENT_BIAS = 127
LARGEST = 6.0
_POSITIVE = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    LARGEST,
)  # value by the lowest three bits; the fourth bit is the sign
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between successive values


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


def packed_fp4(numbers: Tensor) -> Tensor:
    """fp32 [..., 2 n] -> the nearest FP4 numbers, uint8 [..., n].  2.4, -12.0 -> 0xF4, which are 2.0 and -6.0"""
    middles = torch.tensor(_MIDDLES, device=numbers.device)
    below = torch.nextafter(middles, torch.zeros_like(middles))
    upwards = torch.arange(len(_MIDDLES), device=numbers.device) % 2 == 1  # where the larger value has a lowest bit 0
    codes = torch.bucketize(numbers.abs().contiguous(), torch.where(upwards, below, middles), out_int32=True)
    codes = (codes + 8 * numbers.signbit()).to(torch.uint8).unflatten(-1, (-1, 2))
    return codes[..., 0] | (codes[..., 1] << 4)


def exponents_for(largest: Tensor, largest_exponent: int) -> Tensor:
    """The biased exponents (uint8) of the scales of groups.  largest: fp32, the largest magnitude of each group

    largest_exponent: the exponent of the largest number of the format, 2 for the 6 of FP4
    FP4: 6.0 and 4.0 -> 127, a scale of 1; 7.0 -> 128.  A group of zeros has exponent 0.
    """
    mantissa, exponent = torch.frexp(largest.float())  # the mantissa is at least 0.5 and below 1
    exponent = exponent - 1 + (mantissa >= 0.875) - largest_exponent + EXPONENT_BIAS
    return torch.where(largest == 0, 0, exponent.clamp(0, 254)).to(torch.uint8)


def quantised_mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [..., columns]: the numbers, uint8 [..., columns / 2], and the scales, uint8 [..., columns / 32]."""
    groups = values.float().unflatten(-1, (-1, GROUP))
    scales = exponents_for(groups.abs().amax(-1), 2)
    numbers = torch.ldexp(groups, EXPONENT_BIAS - scales.to(torch.int32)[..., None])
    return packed_fp4(numbers.flatten(-2)), scales


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

    @classmethod
    def quantised(cls, values: Tensor) -> "TransposedMxfp4":
        """Quantise [..., columns, rows].  The number of columns is a multiple of 32."""
        octets, scales = quantised_mxfp4(values.mT)
        return cls(
            blocks=octets.unflatten(-1, (-1, GROUP // 2)),
            scales=scales,
            first=0,
            count=values.shape[-2],
        )
