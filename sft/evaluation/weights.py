"""Loads the weights that a command scores, into an engine without gradients and optimizer.

This module decides which weights are scored, and whether they fit the recipe.
"""

from pathlib import Path

from sft.checkpoint import folders, resume_setting
from sft.checkpoint.continuation import check_tokens
from sft.checkpoint.train_state import model_changes, tokenizer_name
from sft.config import Config
from sft.config.keys import values
from sft.console import Console
from sft.data.chat.tokenizer import ChatTokenizer
from sft.errors import CheckpointError, ConfigError, DataError
from sft.hf.hub import ADAPTERS, CONFIG, is_hub_name
from sft.hf.pretrained import model_keys, read_pretrained
from sft.mcore.checkpoint_io import safe_reader
from sft.mcore.engine import Engine
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0
from sft.parallel.layout import Layout
from sft.recipe.run_dir import named_checkpoint
from sft.recipe.tokenizer import same_ids, tokenizer_of
from sft.weights.lora.initial_adapters import as_in_folder
from sft.weights.run_weights import load_for_reading
from sft.weights.trained import trained_weights


def load_engine(
    config: Config,
    source: str | None,
    tokenizer: ChatTokenizer,
    layout: Layout,
    groups: ProcessGroups,
    vocab_size: int,
    console: Console,
) -> tuple[Engine, str, int]:
    """An engine that does not train, with the weights that `source` names as in `main`.  Collective.

    Returns the engine, a text that names the weights, and the step of their checkpoint, or 0.
    """
    checkpoint, text = broadcast_from_rank0(lambda: _chosen(config, source, tokenizer, console), groups.control)
    starts: list[Config] = []
    all_gather_objects(lambda: starts.append(_with_pretrained(text, config)), groups.control)
    (start,) = starts
    trained = trained_weights(start, vocab_size)
    engine = Engine(start, layout, groups, vocab_size=vocab_size, num_steps=1, trained=trained, trains=False)
    weights = load_for_reading(engine, start, checkpoint, console)
    step = 0 if checkpoint is None else int(safe_reader.common_state(checkpoint).get("iteration", 0))
    return engine, weights, step


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
    elif (Path(source) / ADAPTERS).is_file():
        return None, config.model_copy(update={"lora": as_in_folder(config, source)})
    elif is_hub_name(source) or (Path(source) / CONFIG).is_file():
        _check_hf(config, source, tokenizer, console)
        weights = config.model.model_copy(update={"hf": source, "init_from": None})
        return None, config.model_copy(update={"model": weights})
    else:
        checkpoint = named_checkpoint(Path(source))
    _check_checkpoint(config, checkpoint, tokenizer, console)
    return checkpoint, config


def _check_checkpoint(config: Config, checkpoint: Path, tokenizer: ChatTokenizer, console: Console) -> None:
    """Raise CheckpointError if a run with another model or tokenizer wrote the checkpoint.

    A checkpoint of another program names neither model nor tokenizer.  Then only the shapes of its tensors are
    compared, when it is loaded.
    """
    trained = safe_reader.common_state(checkpoint).get("sft")
    if trained is None:
        return
    check_tokens(checkpoint, trained, values(config))
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
            f"{source} is another model than that of the recipe: {'; '.join(different[:5])}.  Score it with a "
            f"recipe of its model, for example with model.hf={source}."
        )
    _check_tokenizer(config, source, tokenizer, f"{source} has", console)


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
