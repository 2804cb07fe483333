"""Converts a Megatron checkpoint to a Hugging Face folder, which transformers and inference servers load.

`original.py` finds the original model, which gives the family, config.json, the tokenizer and the tensors that are not
trained.  `trained_tensors.py` assembles the trained tensors, and `stored_form.py` quantises them.  `proof.py` compares
the written tensors with those that the export must have.  A checkpoint of adapters becomes a PEFT folder
(`export_adapter.py`) or a merged model (`merged_weights.py`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sft.checkpoint import folders, manifest
from sft.checkpoint.manifest import Entry, Manifest, Verify
from sft.config import ModelConfig
from sft.config.checkpoint import ExportFormat
from sft.console import Console, size
from sft.errors import CheckpointError, ConfigError
from sft.files.folder_files import copy
from sft.hf.architecture import Architecture, architecture, nested, read, write_back
from sft.hf.hub import CONFIG
from sft.hf.quantization import QUANTIZATION
from sft.hf.safetensors_writer import SHARD_BYTES
from sft.mcore.checkpoint_io import safe_reader
from sft.mcore.checkpoint_io.megatron_arguments import expert_arguments
from sft.weights.atomic_folder import copy_companions, new_folder, refuse_existing
from sft.weights.background_exports import CHECKPOINT_DIGEST
from sft.weights.export.export_adapter import export_adapter
from sft.weights.export.merged_weights import open_merged
from sft.weights.export.model_card import write_model_card
from sft.weights.export.original import Original, describe_tokenizer, find_original
from sft.weights.export.stored_form import open_form
from sft.weights.export.tensor_types import expected_tensors, main_dtype
from sft.weights.export.trained_tensors import check_stored, model_tensors
from sft.weights.export.written_tensors import WrittenTensors
from sft.weights.lora import merged_adapters
from sft.weights.serving import served_files
from sft.weights.torch_dist import TorchDistReader

# Keys, and groups of keys, below `model` that do not describe the architecture.
_NOT_SHAPE = ("init_from", "hf", "hf_read_once", "init_std", "megatron")

Finish = Callable[[Path, dict[str, Entry]], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `sft export`."""

    like: Path | None = None  # the Hugging Face folder from which the weights came; None: see `find_original`
    dtype: str | None = None  # type of all trained tensors, e.g. `float32`; None: each keeps its type in the original
    shard_bytes: int = SHARD_BYTES
    format: ExportFormat | None = None  # None: as the recipe's checkpoint.export_format says
    merged: bool | None = None  # whether adapters are added to the weights; None: as the recipe's lora.export says


def export_hf(source: Path, target: Path, console: Console, *, verify: Verify = "full", **options: Any) -> Path:
    """Convert the checkpoint `source`, or the newest checkpoint of the run or folder `source`, to the folder `target`.

    verify: how the files of the checkpoint are compared with its manifest
    options: the fields of `Options`
    Returns the checkpoint that was converted.
    A ConfigError or CheckpointError means that nothing was written.
    """
    refuse_existing(target)
    path = find_checkpoint(source)
    with _verifying(path, verify, console) as finish_verification:
        _convert(path, target, console, finish_verification, Options(**options))
    return path


def find_checkpoint(source: Path) -> Path:
    """The checkpoint `source`, or the newest of the run or folder `source`; CheckpointError if there is none."""
    if (source / CONFIG).is_file() and any(source.glob("*.safetensors")):
        raise CheckpointError(
            f"{source} is a Hugging Face folder already, so there is nothing to convert.  Give a checkpoint or a run."
        )
    return folders.find([source, source / "checkpoints"], str(source))


def _convert(
    path: Path, target: Path, console: Console, finish_verification: Callable[[], None], options: Options
) -> None:
    """Convert the checkpoint `path`.  The folder `target` appears only after `finish_verification` has returned."""
    common = safe_reader.common_state(path)
    recipe = _recipe(common)
    options = _with_format(options, recipe)

    def finish(folder: Path, files: dict[str, Entry]) -> None:
        _write_manifest(folder, path, files)
        finish_verification()

    if recipe.get("lora.rank") is None:
        if options.merged is not None:
            raise CheckpointError(f"{path} holds whole weights and no adapters.  Leave out --merged and --no-merged.")
    elif not (recipe.get("lora.export") == "merged" if options.merged is None else options.merged):
        like, dtype = options.like, options.dtype
        if options.format != "bf16":
            raise ConfigError(
                f"checkpoint.export_format = {options.format} quantises whole models, but {path} is exported as "
                "adapters, which are not quantised.  Use --merged, or --format bf16."
            )
        export_adapter(path, target, console, common, recipe, like=like, dtype=dtype, finish=finish)
        return
    _write_model(path, target, console, common, options, finish)


def _write_model(
    path: Path, target: Path, console: Console, common: Mapping[str, Any], options: Options, finish: Finish
) -> None:
    """Write the whole model; merge adapters if the checkpoint has any.

    finish: called with the folder and the entries of its tensor files, before the folder gets its final name
    """
    recipe, has_mtp = _recipe(common), bool(getattr(common.get("args"), "mtp_num_layers", None))
    original = find_original(path, recipe, options.like, has_mtp=has_mtp)
    original_content = read(original.folder)
    imported = architecture(original_content, str(original.folder / CONFIG))
    model, seq_length = _model(common, imported, path, console)
    reader, tensors = TorchDistReader(path), model_tensors(imported, model, original, path)
    form = open_form(options.format or "bf16", imported, tensors, original, recipe, options.like, has_mtp=has_mtp)
    content = original_content if form.source else _dequantised(original_content)
    if recipe.get("lora.rank") is None:
        merging = None
        check_stored(reader, tensors.values(), path)
    else:
        merging = open_merged(path, common, recipe, tensors, like=options.like, original=original, console=console)
    moves_bias = bool(getattr(common.get("args"), "moe_router_bias_update_rate", 0.0))
    expected = expected_tensors(tensors, original, reader, options.dtype, moves_bias=moves_bias)
    written = WrittenTensors(
        tensors=tensors, expected=expected, original=original, reader=reader, merging=merging, form=form
    )
    dtype = None if form.source else main_dtype(written.planned[name] for name in tensors)
    config = write_back(content, model, str(original.folder / CONFIG), dtype=dtype, seq_length=seq_length)
    config |= form.config(written.planned)
    if original.served is not None:
        config = served_files.with_ends(config, original.served.end_ids)
    num_bytes = written.num_bytes
    with new_folder(target, num_bytes) as temporary:
        with console.track(f"exporting {path}", num_bytes, "bytes") as progress:
            files = written.write(temporary, options.shard_bytes, f"the export of {path}", progress.advance)
        copied = _write_others(temporary, original, original_content, config)
        if merging:
            merged_adapters.write(temporary, merging.holds)
        form.check(temporary, original.name, has_mtp=has_mtp)
        write_model_card(temporary, path, common, original, form.card())
        served_files.check_tokenizer(temporary, str(path), original.served)
        finish(temporary, files)
    changed = ", ".join(_changed(original_content, config))
    count = f"{len(tensors) - written.num_unchanged:,} tensors trained{' or merged' if merging else ''}, "
    count += f"{written.num_unchanged:,} of {merging.base}, " if merging else ""
    count += f"{len(original.names('passed through')):,} passed through"
    console.say(
        f"exported {path} to {target} ({size(num_bytes)}; {count})\n"
        f"  config.json   {original.folder / CONFIG}, {f'changed: {changed}' if changed else 'unchanged'}\n"
        f"  copied        {', '.join(copied) or 'nothing: the folder has no tokenizer'}"
    )
    for line in (form.describe(), describe_tokenizer(original, recipe) if recipe else ""):
        if line:
            console.say(line)


def _with_format(options: Options, recipe: Mapping[str, Any]) -> Options:
    """The options with a format: by default, that of the recipe.

    Raises ConfigError if the options have a type and a quantised format.
    """
    format = options.format or recipe.get("checkpoint.export_format", "bf16")
    if format != "bf16" and options.dtype is not None:
        raise ConfigError(
            f"--dtype {options.dtype} is the type of an export that is not quantised, but the format is {format}.  "
            "Leave out --dtype, or add --format bf16."
        )
    return replace(options, format=format)


def _write_manifest(folder: Path, checkpoint: Path, files: dict[str, Entry]) -> None:
    others = [entry for entry in folder.iterdir() if entry.is_file() and entry.name not in files]
    facts = {"source": str(checkpoint)}
    if (checkpoint / manifest.NAME).exists():
        facts[CHECKPOINT_DIGEST] = manifest.entry_of(checkpoint / manifest.NAME).sha256
    files = files | {path.name: manifest.entry_of(path) for path in others}
    manifest.write(folder, Manifest(files=files, facts=facts))


def _dequantised(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json without quantization_config, because the tensors of an export are not quantised."""
    return {
        key: _dequantised(value) if key == "text_config" and isinstance(value, dict) else value
        for key, value in content.items()
        if key != QUANTIZATION
    }


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The sorted keys whose values in two contents of config.json differ."""
    return sorted(key for key in {*before, *after} if before.get(key) != after.get(key))


def _write_others(folder: Path, original: Original, content: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Write config.json and copy tokenizer files.  Returns the names of the copied files."""
    if config == content:
        copy(original.folder, CONFIG, folder)
    else:
        (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return copy_companions(original.tokenizer, folder)


@contextmanager
def _verifying(path: Path, verify: Verify, console: Console) -> Iterator[Callable[[], None]]:
    """A context manager whose thread compares the checkpoint's files with their digests.

    Yields a function that waits for the thread and raises CheckpointError if a file differs.  If the block raises a
    CheckpointError and a file differs, the error about the file is raised instead.
    """
    entries = manifest.read(path)
    if entries is None:
        console.say(f"{path} is not verified: the checkpoint has no manifest")
        yield lambda: None
        return
    manifest.refuse(path, manifest.damage(path, entries, verify="size"))
    thread = ThreadPoolExecutor(1, "verifying")
    if verify == "full":
        console.say(f"verifying {path} ({size(entries.num_bytes)})")
    problems = thread.submit(manifest.damage, path, entries, verify=verify)
    try:
        yield lambda: manifest.refuse(path, problems.result())
    except CheckpointError:
        manifest.refuse(path, problems.result())
        raise
    finally:
        thread.shutdown(wait=False)


def _recipe(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe of the run that wrote the checkpoint; {} if another program wrote the checkpoint."""
    sft = common.get("sft")
    recipe = sft.get("recipe") if isinstance(sft, dict) else None
    return recipe if isinstance(recipe, dict) else {}


def _model(
    common: Mapping[str, Any], imported: Architecture, path: Path, console: Console
) -> tuple[ModelConfig, int | None]:
    """The trained model, and data.seq_length of its recipe.

    If the checkpoint has no recipe, the model comes from config.json, and the length is None.
    """
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
        compared = ("topk", "pre_softmax", "score_function", "topk_scaling_factor", "group_topk", "enable_expert_bias")
        stored = expert_arguments(model)
        expected |= {name: stored[name] for name in (f"moe_router_{part}" for part in compared)}
    wrong = [
        f"{name} is {getattr(args, name)} in the checkpoint, but {value} in config.json"
        for name, value in expected.items()
        if getattr(args, name, value) != value
    ]
    if wrong:
        raise CheckpointError(f"{path} is of another model: {'; '.join(wrong)}.")
    return model.model_copy(update={"has_mtp": bool(getattr(args, "mtp_num_layers", None))}), None
