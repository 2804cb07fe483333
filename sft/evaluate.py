"""Scores weights on held-out sets with the code of a run's evaluations.

This module decides which weights are scored, and whether they fit the recipe.  It changes nothing in the run's folder
except the cache of tokenised data, and takes no lock, so that the checkpoints of a running run can be scored.  The
engine has no gradients and no optimizer.
"""

import json
import math
import sys
import time
from pathlib import Path

from sft.checkpoint import folders, resume_setting
from sft.checkpoint.train_state import installed, model_changes, tokenizer_name
from sft.config import Config
from sft.config.keys import values
from sft.console import Console
from sft.data.chat.tokenizer import ChatTokenizer
from sft.data.pipeline import HeldOutData
from sft.errors import CheckpointError, ConfigError, DataError, StorageError, TrainingError
from sft.files.atomic_files import replace_text
from sft.hf.hub import CONFIG, is_hub_name
from sft.hf.pretrained import model_keys, read_pretrained
from sft.mcore import process_groups
from sft.mcore.checkpoint_io import safe_reader
from sft.mcore.engine import Engine
from sft.metrics.log import MetricsLog
from sft.metrics.records import Record
from sft.metrics.run_facts import RunFacts
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0
from sft.parallel.layout import Layout
from sft.recipe.join import join_ranks
from sft.recipe.resolved import Recipe
from sft.recipe.tokenizer import same_ids, tokenizer_of
from sft.run.evaluation import evaluate
from sft.run.signals import leave_with_parent
from sft.weights.lora.initial_adapters import as_in_folder
from sft.weights.lora.peft.config import CONFIG as ADAPTER_CONFIG
from sft.weights.run_weights import load_for_reading
from sft.weights.trained import trained_weights

FORMAT = "sft eval 1"


def main(recipe: Recipe, layout: Layout, source: str | None, json_file: Path | None) -> None:
    """Score weights on all sets of data.eval, as one rank.  Prints results on stdout, progress on stderr.  Collective.

    source     names the weights: a checkpoint, run, Hugging Face model or PEFT folder; None: the newest checkpoint of
               the run, or the weights from which the run would start
    json_file  a file for the records; None: no file is written
    Raises SftError if the weights cannot be scored.
    """
    config = recipe.config
    leave_with_parent()
    groups = join_ranks(config, layout)
    console = Console(groups.rank, sys.stderr)
    tokenizer = tokenizer_of(config)
    checkpoint, text = broadcast_from_rank0(lambda: _chosen(config, source, tokenizer, console), groups.control)
    starts: list[Config] = []
    all_gather_objects(lambda: starts.append(_with_pretrained(text, config)), groups.control)
    (start,) = starts
    data = HeldOutData(config, tokenizer, recipe.arguments, layout, groups, console)
    trained = trained_weights(start, data.vocab_size)
    engine = Engine(start, layout, groups, vocab_size=data.vocab_size, num_steps=1, trained=trained, trains=False)
    weights = load_for_reading(engine, start, checkpoint, console)
    step = 0 if checkpoint is None else int(safe_reader.common_state(checkpoint).get("iteration", 0))
    console.say(f"scoring {weights}")
    records = score(engine, data, Console(groups.rank, sys.stdout), step)
    content = {
        "format": FORMAT,
        "recipe": recipe.arguments,
        "weights": weights,
        "step": step,
        "layout": layout.sizes,
        "versions": installed(),
        "sets": records,
    }
    if json_file is not None:
        broadcast_from_rank0(lambda: _write(json_file, json.dumps(content, indent=1) + "\n"), groups.control)
    process_groups.stop()


def score(engine: Engine, data: HeldOutData, console: Console, step: int) -> dict[str, Record]:
    """Evaluates each held-out set, and prints a line about it on `console`.  Returns the records by name.  Collective.

    Raises TrainingError if a loss is not finite.
    """
    run = RunFacts.of(engine.config, engine.layout, engine.vocab_size)
    log = MetricsLog(Path(engine.config.run.dir), [], console, run, step=step, num_steps=step)
    records = {}
    for name, loader in data.held_out.items():
        started = time.monotonic()
        totals = evaluate(engine, loader)
        assert totals is not None
        if not math.isfinite(totals.objective):
            raise TrainingError(f"the held-out loss of {name} after step {step} is {totals.objective}.")
        records[name] = log.evaluation(step, name, totals, seconds=time.monotonic() - started)
    return records


def _chosen(config: Config, source: str | None, tokenizer: ChatTokenizer, console: Console) -> tuple[Path | None, str]:
    """The result of `choose`, with the config as JSON, so that rank 0 can send it."""
    checkpoint, start = choose(config, source, tokenizer, console)
    return checkpoint, start.model_dump_json()


def _with_pretrained(text: str, config: Config) -> Config:
    """The config that rank 0 sent as JSON.  JSON leaves out model.pretrained, so this rank adds it."""
    start = Config.model_validate_json(text)
    name, known = start.model.hf, config.model.pretrained
    if name is not None and (known is None or known.name != name):
        known, _ = read_pretrained(name)
    return start.model_copy(update={"model": start.model.model_copy(update={"pretrained": known})})


def choose(
    config: Config, source: str | None, tokenizer: ChatTokenizer, console: Console
) -> tuple[Path | None, Config]:
    """The Megatron checkpoint to score, and the config with which it is loaded.

    The checkpoint is None if initial weights are scored; the config then names them and their adapters.
    Raises ConfigError or CheckpointError if there are no such weights, or if they do not fit the recipe.
    """
    own = Path(config.run.dir) / "checkpoints"
    if source is None:
        if folders.candidates(own) or folders.has_saved_before(own):
            checkpoint = folders.find([own], f"run.dir = {config.run.dir}")
        elif config.checkpoint.resume in resume_setting.WORDS:
            return None, config
        else:
            checkpoint = resume_setting.named(config.checkpoint)
    elif (Path(source) / ADAPTER_CONFIG).is_file():
        return None, config.model_copy(update={"lora": as_in_folder(config, source)})
    elif is_hub_name(source) or (Path(source) / CONFIG).is_file():
        _check_hf(config, source, tokenizer, console)
        weights = config.model.model_copy(update={"hf": source, "init_from": None})
        return None, config.model_copy(update={"model": weights})
    else:
        checkpoint = _named(Path(source))
    _check_checkpoint(config, checkpoint, tokenizer, console)
    return checkpoint, config


def _named(source: Path) -> Path:
    """The Megatron checkpoint that --from names, or the newest one of a run or of a folder of checkpoints."""
    try:
        return folders.find([source, source / "checkpoints"], "--from")
    except CheckpointError:
        why = "has no weights" if source.exists() else f"does not exist in {Path.cwd()}"
        raise CheckpointError(
            f"--from {source} {why}; expected {folders.EXPECTED}, or a run with checkpoints, or a Hugging Face folder "
            "with config.json and safetensors files, or a PEFT folder with adapter_config.json, or a name of the hub."
        ) from None


def _check_checkpoint(config: Config, checkpoint: Path, tokenizer: ChatTokenizer, console: Console) -> None:
    """Raise CheckpointError if a run with another model or tokenizer wrote the checkpoint.

    A checkpoint of another program names neither model nor tokenizer.  Then only the shapes of its tensors are
    compared, when it is loaded.
    """
    trained = safe_reader.common_state(checkpoint).get("sft")
    if trained is None:
        return
    changed = model_changes(trained, values(config))
    if refused := [f"{key} {change}" for key, change in changed.items() if key not in config.checkpoint.allow_changes]:
        allowed = ", ".join([*config.checkpoint.allow_changes, *changed])
        raise CheckpointError(
            f"{checkpoint} is of another model than this recipe: {'; '.join(refused)}.  Score it with the recipe of "
            f"its run; or accept the change, if the tensors keep their shapes: checkpoint.allow_changes=[{allowed}]."
        )
    _check_tokenizer(config, tokenizer_name(trained), tokenizer, f"{checkpoint} was trained with", console)


def _check_hf(config: Config, source: str, tokenizer: ChatTokenizer, console: Console) -> None:
    """Raise ConfigError if `source` has another model or tokenizer than the recipe; rotary positions may differ."""
    recipe = values(config)
    different = [
        f"{key} is {value} in {where}, and {recipe[key]} in the recipe"
        for key, (value, where) in model_keys(*read_pretrained(source)).items()
        if not key.startswith("model.rope.") and recipe[key] != value
    ]
    if different:
        raise ConfigError(
            f"--from {source} is another model than that of the recipe: {'; '.join(different[:5])}.  Score it with a "
            f"recipe of its model, for example with model.hf={source}."
        )
    _check_tokenizer(config, source, tokenizer, f"--from {source} has", console)


def _check_tokenizer(config: Config, name: str, tokenizer: ChatTokenizer, whose: str, console: Console) -> None:
    """Raise ConfigError if the tokenizer `name` of the weights makes other tokens than that of the recipe.

    whose: the beginning of the error message
    """
    if name == config.tokenizer:
        return
    try:
        other = tokenizer_of(config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": name})}))
    except DataError as error:
        console.say(f"the tokenizer of the weights was not compared with that of the recipe: {error}")
        return
    if not same_ids(other, tokenizer):
        raise ConfigError(
            f"{whose} the tokenizer {name}, and the recipe uses {config.tokenizer}, which makes other tokens of the "
            f"same text.  Score these weights with data.tokenizer={name}."
        )


def _write(file: Path, text: str) -> None:
    try:
        replace_text(file, text)
    except OSError as error:
        raise StorageError(f"--json {file} cannot be written: {error}.") from error
