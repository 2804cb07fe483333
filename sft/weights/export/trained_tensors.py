"""Puts Hugging Face tensors together from the tensors of a checkpoint, one at a time."""

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from sft.hf.family import TensorMapping
from sft.weights.torch_dist import TorchDistReader

_WHOLE_TENSOR_BYTES = 1 << 30  # our tensors up to this size are read completely and split in memory


@dataclass(frozen=True)
class TrainedTensor:
    """A Hugging Face tensor, and the views that it consists of: each as a mapping and its index in the sources."""

    shape: tuple[int, ...]
    parts: Sequence[tuple[TensorMapping, int]]

    def dtype(self, reader: TorchDistReader) -> torch.dtype:
        """The type in the checkpoint."""
        return reader.dtype(self.parts[0][0].key)


def put_together(
    reader: TorchDistReader, tensors: Iterable[tuple[str, TrainedTensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The values of the tensors, by name, one at a time."""
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
            blocks[:, view.first : view.first + view.rows_of_block] = rows
        assert whole is not None
        yield name, whole


def prefetched(values: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields `values` unchanged.  A thread makes the next value while the caller uses the current one."""
    with ThreadPoolExecutor(1, "reading ahead") as thread:
        following = thread.submit(next, values, None)
        while (value := following.result()) is not None:
            following = thread.submit(next, values, None)
            yield value


class _ViewReader:
    """Reads views from a checkpoint.  Keeps the rows of one mapping, whose views are usually read one after another."""

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
            self._kept = None  # before the next rows take memory
            self._kept = mapping, self._rows(mapping, 0, mapping.num_rows)
        pieces = [self._kept[1][span.target : span.target + span.num_rows] for span in own_spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _rows(self, mapping: TensorMapping, start: int, count: int) -> torch.Tensor:
        depth, row_shape = len(mapping.stack_index), mapping.row_shape
        offset = (*mapping.stack_index, start, *[0] * len(row_shape))
        return self._reader.read(mapping.key, offset, (*[1] * depth, count, *row_shape)).reshape(count, *row_shape)
