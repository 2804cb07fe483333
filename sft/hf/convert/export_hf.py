"""A Megatron checkpoint -> a Hugging Face folder: what transformers loads and others serve.

What the weights alone do not say, the family, the tokenizer and the rest of config.json, comes from the folder that
they once came from: named, or found by the checkpoint (`hf/` beside an imported one, `model.hf` or `model.init_from`
of the recipe that trained it).
"""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from sft.checkpoint import folders, manifest
from sft.checkpoint.manifest import Manifest, Verify
from sft.config import ModelConfig
from sft.console import Console, Progress, size
from sft.errors import CheckpointError
from sft.hf.architecture import CONFIG, Architecture, architecture, nested, read
from sft.hf.convert.atomic_folder import copy_companions, new_folder
from sft.hf.convert.safetensors_folder import DTYPES
from sft.hf.convert.safetensors_writer import SHARD_BYTES, Planned, TensorWriter
from sft.hf.convert.tensor_check import check_tensors
from sft.hf.convert.torch_dist_reader import TorchDistReader
from sft.hf.family import Item
from sft.hf.model_keys import IMPORTED
from sft.hf.write_back import write_back
from sft.mcore.checkpoint_io import safe_reader

_AT_ONCE = 1 << 30  # bytes; a tensor of ours up to this is read whole, and cut in memory
# Beside the model: moments and fp32 weights, generators, plain values.
_NOT_MODEL = ("optimizer.", "chained_", "rng_state", "common_state", "rerun_state")
# Of our recipe, what says nothing about the model.
_NOT_SHAPE = ("init_from", "hf", "init_std", "megatron")


def export_hf(
    source: Path,
    target: Path,
    console: Console,
    *,
    like: Path | None = None,
    verify: Verify = "full",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Convert the checkpoint `source`, or the newest one in that folder or run, to the new folder `target`.

    like: the Hugging Face folder that it came from; None: found by the checkpoint
    Raises ConfigError or CheckpointError; then nothing was written.
    """
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists; nothing was written.  Remove it, or name another folder.")
    path = _checkpoint(source)
    _verify(path, verify, console)
    common = safe_reader.common_state(path)
    template = _template(common, path, like)
    content = read(template)
    before = architecture(content, str(template / CONFIG))
    model, seq_length = _model(common, before, path, console)
    boxes = TorchDistReader(path)
    items = list(before.family.items(model, model.vocab_size or before.vocab_size))
    _check(boxes, items, path)
    items.sort(key=lambda item: -boxes.dtype(item.key).itemsize)  # so that numbers lie where their type wants them
    planned = [Planned(part.name, boxes.dtype(item.key), part.shape) for item in items for part in item.parts]
    now = write_back(content, model, str(template / CONFIG), dtype=_main_dtype(planned), seq_length=seq_length)
    num_bytes = sum(one.num_bytes for one in planned)
    with new_folder(target, num_bytes) as written:
        with console.track(f"exporting {path}", num_bytes, "bytes") as progress:
            writer = _write(boxes, items, TensorWriter(written, planned, shard_bytes), progress)
        copied = _write_others(written, template, content, now)
        others = [entry for entry in written.iterdir() if entry.is_file() and entry.name not in writer.files]
        rest = {entry.name: manifest.entry_of(entry) for entry in others}
        facts = {"source": str(path), "tensors": writer.digests}
        manifest.write(written, Manifest(files=rest | writer.files, facts=facts))
    changed = ", ".join(sorted(key for key in {*now, *content} if now.get(key) != content.get(key)))
    console.say(
        f"exported {path} to {target} ({size(num_bytes)})\n"
        f"  config.json   {template / CONFIG}, {f'changed: {changed}' if changed else 'unchanged'}\n"
        f"  copied        {', '.join(copied) or 'nothing: no tokenizer is beside it'}"
    )


def _write(boxes: TorchDistReader, items: list[Item], writer: TensorWriter, progress: Progress) -> TensorWriter:
    try:
        for item in items:
            for name, tensor in _parts(boxes, item):
                progress.advance(writer.write(name, tensor))
    finally:
        writer.close()
    writer.finish()
    return writer


def _write_others(written: Path, template: Path, content: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """config.json and the files that go along; their names."""
    if now == content:
        shutil.copyfile(template / CONFIG, written / CONFIG)
    else:
        (written / CONFIG).write_text(json.dumps(now, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return copy_companions(template, written)


def _checkpoint(source: Path) -> Path:
    """The checkpoint itself, or the best one of a folder of them, or of a run."""
    if folders.is_one(source):
        return source
    found = folders.candidates(source) or folders.candidates(source / "checkpoints")
    if not found:
        raise CheckpointError(
            f"{source}: no checkpoint there (a folder iter_XXXXXXX with {folders.MARKER}, or one that holds such)."
        )
    return found[0]


def _verify(path: Path, verify: Verify, console: Console) -> None:
    """Raises CheckpointError naming every file that is not as it was written."""
    written = manifest.read(path)
    if written is None:
        console.say(f"{path} is unverified: it has no manifest, so nobody can tell if it is whole")
        return
    if verify == "full":
        console.say(f"verifying {path} ({size(written.num_bytes)})")
    if problems := manifest.damage(path, written, verify=verify):
        raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}.")


def _template(common: Mapping[str, Any], path: Path, like: Path | None) -> Path:
    """The Hugging Face folder whose config.json and tokenizer go along."""
    recipe = _recipe(common)
    named = [Path(recipe[key]) for key in ("model.hf", "model.init_from") if recipe.get(key)]
    places = [like, like / IMPORTED] if like else [path.parent / IMPORTED]
    places += [] if like else [place for one in named for place in (one, one / IMPORTED, one.parent / IMPORTED)]
    for folder in places:
        if (folder / CONFIG).is_file():
            return folder
    tried = ", ".join(map(str, places))
    if like:
        raise CheckpointError(f"--hf {like} has no {CONFIG}; it is the Hugging Face folder that the weights came from.")
    raise CheckpointError(
        f"{path} does not say which Hugging Face model it came from: no {CONFIG} in {tried}.  Name the folder that has "
        f"it, and the tokenizer: --hf DIR."
    )


def _recipe(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every key of the recipe that wrote the checkpoint; nothing where it was not written by a run of this trainer."""
    ours = common.get("sft")
    found = ours.get("recipe") if isinstance(ours, dict) else None
    return found if isinstance(found, dict) else {}


def _model(
    common: Mapping[str, Any], before: Architecture, path: Path, console: Console
) -> tuple[ModelConfig, int | None]:
    """The model as it was trained, and the length of its packs; as config.json says where the checkpoint does not."""
    recipe = _recipe(common)
    fields = {key[6:]: value for key, value in recipe.items() if key.startswith("model.")}
    if fields:
        unsaid = ("megatron.", "moe.capacity_factor")  # what changes numbers, and transformers has no word for
        if other := {key for key in fields if key.startswith(unsaid) and fields[key]}:
            console.say(f"WARNING: the run set {', '.join(sorted(other))}, which config.json cannot say")
        kept = {key: value for key, value in fields.items() if key.partition(".")[0] not in _NOT_SHAPE}
        return ModelConfig.model_validate(nested(kept)), recipe.get("data.seq_length")
    args, model = common.get("args"), before.model
    told: dict[str, Any] = {"rotary_base": model.rope.base, "norm_epsilon": model.norm_epsilon}
    if model.moe.num_experts:
        told |= {
            "moe_router_topk": model.moe.top_k,
            "moe_router_pre_softmax": not model.moe.normalize_top_k,
            "moe_router_score_function": "softmax",
            "moe_router_topk_scaling_factor": None,
            "moe_router_group_topk": None,
        }
    wrong = [
        f"{name} is {getattr(args, name)} in the checkpoint, and {value} in config.json"
        for name, value in told.items()
        if getattr(args, name, value) != value
    ]
    if wrong:
        raise CheckpointError(f"{path} is of another model: {'; '.join(wrong)}.")
    return model, None


def _check(boxes: TorchDistReader, items: list[Item], path: Path) -> None:
    """Raise CheckpointError listing every tensor that is not as the model has it."""
    found = {key: shape for key, shape in boxes.shapes.items() if not key.startswith(_NOT_MODEL)}
    wanted: dict[str, tuple[int, ...]] = {}
    for item in items:
        shape, there = item.shape(), found.get(item.key)
        padded = item.form == "vocabulary" and there is not None and there[0] > shape[0] and there[1:] == shape[1:]
        wanted[item.key] = found[item.key] if padded else shape
    other = [
        f"of type {boxes.dtype(key)}: {key}"
        for key in wanted
        if key in found and boxes.dtype(key) not in DTYPES.values()
    ]
    check_tensors(found, wanted, str(path), other=other)


def _main_dtype(planned: list[Planned]) -> str:
    """Of most bytes: what config.json says of the weights, as `bfloat16`."""
    kinds: dict[torch.dtype, int] = {}
    for one in planned:
        kinds[one.dtype] = kinds.get(one.dtype, 0) + one.num_bytes
    return str(max(kinds, key=lambda dtype: kinds[dtype])).removeprefix("torch.")


def _parts(boxes: TorchDistReader, item: Item) -> Iterator[tuple[str, torch.Tensor]]:
    """Their tensors, in the order of the item's parts."""

    def rows(start: int, count: int) -> torch.Tensor:
        offset = (*item.first, start, *[0] * len(item.row))
        return boxes.read(item.key, offset, (*[1] * len(item.first), count, *item.row)).view(count, *item.row)

    spans = item.spans()
    in_pieces = len(spans) > len(item.parts)
    num_bytes = item.num_rows * boxes.dtype(item.key).itemsize * math.prod(item.row)
    whole = rows(0, item.num_rows) if in_pieces or num_bytes <= _AT_ONCE else None
    for i, part in enumerate(item.parts):
        mine = [span for span in spans if span.part == i]
        if whole is None:
            yield part.name, rows(mine[0].at, mine[0].num_rows)
        else:
            cut = [whole[span.at : span.at + span.num_rows] for span in mine]
            yield part.name, cut[0] if len(cut) == 1 else torch.cat(cut)
