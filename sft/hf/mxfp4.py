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

from sft.errors import CheckpointError, first_few
from sft.hf.quantization import Mxfp4
from sft.hf.safetensors_files import DTYPES, SafetensorsFolder, StoredTensor
from sft.hf.tensor_check import fold_by_layer
from sft.low_bits.fp4 import GROUP, TransposedMxfp4

BLOCKS, SCALES, _UINT8 = "_blocks", "_scales", "U8"


class Mxfp4Folder(SafetensorsFolder):
    """The tensors of a folder with MXFP4 experts.  Raises CheckpointError that names blocks without usable scales."""

    number_format = "MXFP4"

    def __init__(self, folder: Path, scheme: Mxfp4) -> None:
        super().__init__(folder)
        self._dtype, stored = DTYPES[scheme.dtype], self.tensors
        names = [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]
        unusable = [name for name in names if not _fits(stored[name + BLOCKS], stored.get(name + SCALES))]
        if unusable:
            raise CheckpointError(
                f"{folder} has MXFP4 blocks without usable scales (uint8 blocks [experts, rows, columns / 32, 16] "
                f"need uint8 scales [experts, rows, columns / 32]): {', '.join(first_few(fold_by_layer(unusable)))}."
            )
        self.dequantised = frozenset(names)
        used = {name + suffix for name in names for suffix in (BLOCKS, SCALES)}
        self.tensors = {name: tensor for name, tensor in stored.items() if name not in used}
        self.tensors |= {name: self._after(stored[name + BLOCKS], scheme) for name in names}

    def stored_names(self, name: str) -> list[str]:
        return [name + BLOCKS, name + SCALES] if name in self.dequantised else [name]

    def _after(self, blocks: StoredTensor, scheme: Mxfp4) -> StoredTensor:
        experts, rows, groups, _ = blocks.shape
        shape = (experts, groups * GROUP, rows)
        return replace(blocks, dtype=scheme.dtype, shape=shape, num_bytes=math.prod(shape) * self._dtype.itemsize)

    def _stored_part(self, name: str, where: tuple[int | slice, ...]) -> TransposedMxfp4:
        expert, columns, rows = where
        assert isinstance(columns, slice) and columns.step in (None, 1)
        first, last = columns.start // GROUP, -(-columns.stop // GROUP)
        blocks, scales = (
            self._raw_part(name + suffix, (expert, rows, slice(first, last))) for suffix in (BLOCKS, SCALES)
        )
        count = columns.stop - columns.start
        return TransposedMxfp4(blocks=blocks, scales=scales, first=columns.start - first * GROUP, count=count)


def _fits(blocks: StoredTensor, scales: StoredTensor | None) -> bool:
    if scales is None or (blocks.dtype, scales.dtype) != (_UINT8, _UINT8):
        return False
    return len(blocks.shape) == 4 and blocks.shape[-1] == GROUP // 2 and scales.shape == blocks.shape[:-1]
