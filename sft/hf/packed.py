"""Dequantises weights of compressed-tensors in which a group of numbers of a row shares a scale, while they are read.

    format                 number               scale                                         also stored
    pack-quantized         4 or 8 bits, int     floating point, per group of a row or row     weight_shape, zero points
    nvfp4-pack-quantized   4 bits, E2M1         E4M3 per 16 numbers, over a global scale      weight_global_scale
    mxfp4-pack-quantized   4 bits, E2M1         exponent of 2 per 32 numbers
    mxfp8-quantized        8 bits, E4M3         exponent of 2 per 32 numbers

Numbers of fewer than 8 bits are packed, the first one in the lowest bits.  Every operation and its type are as in the
package compressed-tensors, so the values are equal bit for bit.  Readers of the folder see the tensors of the model
before it was quantised.  `quantization.py` defines which quantization_config is supported.
"""

import math
from dataclasses import replace
from pathlib import Path

import torch

from sft.errors import CheckpointError, first_few
from sft.hf.mxfp4 import EXPONENT_BIAS, fp4_pairs
from sft.hf.quantization import ACTIVATION_SCALES, Packed
from sft.hf.safetensors_files import DTYPES, SafetensorsFolder, StoredTensor, as_checkpoint_error
from sft.hf.tensor_check import fold_by_layer

_SCALE, _GLOBAL, _SHAPE, _ZERO = "weight_scale", "weight_global_scale", "weight_shape", "weight_zero_point"
_WORD = 32  # bits of a stored word, which contains several packed numbers
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
_BESIDE_TYPES = {_SHAPE: ("I32", "I64"), _GLOBAL: ("F32",), _ZERO: ("I32",)}


class PackedFolder(SafetensorsFolder):
    """The tensors of a folder with packed weights.  Raises CheckpointError that names weights without usable scales."""

    def __init__(self, folder: Path, scheme: Packed) -> None:
        super().__init__(folder)
        self._scheme, self._dtype, stored = scheme, DTYPES[scheme.dtype], self.tensors
        self.number_format = scheme.number_format
        self._data = "weight" if scheme.format == "mxfp8-quantized" else "weight_packed"
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
        beside = [self._data, _SCALE, *scheme.beside, "input_global_scale", *ACTIVATION_SCALES]
        used = {f"{module}.{part}" for module in modules for part in beside}
        self.tensors = {name: tensor for name, tensor in stored.items() if name not in used}
        self.tensors |= {
            f"{module}.weight": self._after(stored[f"{module}{ending}"], f"{module}.weight") for module in modules
        }

    def _after(self, data: StoredTensor, name: str) -> StoredTensor:
        shape = self._shapes[name]
        return replace(data, dtype=self._scheme.dtype, shape=shape, num_bytes=math.prod(shape) * self._dtype.itemsize)

    def _shape(self, module: str) -> tuple[int, int] | None:
        """Rows and columns of a weight, from the sizes of its tensors; None if these do not fit together."""
        scheme, bits = self._scheme, self._scheme.num_bits
        data, scale = self.tensors[f"{module}.{self._data}"], self.tensors.get(f"{module}.{_SCALE}")
        is_double = self._data != "weight" and f"{module}.weight" in self.tensors
        if scale is None or is_double or len(data.shape) != 2 or len(scale.shape) != 2:
            return None
        rows, width = data.shape
        per_element = (_WORD if scheme.format == "pack-quantized" else 8) // bits
        columns = width * per_element if scheme.group is None else scale.shape[1] * scheme.group
        groups = 1 if scheme.group is None else scale.shape[1]
        zeros = (-(-rows * bits // _WORD), groups)
        shapes: dict[str, list[tuple[int, ...]]] = {_SHAPE: [(2,)], _GLOBAL: [(1,), ()], _ZERO: [zeros]}
        data_type, scale_types, _ = _TYPES[scheme.format]
        fits = data.dtype == data_type and scale.dtype in scale_types and scale.shape == (rows, groups)
        for part in scheme.beside:
            tensor = self.tensors.get(f"{module}.{part}")
            fits = fits and tensor is not None and tensor.dtype in _BESIDE_TYPES[part] and tensor.shape in shapes[part]
        return (rows, columns) if fits and columns > 0 and width == -(-columns // per_element) else None

    def _part(self, name: str, where: tuple[int | slice, ...]) -> torch.Tensor:
        if name not in self._shapes:
            return super()._part(name, where)
        rows, wanted = where
        assert isinstance(rows, slice) and isinstance(wanted, slice)
        module, group = name.removesuffix(".weight"), self._scheme.group
        self._check_shape(module)
        # The numbers and groups that contain the wanted columns.
        groups = slice(0, 1) if group is None else slice(wanted.start // group, -(-wanted.stop // group))
        first, last = (wanted.start, wanted.stop) if group is None else (groups.start * group, groups.stop * group)
        numbers = self._numbers(module, rows, first, last).unflatten(1, (groups.stop - groups.start, -1))
        scale = self._scale(module, rows, groups)[..., None]
        numbers = numbers.to(scale.dtype)
        if _ZERO in self._scheme.beside:
            numbers = numbers - self._zero_point(module, rows, groups).to(scale.dtype)[..., None]
        values = (numbers * scale).flatten(1)
        values = values.bfloat16() if self._scheme.format == "nvfp4-pack-quantized" else values
        return values[:, wanted.start - first : wanted.stop - first : wanted.step].to(self._dtype)

    def _numbers(self, module: str, rows: slice, first: int, last: int) -> torch.Tensor:
        """The stored numbers of the columns from `first` to before `last`, without scales: [rows, last - first]"""
        bits, data = self._scheme.num_bits, f"{module}.{self._data}"
        if self._scheme.format == "mxfp8-quantized":
            return super()._part(data, (rows, slice(first, last))).bfloat16()
        if self._scheme.format != "pack-quantized":
            pairs = super()._part(data, (rows, slice(first // 2, last // 2)))
            numbers = fp4_pairs().index_select(0, pairs.flatten().to(torch.int32))
            return numbers.view(len(pairs), -1).bfloat16()
        start = first * bits // _WORD
        words = super()._part(data, (rows, slice(start, -(-last * bits // _WORD))))
        begin = first - start * _WORD // bits
        return unpacked(words, bits)[:, begin : begin + last - first]

    def _scale(self, module: str, rows: slice, groups: slice) -> torch.Tensor:
        """The scales of the groups, [rows, groups], in the type in which numbers are multiplied with them."""
        scale = super()._part(f"{module}.{_SCALE}", (rows, groups))
        if self._scheme.format == "nvfp4-pack-quantized":
            name = f"{module}.{_GLOBAL}"
            with as_checkpoint_error(self._files[name]):
                return scale.bfloat16() / self._map(name).get_tensor(name)
        if self._scheme.format == "pack-quantized":
            return scale
        return torch.ldexp(torch.ones(scale.shape), scale.to(torch.int32) - EXPONENT_BIAS).bfloat16()

    def _zero_point(self, module: str, rows: slice, groups: slice) -> torch.Tensor:
        """The zero points, [rows, groups]: numbers that stand for the value 0.  Files pack them along rows."""
        bits = self._scheme.num_bits
        start = rows.start * bits // _WORD
        words = super()._part(f"{module}.{_ZERO}", (slice(start, -(-rows.stop * bits // _WORD)), groups))
        begin = rows.start - start * _WORD // bits
        return unpacked(words.T, bits).T[begin : begin + rows.stop - rows.start : rows.step]

    def _check_shape(self, module: str) -> None:
        """Raise CheckpointError if the values of weight_shape are another shape."""
        if _SHAPE not in self._scheme.beside or module in self._checked:
            return
        written, shape = super()._part(f"{module}.{_SHAPE}", (slice(0, 2),)).tolist(), self._shapes[f"{module}.weight"]
        if written != list(shape):
            raise CheckpointError(
                f"{self._files[f'{module}.{_SHAPE}']}: {module}.{_SHAPE} is {written}, but the sizes of {self._data} "
                f"and {_SCALE} give {list(shape)}.  Such a weight cannot be dequantised; copy the file again."
            )
        self._checked.add(module)


def unpacked(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The integers that are packed in int32 words [rows, words], as int8 [rows, numbers].  num_bits: 4 or 8

    Numbers are stored with an offset of 2^(num_bits - 1).  0x0000_00F1, 4 bits -> -7, 7, -8, -8, -8, -8, -8, -8
    """
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # a view needs a stride of 1
    if num_bits == 4:
        octets = torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(1)
    return (octets.to(torch.int16) - (1 << (num_bits - 1))).to(torch.int8)
