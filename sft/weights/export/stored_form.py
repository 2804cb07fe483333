"""Gives the tensors of an export their stored form: unquantised, in a format of `export_format.py`, or as the source.

as_source quantises what the source model has quantised, in the same format.  If the values of a tensor are those of the
source, bit for bit, the export has the source's stored bytes; otherwise the tensor is quantised again.  The stored
bytes are read from the source's files, because the folder `hf/` of a run has only the tensors that are not trained.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sft.config.checkpoint import ExportFormat
from sft.errors import CheckpointError, ConfigError, first_few
from sft.hf.architecture import Architecture
from sft.hf.export_format import choose, fused, quantization_config
from sft.hf.hub import INDEX, SINGLE, local_folder
from sft.hf.quantised_tensors import QuantisationError, planned, quantised
from sft.hf.quantization import QUANTIZATION, Packed, Quantised
from sft.hf.safetensors_writer import NAMES, TYPES
from sft.hf.source import Expected, Source, open_source
from sft.hf.tensor_check import fold_by_layer
from sft.hf.tensor_view import HfTensor
from sft.low_bits.grouped import NVFP4_RANGE, global_scale
from sft.weights import kept
from sft.weights.export.original import Original
from sft.weights.export.trained_tensors import TrainedTensor

_BLOCK_BYTES = 64 << 20
_ROUNDING = 1 + 1e-6  # of a product in fp32
Values = Iterable[tuple[str, Tensor]]


@dataclass(kw_only=True)
class StoredForm:
    """The stored form of the tensors of one export.

    format    what the user asked for
    scheme    how tensors are quantised; None: no tensor is
    names     the tensors that are quantised
    note      a sentence for the log about what is quantised; ""
    source    with as_source, the model whose stored tensors are kept
    errors    the error of each tensor that was quantised; `stored` fills it
    digests   SHA-256 of each stored tensor that was copied from the source, by its name in the file
    """

    format: ExportFormat
    scheme: Quantised | None = None
    names: Collection[str] = frozenset()
    note: str = ""
    source: Source | None = None
    errors: dict[str, QuantisationError] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    _kept: set[str] = field(default_factory=set)  # quantised tensors that were copied from the source
    # For NVFP4: the largest magnitude by `fused`, and the groups that do not fit the global scales of the source.
    _largest: dict[str, Tensor] = field(default_factory=dict)
    _too_large: set[str] = field(default_factory=set)

    @property
    def needs_largest(self) -> bool:
        """Whether `measure` must read all quantised tensors before `stored` does."""
        return isinstance(self.scheme, Packed) and self.scheme.format == "nvfp4-pack-quantized"

    def planned(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Type and shape of every stored tensor.  tensors: those before quantisation, on the meta device, in order"""
        return {name: meta for full, tensor in tensors.items() for name, meta in self._plan(full, tensor).items()}

    def expected(self, tensors: Mapping[str, Expected]) -> dict[str, Expected]:
        """Every tensor that the files of the export must have.  tensors: those before quantisation"""
        result: dict[str, Expected] = {}
        for full, tensor in tensors.items():
            if full not in self.names:
                result[full] = tensor
                continue
            for name, meta in self._plan(full, kept.on_meta(tensor, full)).items():
                result[name] = Expected(shape=tuple(meta.shape), dtype=NAMES[meta.dtype], role=tensor.role)
        return result

    def config(self, names: Iterable[str]) -> dict[str, Any]:
        """quantization_config for config.json; {} if there is none, or if config.json has that of the source.

        names: all tensors of the export
        """
        if self.scheme is None or self.source is not None:
            return {}
        return {QUANTIZATION: quantization_config(self.scheme, [name for name in names if name not in self.names])}

    def measure(self, tensors: Values) -> None:
        """Find the magnitudes from which global scales of NVFP4 follow.  Servers need equal ones in fused tensors."""
        for name, value in tensors:
            if name in self.names:
                largest, group = value.abs().amax().float(), fused(name)
                self._largest[group] = torch.maximum(largest, self._largest.get(group, largest))
                if self.source is None or float(self._scale_of_source(name) * largest) <= NVFP4_RANGE * _ROUNDING:
                    continue
                if not self._has_values_of_source(name, value):
                    self._too_large.add(group)

    def stored(self, tensors: Values) -> Iterator[tuple[str, Tensor]]:
        """Yields name and value of each stored tensor, in the order of `planned`."""
        for full, value in tensors:
            if full not in self.names:
                yield full, value
                continue
            plan = self._plan(full, value)
            is_whole_kept = fused(full) not in self._too_large
            if self.source is not None and is_whole_kept and self._has_values_of_source(full, value):
                self._kept.add(full)
                yield from self._of_source(full, plan)
                continue
            assert self.scheme is not None
            stored, self.errors[full] = quantised(self.scheme, full, value, plan, self._whole(full))
            for name in plan:
                if name in stored:
                    yield name, stored[name]
                else:  # a scale of activations
                    yield from self._of_source(full, [name])

    def check(self, folder: Path, name: str, *, has_mtp: bool) -> None:
        """Raise CheckpointError if readers would not find the quantised tensors in the written `folder`."""
        if self.scheme is None:
            return
        written = open_source(folder, name, compare=False, has_mtp=has_mtp).stored.dequantised
        if set(written) != set(self.names):
            different = ", ".join(first_few(fold_by_layer(set(written) ^ set(self.names))))
            raise CheckpointError(f"the export would not be read as it was written: {different}.")

    def describe(self) -> str:
        """A sentence for the log about the tensors that were quantised and their errors; "" without quantisation."""
        if self.scheme is None:
            return self.note
        count = f"{len(self.errors):,} quantised" + (" again" if self.source else "")
        lines = [count, *([f"{len(self._kept):,} as the source stores them"] if self.source else [])]
        if self.errors:
            mean, (name, worst) = self.mean_error(), self.worst()[0]
            lines.append(f"relative RMS error {mean:.3%} on average, at most {worst.relative_rms:.3%} ({name})")
        return f"{self.format}: {', '.join(lines)}{f'; {self.note}' if self.note else ''}"

    def card(self) -> list[str]:
        """The section about quantisation of the model card."""
        if self.scheme is None:
            return []
        lines = ["## Quantisation", "", f"{self.describe()}.", ""]
        if self.errors:
            lines += ["| tensor | relative RMS error | largest error |", "|---|---|---|"]
            lines += [f"| {name} | {error.relative_rms:.4%} | {error.largest:.3g} |" for name, error in self.worst()]
            lines += [
                "",
                "The tensors with the largest relative errors; errors are relative to the weights in bf16.",
                "",
            ]
        return lines

    def worst(self, number: int = 5) -> list[tuple[str, QuantisationError]]:
        """The tensors with the largest relative errors, worst first."""
        return sorted(self.errors.items(), key=lambda item: -item[1].relative_rms)[:number]

    def mean_error(self) -> float:
        """The mean of the relative errors of all tensors that were quantised."""
        return sum(error.relative_rms for error in self.errors.values()) / len(self.errors)

    def _plan(self, full: str, tensor: Tensor) -> dict[str, Tensor]:
        if full not in self.names:
            return {full: tensor}
        if self.source is not None:
            stored = self.source.stored.stored_tensors
            return {
                name: torch.empty(stored[name].shape, dtype=TYPES[stored[name].dtype], device="meta")
                for name in self.source.stored.stored_names(full)
            }
        assert self.scheme is not None
        return planned(self.scheme, full, tuple(tensor.shape))

    def _whole(self, full: str) -> Tensor | None:
        """The global scale of NVFP4: that of the source, if the changed tensors of the group fit it."""
        if not self.needs_largest:
            return None
        group = fused(full)
        is_kept = self.source is not None and group not in self._too_large
        return self._scale_of_source(full) if is_kept else global_scale(self._largest[group])

    def _scale_of_source(self, full: str) -> Tensor:
        assert self.source is not None
        return self.source.stored.read_stored(f"{full.removesuffix('weight')}weight_global_scale").reshape(1)

    def _has_values_of_source(self, full: str, value: Tensor) -> bool:
        """Whether the tensor has the values of the source, bit for bit."""
        assert self.source is not None
        first = 0
        for block in self.source.stored.blocks(full, _BLOCK_BYTES):
            rows = value[first : first + len(block)]
            if rows.dtype != block.dtype or not torch.equal(kept.bits(rows), kept.bits(block)):
                return False
            first += len(block)
        return True

    def _of_source(self, full: str, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        assert self.source is not None
        for name in names:
            tensor = self.source.stored.read_stored(name)
            self.digests[name] = kept.digest_of(tensor)
            yield name, tensor


def open_form(
    format: ExportFormat,
    imported: Architecture,
    tensors: Mapping[str, TrainedTensor],
    original: Original,
    recipe: Mapping[str, Any],
    like: Path | None,
    *,
    has_mtp: bool,
) -> StoredForm:
    """The stored form of an export of the model in `format`.

    imported: the original model, with its quantisation; tensors: the tensors that are not passed through
    like: the folder that the user named with --hf
    Raises ConfigError if the format does not fit the model.  Raises CheckpointError for as_source if no folder has the
    stored tensors of a quantised source.
    """
    if format == "bf16":
        return StoredForm(format=format)
    if format != "as_source":
        views = {HfTensor(name, tensor.shape): list(tensor.parts) for name, tensor in tensors.items()}
        choice = choose(format, views, imported.family, _dtype(imported))
        return StoredForm(format=format, scheme=choice.scheme, names=choice.names, note=choice.left_out)
    if imported.scheme is None:
        return StoredForm(format=format, note=f"as_source: {original.name} is not quantised, so the export is not")
    source = _source(original, recipe, like, has_mtp=has_mtp)
    return StoredForm(format=format, scheme=imported.scheme, names=source.stored.dequantised, source=source)


def _dtype(imported: Architecture) -> str:
    return "BF16" if imported.scheme is None else imported.scheme.dtype


def _folders(original: Original, recipe: Mapping[str, Any], like: Path | None) -> Iterator[Path]:
    """The folders in which the stored tensors of the source may be, best first."""
    if like:
        yield like
        return
    yield original.folder
    if original.origin:
        yield original.origin
    if recipe.get("model.hf"):
        with suppress(ConfigError):  # the cache of the hub has been emptied
            yield local_folder(recipe["model.hf"])


def _forms(tensors: Mapping[str, Expected]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of each tensor, by name."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _source(original: Original, recipe: Mapping[str, Any], like: Path | None, *, has_mtp: bool) -> Source:
    """The source model with its stored tensors."""
    visited: list[Path] = []
    for folder in _folders(original, recipe, like):
        visited.append(folder)
        if any((folder / name).is_file() for name in (SINGLE, INDEX)):
            source = open_source(folder, original.name, has_mtp=has_mtp)
            if original.tensors is not None and _forms(source.manifest) != _forms(original.tensors):
                raise CheckpointError(
                    f"{folder} has other tensors than the model with which the run started, so export_format = "
                    "as_source cannot take stored tensors from it.  Name the folder of that model: --hf FOLDER."
                )
            return source
    raise CheckpointError(
        f"export_format = as_source writes the stored numbers and scales of {original.name} where the run changed "
        f"nothing, but {' and '.join(map(str, dict.fromkeys(visited)))} has no {SINGLE} or {INDEX}.  Name the folder "
        "with its quantised files: --hf FOLDER.  Or use --format bf16, or a format such as fp8_block, which need no "
        "stored numbers."
    )
