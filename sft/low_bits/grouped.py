"""Matrices in which a group of numbers of a row shares a scale, as the package compressed-tensors stores them.

    format                 number               scale                                         also stored
    pack-quantized         4 or 8 bits, int     floating point, per group of a row or row     weight_shape, zero points
    nvfp4-pack-quantized   4 bits, E2M1         E4M3 per 16 numbers, over a global scale      weight_global_scale
    mxfp4-pack-quantized   4 bits, E2M1         exponent of 2 per 32 numbers
    mxfp8-quantized        8 bits, E4M3         exponent of 2 per 32 numbers

Numbers of fewer than 8 bits are packed, the first one in the lowest bits.  Every operation and its type are as in
compressed-tensors, so the values are equal bit for bit.  `quantised` gives the numbers and scales that the package
gives for the same values in fp32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sft.low_bits import fp4, fp8
from sft.low_bits.fp4 import packed_fp4, powers_of_2, unpacked_fp4
from sft.low_bits.part import StoredPart

# The largest finite scale of NVFP4 times the largest number; a global scale divides it by the largest magnitude.
NVFP4_RANGE = fp8.LARGEST * fp4.LARGEST
_LEAST_E4M3, _LEAST_BF16 = (
    0.125,
    0.0078125,
)  # scales that compressed-tensors gives to groups whose scale would be 0
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


def packed(numbers: Tensor, num_bits: int) -> Tensor:
    """The inverse of `unpacked`: int8 [rows, numbers] -> int32 [rows, words].  Zeros end the last word."""
    octets = (numbers.to(torch.int16) + (1 << (num_bits - 1))).to(torch.uint8)
    octets = torch.nn.functional.pad(octets, (0, -octets.shape[1] % (WORD // num_bits)))
    if num_bits == 4:
        octets = octets[:, ::2] | (octets[:, 1::2] << 4)
    return octets.contiguous().view(torch.int32)


def global_scale(largest: Tensor) -> Tensor:
    """The global scale of NVFP4, fp32 [1], of weights whose largest magnitude is `largest`; 1 if this is 0."""
    scale = NVFP4_RANGE / largest.float().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.nan_to_num(scale, nan=1.0, posinf=1.0).reshape(1)


def quantised(
    values: Tensor,
    format: str,
    num_bits: int,
    group: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    symmetric: bool = True,
    whole: Tensor | None = None,
) -> GroupedPart:
    """Quantise a matrix [rows, columns].  The number of columns is a multiple of `group`.

    dtype: type of the scales of integers; symmetric: whether integers have no zero points
    whole: the global scale of NVFP4
    """
    groups, zeros = values.float().unflatten(1, (-1, group)), None
    largest = groups.abs().amax(-1)
    if format == "pack-quantized":
        limit = 1 << (num_bits - 1)
        lowest, highest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = largest / (limit - 0.5) if symmetric else (highest - lowest) / (2 * limit - 1)
        scales = _without_zeros(scales.to(dtype), _LEAST_BF16)
        numbers = groups / scales.float()[..., None]
        if not symmetric:
            zero = (-limit - lowest / scales.float()).clamp(-limit, limit - 1).round()
            numbers, zeros = numbers + zero[..., None], packed(zero.T.to(torch.int8), num_bits).T
        stored = packed(numbers.clamp_(-limit, limit - 1).round_().flatten(1).to(torch.int8), num_bits)
    elif format == "nvfp4-pack-quantized":
        assert whole is not None
        scales = (whole * (largest / fp4.LARGEST)).clamp(max=fp8.LARGEST).to(torch.float8_e4m3fn)
        scales = _without_zeros(scales.float(), _LEAST_E4M3).to(torch.float8_e4m3fn)
        stored = packed_fp4((groups / (scales.float() / whole)[..., None]).flatten(1))
    elif format == "mxfp4-pack-quantized":
        stored, scales = fp4.quantised_mxfp4(values)
    else:
        scales = fp4.exponents_for(largest, 8)
        numbers = torch.ldexp(groups, fp4.EXPONENT_BIAS - scales.to(torch.int32)[..., None])
        stored = numbers.clamp_(-fp8.LARGEST, fp8.LARGEST).flatten(1).to(torch.float8_e4m3fn)
    return GroupedPart(
        format=format,
        num_bits=num_bits,
        numbers=stored,
        in_groups=slice(0, values.shape[1]),
        wanted=slice(0, values.shape[1]),
        scales=scales,
        global_scale=whole,
        zero_points=zeros,
        zero_rows=None if zeros is None else slice(0, values.shape[0]),
    )


def _without_zeros(scales: Tensor, instead: float) -> Tensor:
    return torch.where(scales == 0, torch.full_like(scales, instead), scales)
