"""Writes the tensors of an exported model, and proves that the files have what they must have."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch

from sft.checkpoint.manifest import Entry
from sft.hf.safetensors_writer import TYPES, write_tensors
from sft.hf.source import Expected
from sft.weights import kept
from sft.weights.export.merged_weights import MergedWeights
from sft.weights.export.original import Original
from sft.weights.export.proof import check_export
from sft.weights.export.stored_form import StoredForm
from sft.weights.export.tensor_types import converted
from sft.weights.export.trained_tensors import TrainedTensor, prefetched, put_together
from sft.weights.torch_dist import TorchDistReader


@dataclass(frozen=True, kw_only=True)
class WrittenTensors:
    """The tensors of the export of one checkpoint.

    tensors   those that are not passed through, by name
    expected  type and shape of every tensor before it is quantised
    merging   computes the weights of a merged export; None: the checkpoint of `reader` has whole weights
    """

    tensors: Mapping[str, TrainedTensor]
    expected: Mapping[str, Expected]
    original: Original
    reader: TorchDistReader
    merging: MergedWeights | None
    form: StoredForm

    @cached_property
    def planned(self) -> dict[str, torch.Tensor]:
        """Type and shape of each tensor before it is quantised, in the order of the files.

        Wide types come first, for alignment, and tensors that are quantised after the others.
        """
        order = {name: (name in self.form.names, -TYPES[self.expected[name].dtype].itemsize) for name in self.tensors}
        names = [*sorted(self.tensors, key=lambda name: order[name]), *self.original.names("passed through")]
        return {name: kept.on_meta(self.expected[name], name) for name in names}

    @cached_property
    def num_bytes(self) -> int:
        """Size of all tensors in the files."""
        return sum(tensor.nbytes for tensor in self.form.planned(self.planned).values())

    @property
    def num_unchanged(self) -> int:
        """Number of frozen weights of a merged export that were not changed.  `write` finds them."""
        return len(self.merging.digests) if self.merging else 0

    def write(self, folder: Path, shard_bytes: int, subject: str, advance: Callable[[int], None]) -> dict[str, Entry]:
        """Write the files of `folder`.  Returns size and SHA-256 of each.

        subject: first words of error messages; advance: called with the size of each tensor
        Raises CheckpointError if the files do not have the expected tensors.
        """
        form = self.form
        if form.needs_largest:
            form.measure(prefetched(self._values()))
        files, digests = write_tensors(
            folder,
            form.planned(self.planned),
            prefetched(form.stored(self._values())),
            shard_bytes,
            digested=self.original.names("passed through"),
            advance=advance,
        )
        if self.merging:
            of_base = self.merging.digests.items()
            digests |= {name: digest for name, (kind, digest) in of_base if kind == self.planned[name].dtype}
        digests |= self.original.digests
        digests = {name: digest for name, digest in digests.items() if name not in form.names} | form.digests
        check_export(folder, form.expected(self.expected), digests, subject)
        return files

    def _values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and value of each tensor before it is quantised, in the order of `planned`."""
        ordered = ((name, self.tensors[name]) for name in self.planned if name in self.tensors)
        values = self.merging.values(ordered, self.planned) if self.merging else put_together(self.reader, ordered)
        return chain(converted(values, self.planned), self.original.passed_through())
