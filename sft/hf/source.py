"""Gives each tensor of a Hugging Face folder a role, or refuses it.

    trained          becomes a part of one of our tensors
    tied copy        has the values of a trained tensor
    passed through   is not trained; an export copies it unchanged

An export writes tensors of all three roles.  One error lists all refused tensors, missing tensors, and wrong shapes and
types.  `SafetensorsFolder` decides which files belong to the folder, and `Family` which tensors a model has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from sft.config import ModelConfig
from sft.console import size
from sft.hf.architecture import Architecture, architecture, read
from sft.hf.dequantised import DequantisedFolder
from sft.hf.family import Family, TensorMapping, views_by_tensor
from sft.hf.hub import CONFIG
from sft.hf.mxfp4 import Mxfp4Folder
from sft.hf.packed import PackedFolder
from sft.hf.quantization import Mxfp4, Quantised, Scheme
from sft.hf.safetensors_files import DTYPES, SafetensorsFolder, StoredTensor
from sft.hf.tensor_check import check_tensors, fold_by_layer

_COMPARED_BYTES = 64 << 20  # largest block of two tensors that are compared
Role = Literal["trained", "tied copy", "passed through"]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One tensor of an export."""

    shape: tuple[int, ...]
    dtype: str  # name of the type in safetensors, such as BF16
    role: Role  # a tied copy has the values of a trained tensor, such as the output weight that a tied model stores


@dataclass(frozen=True, kw_only=True)
class Source:
    """The model in a Hugging Face folder."""

    name: str  # the folder, or the name on the hub, for messages
    folder: Path
    content: Mapping[str, Any]  # content of config.json
    architecture: Architecture
    stored: SafetensorsFolder
    mappings: list[TensorMapping]  # how our tensors consist of the stored tensors
    manifest: Mapping[str, Expected]  # every tensor of the folder, as an export must write it

    def names(self, role: Role) -> list[str]:
        return [name for name, expected in self.manifest.items() if expected.role == role]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.stored.tensors.values())

    @property
    def num_trained_bytes(self) -> int:
        return sum(self.stored.tensors[name].num_bytes for name in self.names("trained"))

    def describe(self) -> str:
        """A text such as "Qwen/Qwen3-8B: 399 tensors trained; 15.3 GiB"."""
        passed_through = len(self.names("passed through"))
        trained = len(self.manifest) - passed_through
        counts = f"{trained:,} tensors trained" + (f", {passed_through:,} passed through" if passed_through else "")
        count, number_format = len(self.stored.dequantised), self.stored.number_format
        quantised = f", {count:,} tensors stored in {number_format}" if count else ""
        return f"{self.name}: {counts}; {size(self.num_bytes)}{quantised}"


def open_source(folder: Path, name: str = "", *, compare: bool = True, has_mtp: bool = False) -> Source:
    """The model in `folder`.  Reads config.json and the headers of the files.

    compare: also read tensors that may be stored twice, and refuse a tied output that differs.  In a block for
    multi-token prediction that is not trained, a tensor that differs is passed through.  False: tensors of equal type
    and shape count as equal
    has_mtp: whether the block for multi-token prediction belongs to the model; False: it is passed through
    Raises ConfigError if our model does not support config.json.  Raises CheckpointError that lists the tensors that do
    not fit the model, or the problems of the files.
    """
    content = read(folder)
    model = architecture(content, str(folder / CONFIG))
    model = replace(model, model=model.model.model_copy(update={"has_mtp": has_mtp}))
    stored = _stored(folder, model.scheme)
    shapes = {tensor_name: tensor.shape for tensor_name, tensor in stored.tensors.items()}
    family = model.family.stored_as(shapes, model.model, model.vocab_size)
    mappings = list(family.mappings(model.model, model.vocab_size))
    roles = _sort(stored, family, mappings, folder, model=model.model, compare=compare)
    manifest = {
        tensor_name: Expected(shape=tensor.shape, dtype=tensor.dtype, role=roles[tensor_name])
        for tensor_name, tensor in stored.tensors.items()
    }
    return Source(
        name=name or str(folder),
        folder=folder,
        content=content,
        architecture=model,
        stored=stored,
        mappings=mappings,
        manifest=manifest,
    )


def _stored(folder: Path, scheme: Quantised | None) -> SafetensorsFolder:
    if scheme is None:
        return SafetensorsFolder(folder)
    if isinstance(scheme, Mxfp4):
        return Mxfp4Folder(folder, scheme)
    return DequantisedFolder(folder, scheme) if isinstance(scheme, Scheme) else PackedFolder(folder, scheme)


def _sort(
    stored: SafetensorsFolder,
    family: Family,
    mappings: list[TensorMapping],
    folder: Path,
    *,
    model: ModelConfig,
    compare: bool,
) -> dict[str, Role]:
    """The role of every tensor by name.  Raises CheckpointError that lists all tensors that do not fit the model."""
    wanted = {tensor.name: tensor.shape for tensor in views_by_tensor(mappings)}
    roles: dict[str, Role] = {
        name: "trained" if name in wanted else "passed through"
        for name in stored.tensors
        if name in wanted or family.passes_through(name, model.num_layers)
    }
    shapes = {name: tensor.shape for name, tensor in stored.tensors.items() if roles.get(name) != "passed through"}
    problems = [
        f"type {dtype} is not supported, only {', '.join(DTYPES)}: {line}"
        for dtype in sorted({stored.tensors[name].dtype for name in shapes} - set(DTYPES))
        for line in fold_by_layer(name for name in shapes if stored.tensors[name].dtype == dtype)
    ]
    problems += _mixed_types(stored.tensors, mappings)
    for copy, name in family.copies(model, stored.tensors).items():
        if name not in shapes:
            continue
        if _are_equal(stored, name, copy, compare=compare):
            shapes.pop(copy, None)
            roles[copy] = "tied copy"
        elif copy == family.head or model.has_mtp:  # else it is a tensor of a block that is not trained
            why = "tie_word_embeddings is true" if copy == family.head else "train.mtp trains one weight for both"
            problems.append(f"{why}, but {copy} and {name} differ")
    check_tensors(shapes, wanted, str(folder), other=problems)
    return roles


def _mixed_types(tensors: Mapping[str, StoredTensor], mappings: list[TensorMapping]) -> list[str]:
    """One line for each of our tensors that consists of tensors of different types."""
    types: dict[str, dict[str, str]] = {}  # our key -> type -> name of its first tensor
    for mapping in mappings:
        for view in mapping.sources:
            if view.name in tensors:
                types.setdefault(mapping.key, {}).setdefault(tensors[view.name].dtype, view.name)
    return [
        "tensors that become one tensor have different types: "
        f"{', '.join(f'{dtype} ({name})' for dtype, name in names.items())}"
        for names in types.values()
        if len(names) > 1
    ]


def _are_equal(stored: SafetensorsFolder, name: str, other_name: str, *, compare: bool) -> bool:
    """Whether two tensors have the same type and shape, and with `compare` also the same bits."""
    tensor, other = stored.tensors[name], stored.tensors[other_name]
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape) or tensor.dtype not in DTYPES:
        return False
    if not compare:
        return True
    pairs = zip(stored.blocks(name, _COMPARED_BYTES), stored.blocks(other_name, _COMPARED_BYTES))
    return all(torch.equal(block.view(torch.uint8), copy.view(torch.uint8)) for block, copy in pairs)
