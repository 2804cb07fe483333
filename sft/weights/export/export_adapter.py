"""Writes the adapters of a Megatron checkpoint as a PEFT folder, with the tokenizer and the template of the run."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sft.console import Console, size
from sft.errors import CheckpointError
from sft.files.file_digest import Entry
from sft.hf.architecture import Architecture, architecture, read
from sft.hf.family import TensorMapping
from sft.hf.hub import CONFIG
from sft.layers.adapters import EMBEDDING, HEAD
from sft.weights.atomic_folder import copy_companions
from sft.weights.export.model_card import write_model_card
from sft.weights.export.original import Original, describe_tokenizer, find_original
from sft.weights.export.stored_adapters import A, B, StoredAdapters
from sft.weights.lora.parameters import adapter_name, parameters
from sft.weights.lora.peft import folder as peft_folder
from sft.weights.lora.peft.config import AdapterConfig
from sft.weights.lora.peft.folder import Contents
from sft.weights.lora.peft.parameter_names import target_parameters, wrapper_of
from sft.weights.lora.peft.stacked import rows_in_file, stacked_a, stacked_b
from sft.weights.lora.peft.targets import module_of
from sft.weights.lora.peft.token_rows import TokenRows
from sft.weights.torch_dist import TorchDistReader

_KEYS = {EMBEDDING: "lora.train_embeddings", HEAD: "lora.train_head"}  # our weight -> the key that trains it


@dataclass(frozen=True, kw_only=True)
class _Modules:
    """The modules of PEFT that have the adapters of a checkpoint.

    name_of            module -> name of its Linear in the checkpoint
    stack_of           module of stacked experts -> mapping of the first expert
    shapes             as in `Contents.modules`
    num_experts        as in `Contents`
    target_parameters  as in `AdapterConfig`
    """

    name_of: Mapping[str, str]
    stack_of: Mapping[str, TensorMapping]
    shapes: Mapping[str, tuple[int, int]]
    num_experts: Mapping[str, int]
    target_parameters: tuple[str, ...]

    @classmethod
    def of(cls, adapters: StoredAdapters, base: Architecture, *, has_vision: bool) -> "_Modules":
        """The modules of all adapters of a checkpoint.  base: the base model

        Raises CheckpointError if the base model has no such tensor of stacked experts.
        """
        known = parameters(base.family.mappings(base.model, 0), has_vision=has_vision)
        stored = {*adapters.shapes, *(f"{tensor}.*" for tensor in adapters.stacks)}
        chosen = {name: mapping for name, mapping in known.items() if adapter_name(mapping) in stored}
        of_parameters = {adapter_name(mapping): wrapper_of(name, chosen) for name, mapping in chosen.items()}
        if unknown := sorted(tensor for tensor in adapters.stacks if f"{tensor}.*" not in of_parameters):
            raise CheckpointError(f"The base model has no tensor {unknown[0]}, of which the checkpoint has adapters.")
        modules = {name: module_of(f"{name}.weight", has_vision=has_vision) for name in adapters.shapes}
        name_of = {of_parameters.get(name, module): name for name, module in modules.items()}
        stack_of = {of_parameters[adapter_name(m)]: m for m in chosen.values() if m.expert is not None}
        sizes = {module: adapters.stacks[mapping.sources[0].name] for module, mapping in stack_of.items()}
        shapes = {module: adapters.shapes[name] for module, name in name_of.items()}
        return cls(
            name_of=name_of,
            stack_of=stack_of,
            shapes=shapes | {module: (num_rows, num_columns) for module, (_, num_rows, num_columns) in sizes.items()},
            num_experts={module: sizes[module][0] if module in sizes else 1 for module in of_parameters.values()},
            target_parameters=tuple(target_parameters(chosen, known.keys() - chosen.keys())),
        )


def export_adapter(
    path: Path,
    target: Path,
    console: Console,
    common: Mapping[str, Any],
    recipe: Mapping[str, Any],
    *,
    like: Path | None,
    dtype: str | None,
    finish: Callable[[Path, dict[str, Entry]], None],
) -> None:
    """Write the adapters of the checkpoint `path` to the new folder `target`.

    common: the values in the checkpoint's common.pt; recipe: the recipe of its run
    like: the folder of the base model; None: see `find_original`; dtype: None: the type in the checkpoint
    finish: called with the folder and the entries of its tensor files, before the folder gets its final name
    Raises CheckpointError, and writes nothing, if PEFT would not compute the trained function with these adapters.
    """
    original = find_original(path, recipe, like)
    base_model = architecture(read(original.folder), str(original.folder / CONFIG))
    has_vision = base_model.family.text_config != "none"
    reader = TorchDistReader(path)
    adapters = StoredAdapters(reader)
    if adapters.dtype is None:
        raise CheckpointError(f"{path} holds no adapters, although lora.rank = {recipe['lora.rank']} in its recipe.")
    modules = _Modules.of(adapters, base_model, has_vision=has_vision)
    saved = _saved(base_model, reader, has_vision=has_vision)
    contents = _contents(modules, saved, base_model, original, recipe)
    others = {module_of(name, has_vision=has_vision) for name in original.tensors or {}} - modules.shapes.keys()

    def write_others(folder: Path, entries: dict[str, Entry]) -> None:
        copy_companions(original.tokenizer, folder)
        write_model_card(folder, path, common, original)
        finish(folder, entries)

    kind = getattr(torch, dtype) if dtype else adapters.dtype
    num_bytes = sum(math.prod(shape) for shape in contents.shapes().values()) * kind.itemsize
    with console.track(f"exporting {path}", num_bytes, "bytes") as progress:
        peft_folder.write(
            target,
            contents,
            _tensors(adapters, contents, modules, reader, saved),
            others=others,
            dtype=kind,
            finish=write_others,
            advance=progress.advance,
        )
    exported = f"exported {len(modules.shapes):,} adapters of {path} to {target} ({size(num_bytes)})"
    console.say(f"{exported}\n{describe_tokenizer(original, recipe)}")


def _contents(
    modules: _Modules, saved: Mapping[str, str], base: Architecture, original: Original, recipe: Mapping[str, Any]
) -> Contents:
    """Configuration and shapes of the folder.  saved: see `_saved`; base: the base model; recipe: that of the run"""
    name, _, revision = original.name.partition("@")
    is_tied, width = base.model.tie_embeddings, base.model.hidden_size
    ids = {module: recipe.get(_KEYS[key]) for module, key in saved.items()}
    whole = [module for module, rows in ids.items() if not isinstance(rows, list)]
    by_rows = [module for module in ids if module not in whole][: 1 if is_tied else None]  # PEFT ties the other itself
    config = AdapterConfig(
        rank=recipe["lora.rank"],
        alpha=recipe["lora.alpha"],
        rslora=recipe["lora.rslora"],
        base=name,
        revision=original.commit or revision or None,
        tied=bool(whole) and is_tied,
        target_parameters=modules.target_parameters,
    )
    return Contents(
        config=config,
        modules=modules.shapes,
        num_experts=modules.num_experts,
        saved=dict.fromkeys(whole, (recipe.get("model.vocab_size") or base.vocab_size, width)),
        rows={module: TokenRows(tuple(sorted(ids[module] or ())), width) for module in by_rows},
    )


def _saved(base: Architecture, reader: TorchDistReader, *, has_vision: bool) -> dict[str, str]:
    """The modules whose weights the run trained whole (embedding, output), and the keys of these in the checkpoint."""
    keys = {base.family.embedding: EMBEDDING, base.family.head: EMBEDDING if base.model.tie_embeddings else HEAD}
    return {module_of(name, has_vision=has_vision): key for name, key in keys.items() if key in reader.shapes}


def _tensors(
    adapters: StoredAdapters,
    contents: Contents,
    modules: _Modules,
    reader: TorchDistReader,
    saved: Mapping[str, str],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields key and value of each tensor of the PEFT file, in the order of `contents.shapes()`.

    saved: module whose weight, or rows of it, are trained -> key of this weight in the checkpoint
    """
    sources = {
        key_of(module): (name, factor)
        for module, name in modules.name_of.items()
        for key_of, factor in ((peft_folder.key_of_a, A), (peft_folder.key_of_b, B))
    }
    values = {key: partial(adapters.read, *source) for key, source in sources.items()}
    for module, key in saved.items():
        if module in contents.rows:
            values[peft_folder.key_of_rows(module)] = partial(_rows, reader, key, contents.rows[module])
        elif module in contents.saved:
            values[peft_folder.key_of_saved(module)] = partial(reader.read, key, [0, 0], contents.saved[module])
    for module, mapping in modules.stack_of.items():
        values[peft_folder.key_of_a(module)] = partial(_stacked, adapters, mapping, A)
        values[peft_folder.key_of_b(module)] = partial(_stacked, adapters, mapping, B)
    for key in contents.shapes():
        yield key, values[key]()


def _rows(reader: TorchDistReader, key: str, rows: TokenRows) -> torch.Tensor:
    return torch.cat([reader.read(key, [token_id, 0], [1, rows.width]) for token_id in rows.ids])


def _stacked(adapters: StoredAdapters, mapping: TensorMapping, factor: str) -> torch.Tensor:
    """A factor of all experts of a layer as PEFT stores it.  mapping: that of the first expert"""
    stored = adapters.read(mapping.sources[0].name, factor)
    if factor == A:
        return stacked_a(stored)
    in_file = torch.empty_like(stored)
    in_file[:, rows_in_file(mapping.sources)] = stored
    return stacked_b(in_file)
