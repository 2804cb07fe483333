"""Converts a Megatron checkpoint to a Hugging Face folder, which transformers and inference servers load.

A checkpoint contains neither its family nor a tokenizer, and only some keys of config.json.  The export takes family,
tokenizer and other keys from the Hugging Face folder from which the weights were imported.  If the user does not name
this folder, the export looks for `hf/` next to an imported checkpoint, then for `model.hf` and `model.init_from` of the
checkpoint's recipe.
"""

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sft.checkpoint import folders, manifest
from sft.checkpoint.manifest import Manifest, Verify
from sft.config import ModelConfig
from sft.console import Console, size
from sft.errors import CheckpointError
from sft.hf.architecture import Architecture, architecture, nested, read, write_back
from sft.hf.convert.atomic_folder import copy_companions, new_folder, refuse_existing
from sft.hf.convert.exports import CHECKPOINT_DIGEST
from sft.hf.convert.torch_dist import TorchDistReader
from sft.hf.family import HfTensor, TensorMapping, views_by_tensor
from sft.hf.hub import CONFIG, IMPORTED
from sft.hf.safetensors_files import DTYPES
from sft.hf.safetensors_writer import SHARD_BYTES, write_tensors
from sft.hf.tensor_check import check_tensors
from sft.mcore.checkpoint_io import safe_reader

_WHOLE_TENSOR_BYTES = 1 << 30  # our tensors up to this size are read completely and split in memory
# Keys of a checkpoint that do not belong to the model: moments, fp32 weights, random generators, plain values.
_NOT_MODEL = ("optimizer.", "chained_", "rng_state", "common_state", "rerun_state")
# Groups of `model.*` that do not describe the model.
_NOT_SHAPE = ("init_from", "hf", "hf_read_once", "init_std", "megatron")


def export_hf(
    source: Path,
    target: Path,
    console: Console,
    *,
    like: Path | None = None,
    verify: Verify = "full",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Convert the checkpoint `source`, or the newest checkpoint of the run or folder `source`, to the folder `target`.

    like: the Hugging Face folder from which the weights were imported; None: derived from the checkpoint
    A ConfigError or CheckpointError means that nothing was written.
    """
    refuse_existing(target)
    path = folders.find([source, source / "checkpoints"], str(source))
    _verify(path, verify, console)
    common = safe_reader.common_state(path)
    template = _find_template(common, path, like)
    content = read(template)
    imported = architecture(content, str(template / CONFIG))
    model, seq_length = _model(common, imported, path, console)
    reader = TorchDistReader(path)
    mappings = list(imported.family.mappings(model, model.vocab_size or imported.vocab_size))
    _check(reader, mappings, path)
    mappings.sort(key=lambda mapping: -reader.dtype(mapping.key).itemsize)  # aligns every tensor to its type
    views = views_by_tensor(mappings)
    planned = {
        tensor.name: torch.empty(tensor.shape, dtype=reader.dtype(parts[0][0].key), device="meta")
        for tensor, parts in views.items()
    }
    config = write_back(
        content, model, str(template / CONFIG), dtype=_main_dtype(planned.values()), seq_length=seq_length
    )
    num_bytes = sum(tensor.nbytes for tensor in planned.values())
    with new_folder(target, num_bytes) as temporary:
        with console.track(f"exporting {path}", num_bytes, "bytes") as progress:
            tensors = _hf_tensors(reader, views)
            files, digests = write_tensors(
                temporary, planned, tensors, shard_bytes, digested=planned, advance=progress.advance
            )
        copied = _write_others(temporary, template, content, config)
        others = [entry for entry in temporary.iterdir() if entry.is_file() and entry.name not in files]
        files |= {entry.name: manifest.entry_of(entry) for entry in others}
        facts = {"source": str(path), "tensors": digests}
        if (path / manifest.NAME).exists():
            facts[CHECKPOINT_DIGEST] = manifest.entry_of(path / manifest.NAME).sha256
        manifest.write(temporary, Manifest(files=files, facts=facts))
    changed = ", ".join(sorted(key for key in {*config, *content} if config.get(key) != content.get(key)))
    console.say(
        f"exported {path} to {target} ({size(num_bytes)})\n  config.json   {template / CONFIG}, "
        f"{f'changed: {changed}' if changed else 'unchanged'}\n  copied        "
        f"{', '.join(copied) or 'nothing: the folder has no tokenizer'}"
    )


def _write_others(folder: Path, template: Path, content: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Write config.json and copy tokenizer files.  Returns the names of the copied files."""
    if config == content:
        shutil.copyfile(template / CONFIG, folder / CONFIG)
    else:
        (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return copy_companions(template, folder)


def _verify(path: Path, verify: Verify, console: Console) -> None:
    entries = manifest.read(path)
    if entries is None:
        console.say(f"{path} is not verified: the checkpoint has no manifest")
        return
    if verify == "full":
        console.say(f"verifying {path} ({size(entries.num_bytes)})")
    manifest.refuse(path, manifest.damage(path, entries, verify=verify))


def _find_template(common: Mapping[str, Any], path: Path, like: Path | None) -> Path:
    """The Hugging Face folder whose config.json and tokenizer the export uses."""
    recipe = _recipe(common)
    named = [Path(recipe[key]) for key in ("model.hf", "model.init_from") if recipe.get(key)]
    folders_to_try = [like, like / IMPORTED] if like else [path.parent / IMPORTED]
    if not like:
        folders_to_try += [at for folder in named for at in (folder, folder / IMPORTED, folder.parent / IMPORTED)]
    for folder in folders_to_try:
        if (folder / CONFIG).is_file():
            return folder
    tried = ", ".join(map(str, folders_to_try))
    if like:
        raise CheckpointError(
            f"--hf {like} has no {CONFIG}; --hf must name the Hugging Face folder from which the weights came."
        )
    raise CheckpointError(
        f"{path} does not name its Hugging Face model, and {tried} has no {CONFIG}.  Give the folder with {CONFIG} "
        "and the tokenizer: --hf DIR."
    )


def _recipe(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe of the run that wrote the checkpoint; empty if another program wrote the checkpoint."""
    sft = common.get("sft")
    recipe = sft.get("recipe") if isinstance(sft, dict) else None
    return recipe if isinstance(recipe, dict) else {}


def _model(
    common: Mapping[str, Any], imported: Architecture, path: Path, console: Console
) -> tuple[ModelConfig, int | None]:
    """The trained model and the length of its packs.  If the checkpoint has no recipe, config.json gives the model."""
    recipe = _recipe(common)
    fields = {key[6:]: value for key, value in recipe.items() if key.startswith("model.")}
    if fields:
        inexpressible = ("megatron.", "moe.capacity_factor")  # transformers has no such options
        if lost := {key for key in fields if key.startswith(inexpressible) and fields[key]}:
            console.say(f"WARNING: config.json cannot store {', '.join(sorted(lost))}, which the run set")
        kept = {key: value for key, value in fields.items() if key.partition(".")[0] not in _NOT_SHAPE}
        return ModelConfig.model_validate(nested(kept)), recipe.get("data.seq_length")
    args, model = common.get("args"), imported.model
    expected: dict[str, Any] = {"rotary_base": model.rope.base, "norm_epsilon": model.norm_epsilon}
    if model.moe.num_experts:
        expected |= {
            "moe_router_topk": model.moe.top_k,
            "moe_router_pre_softmax": not model.moe.normalize_top_k,
            "moe_router_score_function": "softmax",
            "moe_router_topk_scaling_factor": None,
            "moe_router_group_topk": None,
        }
    wrong = [
        f"{name} is {getattr(args, name)} in the checkpoint, but {value} in config.json"
        for name, value in expected.items()
        if getattr(args, name, value) != value
    ]
    if wrong:
        raise CheckpointError(f"{path} is of another model: {'; '.join(wrong)}.")
    return model, None


def _check(reader: TorchDistReader, mappings: list[TensorMapping], path: Path) -> None:
    stored = {key: shape for key, shape in reader.shapes.items() if not key.startswith(_NOT_MODEL)}
    wanted = {mapping.key: _padded_like(stored.get(mapping.key), mapping) for mapping in mappings}
    other = [
        f"of type {reader.dtype(key)}: {key}"
        for key in wanted
        if key in stored and reader.dtype(key) not in DTYPES.values()
    ]
    check_tensors(stored, wanted, str(path), other=other)


def _padded_like(stored: tuple[int, ...] | None, mapping: TensorMapping) -> tuple[int, ...]:
    """The expected shape of our tensor.  A vocabulary may have as many rows of padding as the stored one."""
    shape = mapping.shape()
    is_padded = stored is not None and stored[0] > shape[0] and stored[1:] == shape[1:]
    return stored if mapping.form == "vocabulary" and is_padded and stored else shape


def _main_dtype(planned: Iterable[torch.Tensor]) -> str:
    """The type that most bytes have, such as `bfloat16`, for config.json."""
    num_bytes = Counter[torch.dtype]()
    for tensor in planned:
        num_bytes[tensor.dtype] += tensor.nbytes
    return str(num_bytes.most_common(1)[0][0]).removeprefix("torch.")


def _hf_tensors(
    reader: TorchDistReader, views: Mapping[HfTensor, Sequence[tuple[TensorMapping, int]]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every Hugging Face tensor, put together from its views."""
    rows_of = _ViewReader(reader)
    for tensor, parts in views.items():
        whole = None
        for mapping, number in parts:
            view = mapping.sources[number]
            if view.is_whole:
                whole = rows_of.view(mapping, number)
                continue
            if whole is None:
                whole = torch.empty(tensor.shape, dtype=reader.dtype(mapping.key))
            matrix = whole[view.index].T if view.transposed else whole[view.index]
            matrix[view.first : view.first + view.num_rows] = rows_of.view(mapping, number)
        assert whole is not None
        yield tensor.name, whole


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
        return self._reader.read(mapping.key, offset, (*[1] * depth, count, *row_shape)).view(count, *row_shape)
