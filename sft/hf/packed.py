"""Dequantises weights of compressed-tensors in which a group of numbers of a row shares a scale, while they are read.

`sft/low_bits/grouped.py` describes the formats.  Readers of the folder see the tensors of the model before it was
quantised.  `quantization.py` defines which quantization_config is supported.
"""

import math
from dataclasses import replace
from pathlib import Path

import torch

from sft.errors import CheckpointError, first_few
from sft.hf.quantization import ACTIVATION_SCALES, Packed
from sft.hf.safetensors_files import DTYPES, SafetensorsFolder, StoredTensor, as_checkpoint_error
from sft.hf.tensor_check import fold_by_layer
from sft.low_bits.grouped import WORD, GroupedPart

SCALE, GLOBAL, SHAPE, ZERO = "weight_scale", "weight_global_scale", "weight_shape", "weight_zero_point"
# Types in safetensors of the stored numbers and of their scales, and an explanation of the tensors that must be there.
_TYPES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "pack-quantized": (
        "I32",
        tuple(DTYPES),
        "int32 weight_packed [rows, words], floating-point weight_scale [rows, groups of columns], weight_shape "
        "of two integers, and an int32 weight_zero_point if the weights are not symmetric",
    ),
    "nvfp4-pack-quantized": (
        "U8",
        ("F8_E4M3",),
        "uint8 weight_packed [rows, columns / 2], FP8 weight_scale [rows, columns / 16], fp32 weight_global_scale [1]",
    ),
    "mxfp4-pack-quantized": (
        "U8",
        ("U8",),
        "uint8 weight_packed [rows, columns / 2], uint8 weight_scale [rows, columns / 32]",
    ),
    "mxfp8-quantized": ("F8_E4M3", ("U8",), "FP8 weight [rows, columns], uint8 weight_scale [rows, columns / 32]"),
}
_BESIDE_TYPES = {SHAPE: ("I32", "I64"), GLOBAL: ("F32",), ZERO: ("I32",)}


class PackedFolder(SafetensorsFolder):
    """The tensors of a folder with packed weights.  Raises CheckpointError that names weights without usable scales."""

    def __init__(self, folder: Path, scheme: Packed) -> None:
        super().__init__(folder)
        self._scheme, self._dtype, stored = scheme, DTYPES[scheme.dtype], self.tensors
        self.number_format = scheme.number_format
        self._data = scheme.data
        ending = f".{self._data}"
        modules = [
            name.removesuffix(ending)
            for name, tensor in stored.items()
            if name.endswith(ending) and (ending != ".weight" or tensor.dtype == "F8_E4M3")
        ]
        shapes = {module: self._shape(module) for module in modules}
        unusable = [f"{module}{ending}" for module, shape in shapes.items() if shape is None]
        if unusable:
            raise CheckpointError(
                f"{folder} has {scheme.number_format} weights without usable scales ({_TYPES[scheme.format][2]}): "
                f"{', '.join(first_few(fold_by_layer(unusable)))}."
            )
        self._shapes = {f"{module}.weight": shape for module, shape in shapes.items() if shape is not None}
        self.dequantised = self._shapes.keys()
        self._checked: set[str] = set()  # modules whose weight_shape was compared
        used = {stored_name for module in modules for stored_name in self._stored_names(module)}
        self.tensors = {name: tensor for name, tensor in stored.items() if name not in used}
        self.tensors |= {
            f"{module}.weight": self._after(stored[f"{module}{ending}"], f"{module}.weight") for module in modules
        }

    def stored_names(self, name: str) -> list[str]:
        return self._stored_names(name.removesuffix(".weight")) if name in self.dequantised else [name]

    def _stored_names(self, module: str) -> list[str]:
        parts = [self._data, SCALE, *self._scheme.beside, "input_global_scale", *ACTIVATION_SCALES]
        return [name for part in parts if (name := f"{module}.{part}") in self.stored_tensors]

    def _after(self, data: StoredTensor, name: str) -> StoredTensor:
        shape = self._shapes[name]
        return replace(data, dtype=self._scheme.dtype, shape=shape, num_bytes=math.prod(shape) * self._dtype.itemsize)

    def _shape(self, module: str) -> tuple[int, int] | None:
        """Rows and columns of a weight, from the sizes of its tensors; None if these do not fit together."""
        scheme, bits = self._scheme, self._scheme.num_bits
        data, scale = self.tensors[f"{module}.{self._data}"], self.tensors.get(f"{module}.{SCALE}")
        is_double = self._data != "weight" and f"{module}.weight" in self.tensors
        if scale is None or is_double or len(data.shape) != 2 or len(scale.shape) != 2:
            return None
        rows, width = data.shape
        per_element = (WORD if scheme.format == "pack-quantized" else 8) // bits
        columns = width * per_element if scheme.group is None else scale.shape[1] * scheme.group
        groups = 1 if scheme.group is None else scale.shape[1]
        zeros = (-(-rows * bits // WORD), groups)
        shapes: dict[str, list[tuple[int, ...]]] = {SHAPE: [(2,)], GLOBAL: [(1,), ()], ZERO: [zeros]}
        data_type, scale_types, _ = _TYPES[scheme.format]
        fits = data.dtype == data_type and scale.dtype in scale_types and scale.shape == (rows, groups)
        for part in scheme.beside:
            tensor = self.tensors.get(f"{module}.{part}")
            fits = fits and tensor is not None and tensor.dtype in _BESIDE_TYPES[part] and tensor.shape in shapes[part]
        return (rows, columns) if fits and columns > 0 and width == -(-columns // per_element) else None

    def _stored_part(self, name: str, where: tuple[int | slice, ...]) -> GroupedPart:
        rows, wanted = where
        assert isinstance(rows, slice) and isinstance(wanted, slice)
        module, group, bits = name.removesuffix(".weight"), self._scheme.group, self._scheme.num_bits
        self._check_shape(module)
        # The groups that contain the wanted columns, and the stored numbers that contain these groups.
        groups = slice(0, 1) if group is None else slice(wanted.start // group, -(-wanted.stop // group))
        first, last = (wanted.start, wanted.stop) if group is None else (groups.start * group, groups.stop * group)
        per_element = (WORD if self._scheme.format == "pack-quantized" else 8) // bits
        elements = slice(first // per_element, -(-last // per_element))
        begin = first - elements.start * per_element
        zero_points, zero_rows = self._zero_points(module, rows, groups)
        return GroupedPart(
            format=self._scheme.format,
            num_bits=bits,
            numbers=self._raw_part(f"{module}.{self._data}", (rows, elements)),
            in_groups=slice(begin, begin + last - first),
            wanted=slice(wanted.start - first, wanted.stop - first, wanted.step),
            scales=self._raw_part(f"{module}.{SCALE}", (rows, groups)),
            global_scale=self._global_scale(module),
            zero_points=zero_points,
            zero_rows=zero_rows,
        )

    def _global_scale(self, module: str) -> torch.Tensor | None:
        name = f"{module}.{GLOBAL}"
        if GLOBAL not in self._scheme.beside:
            return None
        with as_checkpoint_error(self._files[name]):
            scale: torch.Tensor = self._map(name).get_tensor(name)
        return scale

    def _zero_points(self, module: str, rows: slice, groups: slice) -> tuple[torch.Tensor | None, slice | None]:
        """The words with the zero points of `rows`, and the rows among those of the words.  None: there are none"""
        if ZERO not in self._scheme.beside:
            return None, None
        bits = self._scheme.num_bits
        start = rows.start * bits // WORD
        words = self._raw_part(f"{module}.{ZERO}", (slice(start, -(-rows.stop * bits // WORD)), groups))
        begin = rows.start - start * WORD // bits
        return words, slice(begin, begin + rows.stop - rows.start, rows.step)

    def _check_shape(self, module: str) -> None:
        """Raise CheckpointError if the values of weight_shape are another shape."""
        if SHAPE not in self._scheme.beside or module in self._checked:
            return
        written, shape = self._raw_part(f"{module}.{SHAPE}", (slice(0, 2),)).tolist(), self._shapes[f"{module}.weight"]
        if written != list(shape):
            raise CheckpointError(
                f"{self._files[f'{module}.{SHAPE}']}: {module}.{SHAPE} is {written}, but the sizes of {self._data} "
                f"and {SCALE} give {list(shape)}.  Such a weight cannot be dequantised; copy the file again."
            )
        self._checked.add(module)
