"""Rounds fp32 values to bf16, or to int8 codes in blocks with a scale, up or down at random so that the mean is kept.

A moment changes by little in each step: with beta2 = 0.999, by up to 0.1 % of itself, while neighbouring values in bf16
differ by 0.4 to 0.8 %.  Rounding to the nearest would undo such changes.  So a value is rounded up with a probability
equal to its distance from the value below.

The random number of an element is a hash of its index in the parameter and of the step.  So a run that continues, and a
run with another number of data-parallel ranks, round alike.

int8: a block is 64 neighbouring elements of the flattened parameter; its scale in fp32 is the largest magnitude.  A
code is the index of (element / scale) in the dynamic map of 8-bit Adam (arXiv:2110.02861), which has more values near
0.  The map of bitsandbytes for signed values ends at -0.993; here it ends at -1.  So the largest element is stored
exactly, and quantising a dequantised block gives the same codes and scale.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from sft.config.train import INT8_BLOCK

# A block whose largest magnitude is below is stored as 0.  Products of it with the map are normal numbers.
_TINY = 2.0**-96


def dynamic_map(*, is_signed: bool) -> Tensor:
    """The values of the 256 codes, in rising order: fp32 [256].

    For each decade i from 1e-6 to 1, the middles of 2 ** i equal parts (unsigned: 2 ** (i + 1)) of its upper 90 %.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not is_signed)) + 1, dtype=torch.float64)
        values += ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)).tolist()
    if is_signed:
        negative = sorted(-value for value in values if value > 0.0)
        values += [-1.0, *negative[2:]]  # the lowest code is -1 instead of -0.993
    return torch.tensor(sorted(values), dtype=torch.float64).float()


def random_bits(step: int, start: int, number: int, device: torch.device) -> Tensor:
    """32 random bits for each of the elements `start` to `start + number - 1` of a parameter: int32 [number].

    The hash is lowbias32 of index and step.
    """
    seed = _mixed(step)
    bits = torch.arange(start, start + number, dtype=torch.int64, device=device).to(torch.int32)
    bits ^= seed - (1 << 32) if seed >= 1 << 31 else seed
    bits ^= (bits >> 16) & 0xFFFF
    bits *= 0x7FEB352D
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= 0x846CA68B - (1 << 32)
    return bits.bitwise_xor_((bits >> 16) & 0xFFFF)


def _mixed(step: int) -> int:
    """lowbias32 of a step, as an unsigned number."""
    bits = step * 0x9E3779B9 & 0xFFFFFFFF
    bits = (bits ^ bits >> 16) * 0x7FEB352D & 0xFFFFFFFF
    bits = (bits ^ bits >> 15) * 0x846CA68B & 0xFFFFFFFF
    return bits ^ bits >> 16


def to_bf16(values: Tensor, noise: Tensor | None) -> Tensor:
    """fp32 `values` in bf16: rounded at random by `noise`, int32 in [0, 65535]; None: to the nearest."""
    if noise is None:
        return values.bfloat16()
    return (values.view(torch.int32) + noise).bitwise_and_(-65536).view(torch.float32).bfloat16()


def to_int8(values: Tensor, table: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """fp32 `values` [n] as codes uint8 [n] and scales fp32 [ceil(n / 64)].  table: a result of `dynamic_map`

    noise: int32 [n] in [0, 65535]; None: round to the nearest.  With an unsigned table, a positive value never becomes
    0: Adam divides by its root.
    """
    blocks = _in_blocks(values)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    scales.masked_fill_(scales < _TINY, 0.0)
    ratios = (blocks / scales.clamp_min(_TINY)).mul_(scales > 0.0)
    below = (torch.bucketize(ratios, table, right=True) - 1).clamp_(0, 254)
    low, gap = table[below], table[below + 1]
    gap -= low
    share = 0.5 if noise is None else _in_blocks(noise).float().div_(65536.0)
    codes = below + (ratios - low > gap * share)
    if table[0] == 0.0:
        codes = codes.maximum((ratios > 0.0).to(codes.dtype))
    return codes.to(torch.uint8).view(-1)[: values.numel()], scales.view(-1)


def from_int8(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """The values of codes uint8 [n] with scales [ceil(n / 64)]: fp32 [n]."""
    values = _in_blocks(table[codes.int()])
    return values.mul_(scales.unsqueeze(1)).view(-1)[: codes.numel()]


def pieces(number: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and length of pieces of at most `size` elements, which begin at the first element of a block."""
    for start in range(0, number, size):
        yield start, min(size, number - start)


def _in_blocks(flat: Tensor) -> Tensor:
    """[n] -> [ceil(n / 64), 64], with zeros at the end."""
    missing = -flat.numel() % INT8_BLOCK
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, INT8_BLOCK)
