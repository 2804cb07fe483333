"""Chooses the weights from which a new run starts: those of model.hf, a Megatron checkpoint, or random weights.

`load_initial` loads them into an engine.  `describe` describes and checks them without reading their values.  `sft
check` calls it, so megatron-core is imported only where weights or checkpoints are read.
"""

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sft.checkpoint import continuation, folders, manifest
from sft.config import RANDOM, Config
from sft.config.keys import values
from sft.console import Console, size
from sft.errors import CheckpointError, ConfigError, first_few
from sft.hf import hub_weights
from sft.hf.hub import CONFIG
from sft.hf.hub_headers import header_folder
from sft.hf.model_family import model_family
from sft.hf.source import Source, open_source
from sft.hf.tensor_check import check_tensors
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0

if TYPE_CHECKING:
    from sft.mcore.engine import Engine


def load_initial(engine: "Engine", config: Config, console: Console) -> str:
    """Load the weights from which a new run starts into `engine`.  Collective.  Returns a text that names them.

    Raises ConfigError or CheckpointError on all ranks if the weights are missing, or do not fit the model.
    """
    from sft.checkpoint import resume
    from sft.mcore import initial_weights
    from sft.mcore.checkpoint_io import engine_state
    from sft.weights.load import load_weights
    from sft.weights.new_rows import set_new_rows

    model, control = config.model, engine.groups.control
    if model.init_from == RANDOM:
        initial_weights.initialise(engine)
        return f"random weights (seed {config.run.seed})"
    if model.init_from is not None:
        path = broadcast_from_rank0(partial(find_checkpoint, model.init_from), control)
        broadcast_from_rank0(partial(_check_tokens, path, config), control)
        point = resume.verified(path, config.checkpoint.verify, engine.groups)
        engine_state.load_weights(engine, point.path)
        return f"the weights of {point.path} ({point.verification})"
    opened: list[Source] = []
    all_gather_objects(lambda: opened.append(_open(config, compare=engine.groups.rank == 0)), control)
    load_weights(engine, opened[0], console, read_once=model.hf_read_once)
    rows = model.pretrained.new_rows if model.pretrained else ()
    all_gather_objects(lambda: set_new_rows(engine, opened[0], rows), control)
    enlarged = _described_rows(config) + _kept_rows(opened[0], config)
    return f"the weights of {_described(opened[0], config)}{enlarged}"


def describe(config: Config, vocab_size: int | None) -> str:
    """Check the weights from which a new run starts by the headers and the index of their files.  Returns a text.

    vocab_size: number of rows of the embedding without padding; None if unknown
    Raises ConfigError or CheckpointError if the weights are missing or incomplete, or do not fit the model.
    """
    model = config.model
    if model.init_from == RANDOM:
        return f"random (seed {config.run.seed})"
    if model.init_from is None:
        if (on_hub := _on_hub(config)) is not None:
            return on_hub + _described_rows(config)
        source = _open(config)
        return _described(source, config) + _described_rows(config) + _kept_rows(source, config)
    path = find_checkpoint(model.init_from)
    _check_tokens(path, config)
    entries = manifest.read(path)
    if entries is not None:
        manifest.refuse(path, manifest.damage(path, entries, verify="size"))
    return compare_tensors(path, config, vocab_size)


def compare_tensors(path: Path, config: Config, vocab_size: int | None) -> str:
    """Compare the index of a Megatron checkpoint with the model.  Returns a text with number and size of its weights.

    vocab_size: number of rows of the embedding without padding; None if unknown
    Raises CheckpointError if weights are missing or have other shapes than the model.
    """
    from sft.mcore.checkpoint_io import safe_reader

    model, stored = config.model, safe_reader.tensors(path)
    family = model_family(model)
    if family is None:
        return f"{path}: not compared with the model, because no table has its tensors"
    wanted = {
        mapping.key: mapping.shape_like(stored[mapping.key][0] if mapping.key in stored else None)
        for mapping in family.mappings(model, model.vocab_size or vocab_size or 0)
    }
    held = {key: stored[key][0] for key in wanted if key in stored}
    check_tensors(held, wanted, str(path))
    num_bytes = sum(math.prod(shape) * stored[key][1].itemsize for key, shape in held.items())
    return f"{path}: {len(wanted):,} tensors; {size(num_bytes)}"


def find_checkpoint(init_from: str) -> Path:
    """The Megatron checkpoint that model.init_from names.

    Raises CheckpointError if there is none, and ConfigError if it is a Hugging Face folder.
    """
    key = f"model.init_from = {init_from}"
    try:
        return folders.find([Path(init_from)], key)
    except CheckpointError:
        if not (Path(init_from) / CONFIG).is_file():
            raise
    raise ConfigError(
        f"{key} is a Hugging Face folder, but must be a Megatron checkpoint.  To start from the weights of this "
        f"folder: model.hf={init_from} model.init_from=null."
    )


def _check_tokens(path: Path, config: Config) -> None:
    continuation.check_tokens(path, continuation.facts_of(path), values(config))


def _described_rows(config: Config) -> str:
    """A text about the rows of data.add_tokens; "" without."""
    rows = config.model.pretrained.new_rows if config.model.pretrained else ()
    if not rows:
        return ""
    values = {"mean": "the mean of the pieces that its token had before", "random": "random"}[config.model.added_rows]
    names = ", ".join(first_few((repr(row.token) for row in rows), 3))
    if len(rows) == 1:
        return f"; 1 new row ({names}), {values}"
    return f"; {len(rows):,} new rows ({names}), each {values}"


def _kept_rows(source: Source, config: Config) -> str:
    """A text about tensors that are passed through with fewer rows than the enlarged embedding; "" without any.

    They are the embedding and the output weight of a block for multi-token prediction that is not trained, and whose
    values differ from those of the model.
    """
    before = source.architecture.vocab_size
    names = [name for name in source.names("passed through") if source.manifest[name].shape[:1] == (before,)]
    if not names or config.model.vocab_size == before:
        return ""
    return (
        f"; {' and '.join(names)}, passed through, keep {before:,} rows, so a server cannot predict several tokens "
        "with an export (train.mtp=detached trains them)"
    )


def _described(source: Source, config: Config) -> str:
    """The text of `Source.describe`, with the types that a bf16 run rounds to BF16."""
    wide = sorted({source.manifest[name].dtype for name in source.names("trained")} - {"BF16"})
    if not wide or config.run.precision != "bf16":
        return source.describe()
    return f"{source.describe()}; {' and '.join(wide)} is rounded to BF16"


def _on_hub(config: Config) -> str | None:
    """A text about weights of a hub name that are not downloaded yet, from their headers; None if none are missing."""
    pretrained = config.model.pretrained
    snapshot = None if pretrained is None else pretrained.snapshot
    missing = None if snapshot is None else hub_weights.missing_weights(snapshot)
    if snapshot is None or missing is None:
        return None
    from huggingface_hub import is_offline_mode

    name = snapshot.name
    amount = "" if missing.num_bytes is None else f", {size(missing.num_bytes)}"
    later = f"not downloaded yet: {len(missing.files)} files{amount}"
    if is_offline_mode():
        return f"{name}: {later}; HF_HUB_OFFLINE is set, so that no start can download them"
    with header_folder(snapshot, missing.files) as folder:
        opened = open_source(folder, name, compare=False, has_mtp=config.model.has_mtp)
        _refuse_plain(opened, config)
        return f"{_described(opened, config)}; {later}"


def _open(config: Config, *, compare: bool = True) -> Source:
    pretrained = config.model.pretrained
    assert pretrained is not None
    name = pretrained.name
    if (Path(name) / folders.POINTER).is_file():
        raise ConfigError(
            f"model.hf = {name} holds a Megatron checkpoint and no safetensors files.  To start from its weights: "
            f"model.init_from={name}."
        )
    source = open_source(pretrained.folder, name, compare=compare, has_mtp=config.model.has_mtp)
    _refuse_plain(source, config)
    return source


def _refuse_plain(source: Source, config: Config) -> None:
    """Raise ConfigError if model.base_dtype = as_stored, but the files store no weight in low bits."""
    if config.model.base_dtype == "as_stored" and not source.stored.dequantised:
        raise ConfigError(
            f"model.base_dtype = as_stored keeps weights in the low bits of {source.name}, but its files have none.  "
            "model.base_dtype=nf4 quantises its frozen weights to 4 bits when they are loaded."
        )
