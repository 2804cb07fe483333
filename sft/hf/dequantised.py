"""Dequantises FP8 weights to the type of the model while they are read.

A weight is the stored FP8 value times the scale of its matrix, row or block.  Readers of the folder see the names,
shapes and types of the model before it was quantised, and no scales.  `quantization.py` defines which
quantization_config is supported.
"""

import math
from dataclasses import replace
from pathlib import Path

from sft.errors import CheckpointError, first_few
from sft.hf.quantization import Scheme
from sft.hf.safetensors_files import DTYPES, SafetensorsFolder, StoredTensor, as_checkpoint_error
from sft.hf.tensor_check import fold_by_layer
from sft.low_bits.fp8 import Fp8Part, ScaleIndex

FP8 = "F8_E4M3"


class DequantisedFolder(SafetensorsFolder):
    """The tensors of a folder with FP8 weights, dequantised by `scheme`.

    Raises CheckpointError that names FP8 weights without a usable scale.
    """

    number_format = "FP8"

    def __init__(self, folder: Path, scheme: Scheme) -> None:
        super().__init__(folder)
        self._dtype = DTYPES[scheme.dtype]
        self._scales: dict[str, StoredTensor] = {}  # the scale of each FP8 tensor, by the name of the FP8 tensor
        self.dequantised = self._scales.keys()
        self._scheme, used, unusable = scheme, set(), []
        for name, tensor in self.tensors.items():
            if tensor.dtype == FP8:
                scale = self.tensors.get(scheme.scale_of(name))
                if scale is None or not _fits(scale, tensor, scheme.block):
                    unusable.append(name)
                    continue
                self._scales[name] = scale
                used |= {scheme.scale_of(name), *scheme.activation_scales_of(name)}
        if unusable:
            shape = f"one number per block of {scheme.block[0]} x {scheme.block[1]}" if scheme.block else "one number"
            raise CheckpointError(
                f"{folder} has FP8 weights without a usable scale (a floating-point tensor with the name of the weight "
                f"and {scheme.suffix}; {shape}): {', '.join(first_few(fold_by_layer(unusable)))}."
            )
        self.tensors = {name: self._after(name, tensor) for name, tensor in self.tensors.items() if name not in used}

    def stored_names(self, name: str) -> list[str]:
        if name not in self._scales:
            return [name]
        others = [self._scheme.scale_of(name), *self._scheme.activation_scales_of(name)]
        return [name, *(other for other in others if other in self.stored_tensors)]

    def _after(self, name: str, tensor: StoredTensor) -> StoredTensor:
        if name not in self._scales:
            return tensor
        return replace(tensor, dtype=self._scheme.dtype, num_bytes=math.prod(tensor.shape) * self._dtype.itemsize)

    def _stored_part(self, name: str, where: tuple[int | slice, ...]) -> Fp8Part:
        scale_name, sizes = self._scheme.scale_of(name), self._scales[name].shape
        with as_checkpoint_error(self._scales[name].file):
            scale = self._map(scale_name).get_tensor(scale_name)
        self.requested_bytes += self._scales[name].num_bytes
        scale = scale.reshape([1] * (len(where) - len(sizes)) + list(sizes))
        whole, block, indices = self.tensors[name].shape, self._scheme.block, list[ScaleIndex | None]()
        for axis, wanted in enumerate(where):
            is_index, wanted = isinstance(wanted, int), slice(wanted, wanted + 1) if isinstance(wanted, int) else wanted
            start, stop, step = wanted.start, wanted.stop, wanted.step or 1
            if scale.shape[axis] == 1:
                index = None
            else:
                size = 1 if block is None or scale.shape[axis] == whole[axis] else block[axis - len(where) + 2]
                first, last = start // size, -(-stop // size)
                scale = scale.narrow(axis, first, last - first)
                count = len(range(start, stop, step))
                index = ScaleIndex(first=start - first * size, count=count, step=step, block=size)
            if not is_index:
                indices.append(index)
        kept = [size for size, wanted in zip(scale.shape, where) if isinstance(wanted, slice)]
        return Fp8Part(numbers=self._raw_part(name, where), scales=scale.reshape(kept), indices=tuple(indices))


def _fits(scale: StoredTensor, tensor: StoredTensor, block: tuple[int, int] | None) -> bool:
    """Whether `scale` has the shape of the scales of `tensor`: one element per block of `block` rows and columns.

    If `block` is None: one element per tensor, per matrix or per row.
    """
    if scale.dtype not in DTYPES or len(tensor.shape) < 2:
        return False
    *outer, rows, columns = tensor.shape
    if block is not None:
        return scale.shape == (*outer, -(-rows // block[0]), -(-columns // block[1]))
    return math.prod(scale.shape) == 1 or scale.shape in ((*outer, rows, 1), (*outer, 1, 1))
