"""Writes the adapters of a Megatron checkpoint as a PEFT folder, with the tokenizer and the template of the run."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from sft.console import Console, size
from sft.errors import CheckpointError
from sft.files.file_digest import Entry
from sft.hf.architecture import Architecture, architecture, read
from sft.hf.hub import CONFIG
from sft.layers.adapters import EMBEDDING, HEAD
from sft.weights.atomic_folder import copy_companions
from sft.weights.export.model_card import write_model_card
from sft.weights.export.original import describe_tokenizer, find_original
from sft.weights.export.stored_adapters import A, B, StoredAdapters
from sft.weights.lora.peft import folder as peft_folder
from sft.weights.lora.peft.config import AdapterConfig
from sft.weights.lora.peft.folder import Contents
from sft.weights.lora.peft.targets import module_of
from sft.weights.torch_dist import TorchDistReader


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
    name_of = {module_of(f"{name}.weight", has_vision=has_vision): name for name in adapters.shapes}
    saved = _saved(base_model, reader, has_vision=has_vision)
    base, _, revision = original.name.partition("@")
    config = AdapterConfig(
        rank=recipe["lora.rank"],
        alpha=recipe["lora.alpha"],
        rslora=recipe["lora.rslora"],
        base=base,
        revision=original.commit or revision or None,
        tied=bool(saved) and base_model.model.tie_embeddings,
    )
    modules = {module: adapters.shapes[name] for module, name in name_of.items()}
    shape = (base_model.vocab_size, base_model.model.hidden_size)
    contents = Contents(config=config, modules=modules, saved={module: shape for module in saved})
    others = {module_of(name, has_vision=has_vision) for name in original.tensors or {}} - modules.keys()

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
            _tensors(adapters, contents, name_of, reader, saved),
            others=others,
            dtype=kind,
            finish=write_others,
            advance=progress.advance,
        )
    exported = f"exported {len(modules):,} adapters of {path} to {target} ({size(num_bytes)})"
    console.say(f"{exported}\n{describe_tokenizer(original, recipe)}")


def _saved(base: Architecture, reader: TorchDistReader, *, has_vision: bool) -> dict[str, str]:
    """The modules whose weights the run trained whole (embedding, output), and the keys of these in the checkpoint."""
    keys = {base.family.embedding: EMBEDDING, base.family.head: EMBEDDING if base.model.tie_embeddings else HEAD}
    return {module_of(name, has_vision=has_vision): key for name, key in keys.items() if key in reader.shapes}


def _tensors(
    adapters: StoredAdapters,
    contents: Contents,
    name_of: Mapping[str, str],
    reader: TorchDistReader,
    saved: Mapping[str, str],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields key and value of each tensor of the PEFT file, in the order of `contents.shapes()`.

    name_of: module with an adapter -> name of its Linear in `adapters`
    saved: module whose weight is trained whole -> key of this weight in the checkpoint
    """
    sources = {
        key_of(module): (name, factor)
        for module, name in name_of.items()
        for key_of, factor in ((peft_folder.key_of_a, A), (peft_folder.key_of_b, B))
    }
    keys = {peft_folder.key_of_saved(module): key for module, key in saved.items()}
    for key, shape in contents.shapes().items():
        yield key, reader.read(keys[key], [0, 0], shape) if key in keys else adapters.read(*sources[key])
