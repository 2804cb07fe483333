"""Assembles the Hugging Face tensors of a model, one at a time, from the tensors of a Megatron checkpoint."""

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from sft.config import ModelConfig
from sft.hf.architecture import Architecture
from sft.hf.family import TensorMapping, views_by_tensor
from sft.hf.safetensors_files import DTYPES
from sft.hf.tensor_check import check_tensors
from sft.weights.export.original import Original
from sft.weights.torch_dist import TorchDistReader

# First parts of the keys of a checkpoint that do not belong to the model: state of the optimizer, random generators,
# plain values.
_NOT_MODEL = ("optimizer.", "chained_", "rng_state", "common_state", "rerun_state")
_WHOLE_TENSOR_BYTES = 1 << 30  # our tensors up to this size are read completely and split in memory


@dataclass(frozen=True)
class TrainedTensor:
    """A Hugging Face tensor and the views that it consists of.

    parts: for each view, the mapping that contains it, and its index in `mapping.sources`
    """

    shape: tuple[int, ...]
    parts: Sequence[tuple[TensorMapping, int]]

    def dtype(self, reader: TorchDistReader) -> torch.dtype:
        """The type in the checkpoint."""
        return reader.dtype(self.parts[0][0].key)


def model_tensors(
    imported: Architecture, model: ModelConfig, original: Original, path: Path
) -> dict[str, TrainedTensor]:
    """All tensors except those that are passed through, by name.  path: the checkpoint, for error messages

    Raises CheckpointError if the names or shapes, without added rows, differ from those of the original.
    """
    expected = original.tensors or {}
    of_original = {name: tensor.shape for name, tensor in expected.items()}
    family = imported.family.stored_as(of_original, model, imported.vocab_size)
    stored_twice = [name for name, tensor in expected.items() if tensor.role == "tied copy"]
    copies = family.copies(model, stored_twice)
    if original.tensors is not None:
        before = {tensor.name: tensor.shape for tensor in views_by_tensor(family.mappings(model, imported.vocab_size))}
        before |= {name: before[copy] for name, copy in copies.items()}
        wanted = {name: tensor.shape for name, tensor in expected.items() if tensor.role != "passed through"}
        check_tensors(before, wanted, f"the model of {path}")
    num_rows = model.vocab_size or imported.vocab_size  # more than in the original with data.add_tokens
    views = views_by_tensor(family.mappings(model, num_rows))
    tensors = {tensor.name: TrainedTensor(tensor.shape, parts) for tensor, parts in views.items()}
    return tensors | {name: tensors[copy] for name, copy in copies.items()}


def check_stored(reader: TorchDistReader, tensors: Iterable[TrainedTensor], path: Path) -> None:
    """Raise CheckpointError unless the checkpoint `path` has exactly the weights of which `tensors` consist."""
    stored = {key: shape for key, shape in reader.shapes.items() if not key.startswith(_NOT_MODEL)}
    mappings = [mapping for tensor in tensors for mapping, _ in tensor.parts]
    wanted = {mapping.key: mapping.shape_like(stored.get(mapping.key)) for mapping in mappings}
    other = [
        f"of type {reader.dtype(key)}: {key}"
        for key in wanted
        if key in stored and reader.dtype(key) not in DTYPES.values()
    ]
    check_tensors(stored, wanted, str(path), other=other)


def put_together(
    reader: TorchDistReader, tensors: Iterable[tuple[str, TrainedTensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and value of each tensor, one at a time, in the type of the checkpoint."""
    rows_of = _ViewReader(reader)
    for name, tensor in tensors:
        whole = None
        for mapping, number in tensor.parts:
            view = mapping.sources[number]
            if view.is_whole:
                whole = rows_of.view(mapping, number)
                continue
            if whole is None:
                whole = torch.empty(tensor.shape, dtype=reader.dtype(mapping.key))
            matrix = whole[view.index].T if view.transposed else whole[view.index]
            blocks = matrix.unflatten(0, (view.num_blocks, -1))
            rows = rows_of.view(mapping, number).unflatten(0, (view.num_blocks, -1))
            target = blocks[:, view.first : view.first + view.rows_of_block]
            target.copy_(rows.reshape(target.shape))
        assert whole is not None
        yield name, whole


def prefetched(values: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields `values` unchanged.  A thread computes the next value while the caller uses the current one."""
    with ThreadPoolExecutor(1, "reading ahead") as thread:
        following = thread.submit(next, values, None)
        while (value := following.result()) is not None:
            following = thread.submit(next, values, None)
            yield value


class _ViewReader:
    """Reads views from a checkpoint.

    Keeps the rows of the last mapping in memory, because its views are usually read one after another.
    """

    def __init__(self, reader: TorchDistReader) -> None:
        self._reader = reader
        self._kept: tuple[TensorMapping, torch.Tensor] | None = None

    def view(self, mapping: TensorMapping, number: int) -> torch.Tensor:
        """The rows of mapping.sources[number]."""
        spans = mapping.spans()
        own_spans = [span for span in spans if span.source == number]
        is_interleaved = len(spans) > len(mapping.sources)
        num_bytes = mapping.num_rows * self._reader.dtype(mapping.key).itemsize * math.prod(mapping.row_shape)
        if not is_interleaved and num_bytes > _WHOLE_TENSOR_BYTES:
            return self._rows(mapping, own_spans[0].target, own_spans[0].num_rows)
        if self._kept is None or self._kept[0] is not mapping:
            self._kept = None  # frees the old rows before the new ones are read
            self._kept = mapping, self._rows(mapping, 0, mapping.num_rows)
        pieces = [self._kept[1][span.target : span.target + span.num_rows] for span in own_spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _rows(self, mapping: TensorMapping, start: int, count: int) -> torch.Tensor:
        depth, row_shape = len(mapping.stack_index), mapping.row_shape
        offset = (*mapping.stack_index, start, *[0] * len(row_shape))
        return self._reader.read(mapping.key, offset, (*[1] * depth, count, *row_shape)).reshape(count, *row_shape)
