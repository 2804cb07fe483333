"""Dequantises MXFP4 experts (gpt-oss) to the type of the model while they are read.

A block of 32 elements of a row is stored as 16 bytes and a scale.  Each byte has two elements of 4 bits.  The scale is
one byte, the biased exponent of a power of 2.  The files have matrices [outputs, inputs].  transformers and exports
have the transposed matrices:

    X_blocks uint8 [experts, rows, columns / 32, 16], X_scales uint8 [experts, rows, columns / 32]
    -> X [experts, columns, rows]

Readers of the folder see the tensors X of the model before it was quantised.  Source of the format: OCP Microscaling
Formats (MX) 1.0.
"""

import math
from dataclasses import replace
from pathlib import Path

import torch

from sft.errors import CheckpointError, first_few
from sft.hf.quantization import Mxfp4
from sft.hf.safetensors_files import DTYPES, SafetensorsFolder, StoredTensor
from sft.hf.tensor_check import fold_by_layer

_BLOCKS, _SCALES, _UINT8 = "_blocks", "_scales", "U8"
_SIZE = 32  # number of elements that share a scale
EXPONENT_BIAS = 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # value by the lowest three bits; the fourth bit is the sign


class Mxfp4Folder(SafetensorsFolder):
    """The tensors of a folder with MXFP4 experts.  Raises CheckpointError that names blocks without usable scales."""

    number_format = "MXFP4"

    def __init__(self, folder: Path, scheme: Mxfp4) -> None:
        super().__init__(folder)
        self._dtype, stored = DTYPES[scheme.dtype], self.tensors
        names = [name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)]
        unusable = [name for name in names if not _fits(stored[name + _BLOCKS], stored.get(name + _SCALES))]
        if unusable:
            raise CheckpointError(
                f"{folder} has MXFP4 blocks without usable scales (uint8 blocks [experts, rows, columns / 32, 16] "
                f"need uint8 scales [experts, rows, columns / 32]): {', '.join(first_few(fold_by_layer(unusable)))}."
            )
        self.dequantised = frozenset(names)
        used = {name + suffix for name in names for suffix in (_BLOCKS, _SCALES)}
        self.tensors = {name: tensor for name, tensor in stored.items() if name not in used}
        self.tensors |= {name: self._after(stored[name + _BLOCKS], scheme) for name in names}

    def _after(self, blocks: StoredTensor, scheme: Mxfp4) -> StoredTensor:
        experts, rows, groups, _ = blocks.shape
        shape = (experts, groups * _SIZE, rows)
        return replace(blocks, dtype=scheme.dtype, shape=shape, num_bytes=math.prod(shape) * self._dtype.itemsize)

    def _part(self, name: str, where: tuple[int | slice, ...]) -> torch.Tensor:
        if name not in self.dequantised:
            return super()._part(name, where)
        expert, columns, rows = where
        assert isinstance(columns, slice) and columns.step in (None, 1)
        first, last = columns.start // _SIZE, -(-columns.stop // _SIZE)
        blocks, scales = (
            super(Mxfp4Folder, self)._part(name + suffix, (expert, rows, slice(first, last)))
            for suffix in (_BLOCKS, _SCALES)
        )
        numbers = dequantised(blocks, scales).to(self._dtype)
        return numbers[..., columns.start - first * _SIZE : columns.stop - first * _SIZE].mT


def dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The dequantised values, fp32 [..., groups * 32].

    blocks: uint8 [..., groups, 16]; scales: uint8 [..., groups]
    The lower four bits of a byte are its first element: byte 0x72 with scale 128, a factor of 2 -> 2.0 and 12.0
    """
    pairs = fp4_pairs().index_select(0, blocks.flatten().to(torch.int32)).view(*blocks.shape[:-1], _SIZE)
    exponents = (scales.to(torch.int32) - EXPONENT_BIAS)[..., None]
    return torch.ldexp(pairs, exponents).flatten(-2)


def fp4_pairs() -> torch.Tensor:
    """fp32 [256, 2]: the two elements of each byte, without scale."""
    numbers = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)])
    byte = torch.arange(256)
    return torch.stack((numbers[byte % 16], numbers[byte // 16]), dim=1)


def _fits(blocks: StoredTensor, scales: StoredTensor | None) -> bool:
    if scales is None or (blocks.dtype, scales.dtype) != (_UINT8, _UINT8):
        return False
    return len(blocks.shape) == 4 and blocks.shape[-1] == _SIZE // 2 and scales.shape == blocks.shape[:-1]
