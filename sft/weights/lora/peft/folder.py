"""Writes and reads a PEFT folder, tensor by tensor.

PEFT reads only one file of weights, so an adapter is never split.  Names, shapes and types in the header are checked
before any values are read.  Pickle files are never opened.
"""

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from sft.config.section import listed
from sft.errors import CheckpointError
from sft.files.file_digest import Entry
from sft.files.folder_files import regular_file
from sft.hf.safetensors_files import DTYPES, as_checkpoint_error
from sft.hf.safetensors_writer import write_tensors
from sft.hf.tensor_check import Shape, check_tensors, fold_by_layer
from sft.weights.atomic_folder import new_folder
from sft.weights.lora.peft import token_rows
from sft.weights.lora.peft.config import CONFIG, AdapterConfig, content_of, modules_to_save, parsed, read_config
from sft.weights.lora.peft.targets import endings, is_of_one_expert, lost_by_peft, target_modules
from sft.weights.lora.peft.token_rows import TokenRows

STEM = "adapter_model"
WEIGHTS = f"{STEM}.safetensors"
_COMPARED_ROWS = 4096  # number of rows of an embedding that are read at once
_PREFIX, _A, _B, _WEIGHT = "base_model.model.", ".lora_A.weight", ".lora_B.weight", ".weight"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The configuration and the shapes of an adapter, without its values."""

    config: AdapterConfig
    modules: Mapping[str, tuple[int, int]]  # module with an adapter -> shape (out, in) of its weight
    # Module whose weight is a parameter in target_parameters -> number of experts; 1 for a router.
    num_experts: Mapping[str, int] = field(default_factory=dict)
    saved: Mapping[str, Shape] = field(default_factory=dict)  # module whose weight is trained whole -> its shape
    rows: Mapping[str, TokenRows] = field(default_factory=dict)  # module of which only some rows are trained

    def shapes(self) -> dict[str, Shape]:
        """The shapes of the tensors in the order of the file: base_model.model.q_proj.lora_A.weight -> (rank, in)"""
        shapes = dict[str, Shape]()
        for module, (num_rows, num_columns) in self.modules.items():
            rank = self.config.rank * self.num_experts.get(module, 1)
            shapes[key_of_a(module)], shapes[key_of_b(module)] = (rank, num_columns), (num_rows, rank)
        shapes |= {key_of_saved(module): shape for module, shape in self.saved.items()}
        shapes |= {key_of_rows(module): (len(rows.ids), rows.width) for module, rows in self.rows.items()}
        return dict(sorted(shapes.items()))


def key_of_a(module: str) -> str:
    return f"{_PREFIX}{module}{_A}"


def key_of_b(module: str) -> str:
    return f"{_PREFIX}{module}{_B}"


def key_of_saved(module: str) -> str:
    return f"{_PREFIX}{module}{_WEIGHT}"


def key_of_rows(module: str) -> str:
    return f"{_PREFIX}{module}{token_rows.SUFFIX}"


def write(
    target: Path,
    contents: Contents,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    others: Collection[str],
    dtype: torch.dtype = torch.float32,
    finish: Callable[[Path, dict[str, Entry]], None] = lambda folder, entries: None,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write the adapter `contents` to the new folder `target`.

    tensors  key and value of each tensor, in the order of `contents.shapes()`
    others   names of all other modules of the base model, except modules of stacked experts
    dtype    type of all tensors
    finish   called with the folder and the entries of its tensor files, before the folder gets its final name
    advance  called with each tensor's size in bytes
    Raises CheckpointError if PEFT would not compute the trained function, if a value is not finite in `dtype`, or as
    `new_folder` does.  After an error there is no folder.
    """
    if reason := lost_by_peft(contents.modules, rslora=contents.config.rslora):
        raise CheckpointError(f"{target} was not written: {reason}.  Export the merged model instead.")
    planned = {key: torch.empty(shape, dtype=dtype, device="meta") for key, shape in contents.shapes().items()}
    endings = target_modules(contents.modules.keys() - contents.num_experts.keys(), others)
    content = content_of(contents.config, contents.modules, contents.saved, endings, contents.rows)
    with new_folder(target, sum(tensor.nbytes for tensor in planned.values())) as temporary:
        (temporary / CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        entries, _ = write_tensors(
            temporary, planned, _converted(tensors, dtype), sys.maxsize, stem=STEM, advance=advance
        )
        finish(temporary, entries)


def _converted(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        converted = tensor.detach().to("cpu", dtype)
        if not converted.isfinite().all():
            raise CheckpointError(f"{name} has numbers that are not finite in {dtype}.  Nothing was written.")
        yield name, converted


class AdapterPart(NamedTuple):
    """A part of a stored tensor, and the tensor that it fills.

    where     a slice for each axis of the stored tensor
    arranged  computes the values of `target` from the part; None: the part has the shape of `target`
    """

    key: str
    where: tuple[slice, ...]
    target: torch.Tensor
    arranged: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class PeftAdapter:
    """An adapter in a folder.  Its values are read only on request."""

    file: Path
    num_bytes: int
    contents: Contents
    dtypes: frozenset[str]  # all types of the tensors, by their names in safetensors, such as F32

    def read_parts(self, parts: Iterable[AdapterPart]) -> None:
        """Fill tensors with parts of stored tensors.  Reads only these parts from the file.

        Raises CheckpointError if a value is not finite.
        """
        with self._opened() as stored:
            for part in parts:
                values = stored.get_slice(part.key)[part.where]
                if not values.isfinite().all():
                    raise CheckpointError(
                        f"{self.file}: {part.key} has numbers that are not finite.  Use another adapter."
                    )
                part.target.copy_(values if part.arranged is None else part.arranged(values))

    def check_equal(self, module: str, copy: str) -> None:
        """Raise CheckpointError unless two modules have the same weight, or the same trained rows of it."""
        rows = self.contents.rows.get(module)
        key_of = key_of_saved if rows is None else key_of_rows
        keys, num_rows = (key_of(module), key_of(copy)), len(rows.ids) if rows else self.contents.saved[module][0]
        with self._opened() as stored:
            for first in range(0, num_rows, _COMPARED_ROWS):
                blocks = [stored.get_slice(key)[first : first + _COMPARED_ROWS] for key in keys]
                if not torch.equal(*blocks):
                    raise CheckpointError(
                        f"{self.file}: {keys[0]} and {keys[1]} differ, but the base model has one weight for both "
                        "(ensure_weight_tying).  Use another adapter."
                    )

    def check(
        self,
        modules: Mapping[str, tuple[int, int]],
        saved: Mapping[str, Shape],
        num_experts: Mapping[str, int] = MappingProxyType({}),
        rows: Mapping[str, TokenRows] = MappingProxyType({}),
    ) -> None:
        """Raise CheckpointError unless the tensors are those of an adapter with these modules.

        modules, saved, num_experts, rows: as in `Contents`
        """
        config = self.contents.config
        wanted = Contents(config=config, modules=modules, saved=saved, num_experts=num_experts, rows=rows)
        check_tensors(self.contents.shapes(), wanted.shapes(), str(self.file))

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        with as_checkpoint_error(self.file):
            if self.file.stat().st_size != self.num_bytes:  # reading past the end of a mapped file kills the process
                raise SafetensorError("its size has changed since it was opened")
            with safe_open(self.file, framework="pt") as stored:
                yield stored


def read(folder: Path) -> PeftAdapter:
    """Open the adapter in a folder.

    Raises CheckpointError if there is none, or with all reasons if this trainer cannot continue the adapter.
    """
    content = read_config(folder)
    file = _weights(folder)
    shapes, dtypes, problems = _headers(file)
    adapted = {
        key.removeprefix(_PREFIX).removesuffix(suffix)
        for key in shapes
        for suffix in (_A, _B)
        if key.startswith(_PREFIX) and key.endswith(suffix)
    }
    num_experts = _num_experts(content, shapes, adapted)
    config, unsupported = parsed(content, adapted)
    keys = {key for module in adapted for key in (key_of_a(module), key_of_b(module))}
    names = {*modules_to_save(content)}
    tied = {"lm_head"} if names and content.get("ensure_weight_tying") else set()  # PEFT trains a tied output weight
    whole = {key: _names_of(key, names | tied) for key in shapes.keys() - keys}
    saved = {key: shape for key, shape in shapes.items() if whole.get(key)}
    by_rows = {key.removesuffix(token_rows.SUFFIX): key for key in shapes if key.endswith(token_rows.SUFFIX)}
    of_rows = {module.removeprefix(_PREFIX): shapes[key] for module, key in by_rows.items()}
    rows, wrong = token_rows.read_rows(content.get(token_rows.OPTION), of_rows)
    problems += wrong
    # PEFT also saves the frozen weight if transformers enlarged it.
    of_row_modules = {*by_rows.values(), *(module + token_rows.FROZEN_SUFFIX for module in by_rows)}
    problems += [f"{line} is missing" for line in fold_by_layer(sorted(keys - shapes.keys()))]
    problems += [
        f"{line} is no part of a LoRA adapter"
        for line in fold_by_layer(sorted(shapes.keys() - keys - saved.keys() - of_row_modules))
    ]
    if not adapted:
        problems.append(f"{WEIGHTS} holds no pair of factors A and B")
    problems += [
        f"{WEIGHTS} lacks the weight of {name}, which modules_to_save names"
        for name in sorted(names.difference(*whole.values()))
    ]
    if config is not None and not unsupported:
        problems += _misshapen(shapes, keys, config.rank, num_experts)
    if config is None or unsupported or problems:
        reasons = listed([*unsupported, *problems])
        raise CheckpointError(f"{folder} is an adapter that cannot be continued: {reasons}.")
    modules = {module: (shapes[key_of_b(module)][0], shapes[key_of_a(module)][1]) for module in sorted(adapted)}
    whole_shapes = {_saved_module(key): shape for key, shape in saved.items()}
    contents = Contents(config=config, modules=modules, num_experts=num_experts, saved=whole_shapes, rows=rows)
    return PeftAdapter(file=file, num_bytes=file.stat().st_size, contents=contents, dtypes=frozenset(dtypes))


def _weights(folder: Path) -> Path:
    """The path of the file of tensors.  Raises CheckpointError if there is none, or if it is not a regular file."""
    file = folder / WEIGHTS
    if os.path.lexists(file):
        with as_checkpoint_error(file):
            return regular_file(folder, WEIGHTS)
    if (folder / f"{STEM}.bin").exists():
        raise CheckpointError(
            f"{folder} has {STEM}.bin, a pickle file.  Pickle files can run code, so this trainer does not open them.  "
            f"PEFT converts it: save_pretrained writes {WEIGHTS}."
        )
    raise CheckpointError(f"{folder} is no complete PEFT folder, because it has no {WEIGHTS}.  Copy it again.")


def _headers(file: Path) -> tuple[dict[str, Shape], set[str], list[str]]:
    """The shape of each tensor, all types, and one phrase for each tensor whose type is not supported.

    Raises CheckpointError if the file is damaged.
    """
    shapes: dict[str, Shape] = {}
    dtypes, problems = set(), []
    with as_checkpoint_error(file), safe_open(file, framework="pt") as stored:
        for key in stored.keys():
            tensor = stored.get_slice(key)
            shapes[key] = tuple(tensor.get_shape())
            dtypes.add(tensor.get_dtype())
            if tensor.get_dtype() not in DTYPES:
                problems.append(f"{key} has the type {tensor.get_dtype()}, but {', '.join(DTYPES)} are supported")
    return shapes, dtypes, problems


def _names_of(key: str, names: Set[str]) -> set[str]:
    """The elements of `names` that are an ending of the name of this weight's module, such as embed_tokens."""
    if not (key.startswith(_PREFIX) and key.endswith(_WEIGHT)):
        return set()
    return {ending for ending in endings(_saved_module(key)) if ending in names}


def _saved_module(key: str) -> str:
    return key.removeprefix(_PREFIX).removesuffix(_WEIGHT)


def _num_experts(content: Mapping[str, Any], shapes: Mapping[str, Shape], adapted: Iterable[str]) -> dict[str, int]:
    """The number of experts of each module whose A has more rows than the rank, if target_parameters names parameters.

    shapes: shapes of all tensors; adapted: modules with adapters
    """
    rank, counts = content.get("r"), dict[str, int]()
    if type(rank) is int and rank > 0 and content.get("target_parameters"):
        for module in sorted(adapted):
            num_rows = shapes.get(key_of_a(module), (0,))[:1]
            if num_rows and num_rows[0] > rank and not is_of_one_expert(module):
                counts[module] = num_rows[0] // rank
    return counts


def _misshapen(shapes: Mapping[str, Shape], keys: set[str], rank: int, num_experts: Mapping[str, int]) -> list[str]:
    """One phrase for the factors of each shape that does not fit the rank."""
    wrong: dict[Shape, list[str]] = {}
    for key in sorted(keys & shapes.keys()):
        shape, module = shapes[key], key.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)
        ranks = rank * num_experts.get(module, 1)
        if len(shape) != 2 or shape[0 if key.endswith(_A) else 1] != ranks or 0 in shape:
            wrong.setdefault(shape, []).append(key)
    return [
        f"{line} is {' x '.join(map(str, shape))}, which does not fit r = {rank}"
        for shape, names in wrong.items()
        for line in fold_by_layer(names)
    ]
