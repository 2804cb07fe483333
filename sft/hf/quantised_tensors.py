"""Quantises tensors for an export: the tensors that are stored for one, and how far their values are from the given.

`quantization.py` describes the formats, `sft/low_bits` has their arithmetic, and the readers of this package read what
is stored here.  A matrix is quantised in blocks of rows, so the memory of intermediate results does not grow with it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sft.errors import CheckpointError
from sft.hf.mxfp4 import BLOCKS, SCALES
from sft.hf.packed import GLOBAL, SCALE, SHAPE, ZERO
from sft.hf.quantization import Mxfp4, Quantised, Scheme
from sft.hf.safetensors_files import DTYPES
from sft.low_bits import fp4, fp8, grouped
from sft.low_bits.fp4 import TransposedMxfp4
from sft.low_bits.part import StoredPart

_BLOCK_ELEMENTS = 1 << 22  # elements of a matrix that are quantised together, unless 128 rows have more
_ROWS = 128  # blocks of rows begin at multiples of this number


@dataclass(frozen=True)
class QuantisationError:
    """The difference between the values of a tensor and those of its stored form.

    squares: the sum of the squared differences, and that of the squared values; largest: the largest difference
    """

    squares: tuple[float, float]
    largest: float

    @property
    def relative_rms(self) -> float:
        """The root of the mean squared difference, relative to that of the values; 0 for a tensor of zeros."""
        difference, values = self.squares
        return math.sqrt(difference / values) if values else 0.0


def planned(scheme: Quantised, name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Type and shape of the tensors that are stored for the tensor `name`, on the meta device.

    scheme: with blocks, if it is a `Scheme`
    """
    *outer, rows, columns = shape
    if isinstance(scheme, Mxfp4):  # stored transposed
        groups = (*outer, columns, rows // fp4.GROUP)
        return {name + BLOCKS: _meta(torch.uint8, *groups, fp4.GROUP // 2), name + SCALES: _meta(torch.uint8, *groups)}
    if isinstance(scheme, Scheme):
        assert scheme.block is not None
        blocks = (*outer, -(-rows // scheme.block[0]), -(-columns // scheme.block[1]))
        scale = _meta(torch.float32, *blocks)
        return {scheme.scale_of(name): scale, name: _meta(torch.float8_e4m3fn, *shape)}
    module, integers = name.removesuffix("weight"), scheme.format == "pack-quantized"
    groups = (rows, 1 if scheme.group is None else columns // scheme.group)
    others = {SHAPE: _meta(torch.int64, 2), GLOBAL: _meta(torch.float32, 1)}
    scales = {"pack-quantized": torch.bfloat16, "nvfp4-pack-quantized": torch.float8_e4m3fn}
    width = -(-columns * scheme.num_bits // (grouped.WORD if integers else 8))
    numbers = torch.int32 if integers else torch.uint8 if scheme.num_bits == 4 else torch.float8_e4m3fn
    return {
        **{module + part: others[part] for part in scheme.beside},
        module + scheme.data: _meta(numbers, rows, width),
        module + SCALE: _meta(scales.get(scheme.format, torch.uint8), *groups),
    }


def quantised(
    scheme: Quantised, name: str, values: Tensor, plan: Mapping[str, Tensor], whole: Tensor | None = None
) -> tuple[dict[str, Tensor], QuantisationError]:
    """The tensors of `plan` for the tensor `name`, in the order of `plan`, and their error.

    plan: see `planned`, or those of a file; other tensors in it, such as scales of activations, are left out
    whole: the global scale of NVFP4
    Raises CheckpointError if a value is not finite.
    """
    parts: dict[str, list[Tensor]] = {}
    differences = squares = largest = 0.0
    for matrix, bound in _matrices(scheme, name, values, plan):
        unit = math.lcm(_ROWS, scheme.block[0]) if isinstance(scheme, Scheme) and scheme.block else _ROWS
        step = max(1, _BLOCK_ELEMENTS // matrix.shape[1] // unit) * unit
        for first in range(0, len(matrix), step):
            rows = matrix[first : first + step].float()
            if not rows.isfinite().all():
                raise CheckpointError(
                    f"{name} has numbers that are not finite, which no quantised format holds.  Export with --format "
                    "bf16, or export another checkpoint."
                )
            part, tensors = _part(scheme, name, rows, plan, bound if whole is None else whole)
            for stored_name, tensor in tensors.items():
                parts.setdefault(stored_name, []).append(tensor)
            rounded = part.values(DTYPES[scheme.dtype])
            difference = (rounded.mT if isinstance(scheme, Mxfp4) else rounded).float() - rows
            differences += float(torch.linalg.vector_norm(difference, dtype=torch.float64)) ** 2
            squares += float(torch.linalg.vector_norm(rows, dtype=torch.float64)) ** 2
            largest = max(largest, float(difference.abs().amax()))
    stored = {name: _joined(plan[name], parts[name]) for name in plan if name in parts}
    return stored, QuantisationError((differences, squares), largest)


def _matrices(
    scheme: Quantised, name: str, values: Tensor, plan: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The matrices of a tensor as they are stored, and for each the magnitude to which all its rows are scaled.

    None: every row, block or group has its own scale.
    """
    values = values.mT if isinstance(scheme, Mxfp4) else values
    matrices = values.reshape(-1, *values.shape[-2:])
    bounds: list[Tensor | None] = [None] * len(matrices)
    if isinstance(scheme, Scheme) and scheme.block is None:
        scale = plan[scheme.scale_of(name)]
        if scale.numel() == 1 or scale.shape[-2:] == (1, 1):
            bounds = [matrix.abs().amax() for matrix in matrices]
        if scale.numel() == 1:
            bounds = [torch.stack([bound for bound in bounds if bound is not None]).amax()] * len(matrices)
    yield from zip(matrices, bounds)


def _part(
    scheme: Quantised, name: str, rows: Tensor, plan: Mapping[str, Tensor], bound: Tensor | None
) -> tuple[StoredPart, dict[str, Tensor]]:
    """The stored form of some rows, and its tensors by name.  bound: see `_matrices`, or the global scale of NVFP4"""
    if isinstance(scheme, Mxfp4):
        transposed = TransposedMxfp4.quantised(rows.mT)
        return transposed, {name + BLOCKS: transposed.blocks, name + SCALES: transposed.scales}
    if isinstance(scheme, Scheme):
        block = (1, rows.shape[1]) if scheme.block is None else scheme.block
        dtype = plan[scheme.scale_of(name)].dtype
        part = fp8.quantised(rows, block, dtype=dtype, powers=scheme.powers, largest=bound)
        return part, {scheme.scale_of(name): part.scales, name: part.numbers}
    module = name.removesuffix("weight")
    packed = grouped.quantised(
        rows,
        scheme.format,
        scheme.num_bits,
        scheme.group or rows.shape[1],
        dtype=plan[module + SCALE].dtype,
        symmetric=scheme.symmetric,
        whole=bound,
    )
    tensors = {module + scheme.data: packed.numbers, module + SCALE: packed.scales}
    if packed.zero_points is not None:
        tensors[module + ZERO] = packed.zero_points
    if packed.global_scale is not None:
        tensors[module + GLOBAL] = packed.global_scale
    if SHAPE in scheme.beside:
        tensors[module + SHAPE] = torch.tensor([len(rows), rows.shape[1]])
    return packed, tensors


def _joined(plan: Tensor, parts: list[Tensor]) -> Tensor:
    """The stored tensor of the parts of its rows."""
    if plan.shape == (2,) and plan.dtype in (torch.int32, torch.int64):  # weight_shape
        shape = torch.stack(parts)
        return torch.stack((shape[:, 0].sum(), shape[0, 1])).to(plan.dtype)
    joined = torch.cat([part.reshape(-1) for part in parts])
    if joined.numel() > plan.numel():  # every part has the same scales
        joined = joined[:: joined.numel() // plan.numel()]
    return joined.reshape(plan.shape)


def _meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
