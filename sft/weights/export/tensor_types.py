"""Decides the type that each tensor of an export has before it is quantised, and converts tensors to it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from sft.errors import CheckpointError
from sft.hf.safetensors_writer import NAMES
from sft.hf.source import Expected
from sft.weights.export.original import Original
from sft.weights.export.trained_tensors import TrainedTensor
from sft.weights.torch_dist import TorchDistReader


def expected_tensors(
    tensors: Mapping[str, TrainedTensor],
    original: Original,
    reader: TorchDistReader,
    dtype: str | None,
    *,
    moves_bias: bool,
) -> dict[str, Expected]:
    """The tensors that the export must have, by name.

    dtype: type of all trained tensors; None: each keeps its type in the original
    moves_bias: whether the run changed the correction biases of routers
    """
    expected = dict(original.tensors or {})
    for name, tensor in tensors.items():
        if name not in expected:
            expected[name] = Expected(shape=tensor.shape, dtype=NAMES[tensor.dtype(reader)], role="trained")
        expected[name] = replace(expected[name], shape=tensor.shape)  # data.add_tokens adds rows
        if tensor.parts[0][0].is_buffer and moves_bias:
            expected[name] = replace(expected[name], dtype="F32")  # bf16 could round a change of the bias away
        if dtype is not None:
            expected[name] = replace(expected[name], dtype=NAMES[getattr(torch, dtype)])
    return expected


def converted(
    values: Iterable[tuple[str, torch.Tensor]], planned: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in their planned types.  Raises CheckpointError if a converted value is not finite."""
    for name, value in values:
        result = value.to(planned[name].dtype)
        if result is not value and not result.isfinite().all():
            raise CheckpointError(
                f"{name} has numbers that {NAMES[result.dtype]}, the type of the original, cannot hold.  Export "
                "with --dtype float32."
            )
        yield name, result


def main_dtype(planned: Iterable[torch.Tensor]) -> str:
    """The type with the most bytes, such as `bfloat16`, for config.json."""
    num_bytes = Counter[torch.dtype]()
    for tensor in planned:
        num_bytes[tensor.dtype] += tensor.nbytes
    return str(num_bytes.most_common(1)[0][0]).removeprefix("torch.")
