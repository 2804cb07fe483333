"""Finds mistakes in a recipe that depend on its data or on the launch.

Schedules must fit the number of steps, and documents must fit the model's positions.  With dynamic CP, the nodes of the
recipe must be those that torchrun has started.  `sft check` and training call `check_run`, so both refuse the same
recipes with the same words.  sft/config/ finds mistakes in the keys alone, and sft/parallel/layout.py finds mistakes
that depend on the number of processes.
"""

import math
import os
from collections.abc import Iterator

import numpy as np

from sft.config import RANDOM, Config, listed
from sft.config.schedule import Schedule
from sft.errors import ConfigError
from sft.layers import kernel_keys
from sft.parallel.alignment import aligned
from sft.recipe.resolved import Recipe

_SMALL = 512  # hidden_size below which a model is a test
# Learning rates of AdamW in published fine-tuning runs, with a margin of about 10 on both sides.
_RATES = (1e-7, 1e-3)
_LORA_RATES = (5e-5, 5e-3)
_MOST_TOKENS = 2**24  # of a step
_WASTE = 0.05  # share of all tokens that another data.doc_multiple would save
_FEW_STEPS = 10  # in a run of fewer steps, a last step without an update is a considerable part of the run


def check_run(
    recipe: Recipe, *, num_steps: int | None = None, num_packs: int | None = None, longest: int | None = None
) -> list[str]:
    """Warnings about the run.  Raises ConfigError that lists all mistakes.

    num_steps  steps of the whole run; None if they depend on data that are not read
    num_packs  packs of the first epoch; None if the data are not read
    longest    tokens of the longest document; None if the data are not read

    warm-up of 100 steps in a run of 32      -> ConfigError
    checkpoint.save_every = 500, 32 steps    -> ["checkpoint.save_every = 500 ... ends after 32 steps ..."]
    """
    config = recipe.config
    beyond, num_full = _positions(recipe, longest), config.train.global_batch_size
    warnings = [] if num_steps is None else [*_step_warnings(config, num_steps)]
    if num_packs is not None and num_packs < num_full:
        warnings.append(
            f"the data fill {num_packs} of the {num_full} packs of a step (train.global_batch_size = {num_full}), and "
            "the other packs are empty; lower train.global_batch_size or data.seq_length"
        )
    warnings += [*_best_warnings(config), *_rate_warnings(config)]
    warnings += [*_batch_warnings(config, num_packs), *_node_warnings(config)]
    problems = [*kernel_keys.problems(config)]
    if num_steps is not None:
        try:
            Schedule.resolve(config.optim, num_steps)
        except ConfigError as error:
            keys = [key for key in ("optim.warmup_steps", "optim.warmup_fraction") if recipe.is_from_user(key)]
            origins = ", ".join(f"{key} ({recipe.origins[key]})" for key in keys)
            problems.append(f"{error}  Set in: {origins}.")
    if beyond is not None:
        (warnings if longest is None else problems).append(beyond)
    if problems:
        raise ConfigError(listed(problems))
    return warnings


def _step_warnings(config: Config, num_steps: int) -> Iterator[str]:
    """Yields a warning for each setting that has no or a bad effect in a run of `num_steps` steps."""
    saves, evaluations = config.checkpoint.save_every, config.train.eval_every
    ends = f"the run ends after {num_steps} step{'s' * (num_steps > 1)}"
    optim = config.optim
    if num_steps < _FEW_STEPS and optim.schedule != "constant" and optim.min_lr == 0.0:
        yield (
            f"the last of {num_steps} step{'s' * (num_steps > 1)} has learning rate 0 (optim.min_lr = 0) and changes "
            "no weight; for a short test use optim.schedule=constant"
        )
    if saves is not None and saves > num_steps:
        saved = "only the last step is saved" if config.checkpoint.save_last else "nothing is saved"
        yield f"checkpoint.save_every = {saves}, but {ends}: {saved}"
    if evaluations is not None and evaluations > num_steps:
        yield f"train.eval_every = {evaluations}, but {ends}: only its start and its end are evaluated"
    for name in ("memory", "torch"):
        late = [step for step in getattr(config.profile, name).steps or () if step > num_steps]
        if late:
            yield f"profile.{name}.steps has step {', '.join(map(str, late))}, but {ends}: nothing is recorded then"


def _best_warnings(config: Config) -> Iterator[str]:
    """Yields a warning if some saved steps cannot become the best checkpoint."""
    saves, evaluations = config.checkpoint.save_every, config.train.eval_every
    if config.checkpoint.keep_best and saves is not None and (evaluations is None or saves % evaluations):
        interval = "is null" if evaluations is None else f"= {evaluations}"
        yield (
            f"checkpoint.keep_best compares saved steps that are also evaluated, but train.eval_every {interval} and "
            f"checkpoint.save_every = {saves}; make save_every a multiple of eval_every"
        )


def _rate_warnings(config: Config) -> Iterator[str]:
    """Yields a warning for a learning rate outside the range of published settings.

    Models of a width below `_SMALL` are left out, because they are tests, and learn at high rates.
    """
    lr, is_lora = config.optim.lr, config.lora.is_used
    if lr >= 1.0 and config.optim.name == "adamw":
        low, high = _LORA_RATES if is_lora else _RATES
        yield (
            f"optim.lr = {lr:g}: AdamW changes each weight by about the learning rate in each step; published runs "
            f"have {low:g} to {high:g}"
        )
        return
    if (config.model.hidden_size or 0) < _SMALL or config.model.init_from == RANDOM:
        return
    if is_lora and lr < _LORA_RATES[0]:
        yield (
            f"optim.lr = {lr:g} is a learning rate for all weights; adapters usually need 1e-4 to 5e-4, about ten "
            "times as much (the recipes here have 2e-4)"
        )
    low, high = _LORA_RATES if is_lora else _RATES
    if lr > high or (lr < low and not is_lora):
        weights = "adapters" if is_lora else "all weights"
        yield f"optim.lr = {lr:g} is outside {low:g} to {high:g}, in which published runs train {weights}"


def _batch_warnings(config: Config, num_packs: int | None) -> Iterator[str]:
    """Yields a warning for a step with very many tokens, or if an epoch has very few steps."""
    packs = config.train.global_batch_size
    if (config.model.hidden_size or 0) < _SMALL:
        return
    if (tokens := packs * config.data.seq_length) > _MOST_TOKENS:
        yield (
            f"a step has up to {tokens:,} tokens (train.global_batch_size = {packs} x data.seq_length), more than "
            f"published fine-tuning runs have ({_MOST_TOKENS:,}); fewer packs give more updates from the same data"
        )
    if num_packs is not None and 1 < (steps := math.ceil(num_packs / packs)) < _FEW_STEPS:
        yield (
            f"an epoch has only {steps} steps, so the weights change little; a smaller "
            f"train.global_batch_size than {packs} gives more steps"
        )


def wasteful_multiple(config: Config, lengths: np.ndarray) -> Iterator[str]:
    """Yields a warning if padding of documents wastes much, and a smaller data.doc_multiple less.

    lengths: tokens of the samples, int [n]
    """
    multiple, smaller = config.data.doc_multiple, 2 * config.parallel.cp
    if multiple <= smaller or multiple % smaller or not len(lengths):
        return
    shares = [1 - float(lengths.sum() / aligned(lengths, each).sum()) for each in (multiple, smaller)]
    if shares[0] - shares[1] >= _WASTE:
        yield (
            f"data.doc_multiple = {multiple} makes {shares[0]:.1%} of the tokens padding inside documents; "
            f"data.doc_multiple={smaller} would make {shares[1]:.1%}"
        )


def _node_warnings(config: Config) -> Iterator[str]:
    """Yields a warning if torchrun has started another number of ranks on a node than dynamic CP assumes in its
    plan."""
    planned, local = config.parallel.gpus_per_node, int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    fits_one_node = os.environ.get("WORLD_SIZE") == str(local) and local <= planned
    if config.parallel.dynamic_cp and local not in (0, planned) and not fits_one_node:
        yield (
            f"parallel.gpus_per_node = {planned}, but torchrun started {local} processes on this node: dynamic CP "
            f"plans messages between other nodes than there are; set parallel.gpus_per_node={local}"
        )


def reached_positions(recipe: Recipe) -> int | None:
    """The number of positions that the model was trained on, with the scaling of its rotary positions.

    None if config.json does not name it, or if the user accepts more positions by setting model.rope.scaling = none or
    model.rope.base.
    """
    model = recipe.config.model
    trained = None if model.pretrained is None else model.pretrained.max_positions
    is_plain = model.rope.scaling == "none" and recipe.is_from_user("model.rope.scaling")
    if trained is None or is_plain or recipe.is_from_user("model.rope.base"):
        return None
    return max(trained, math.floor((model.rope.original_max_position or trained) * model.rope.factor))


def _positions(recipe: Recipe, longest: int | None) -> str | None:
    """A text if the longest document, or a pack if `longest` is None, has more positions than the model was trained on.

    None if there is no such problem, or if the number of positions is not limited (`reached_positions`).
    """
    model, reached = recipe.config.model, reached_positions(recipe)
    tokens = recipe.config.data.seq_length if longest is None else longest
    if reached is None or tokens <= reached:
        return None
    assert model.pretrained is not None
    original = model.rope.original_max_position or model.pretrained.max_positions
    assert original is not None
    trained = model.pretrained.max_positions
    known = f"was trained on {reached:,} positions (max_position_embeddings)"
    if trained is not None and trained < reached:
        known = (
            f"was trained on {trained:,} positions, and model.rope.factor = {model.rope.factor:g} reaches {reached:,}"
        )
    subject = "packs may hold documents of" if longest is None else "the longest document has"
    scaled = f"scaling=yarn model.rope.factor={math.ceil(tokens / original)}"
    return (
        f"{subject} {tokens:,} tokens, but model.hf = {model.hf} {known}.  Scale the positions: model.rope.{scaled} "
        f"model.rope.original_max_position={original}; or train beyond them as they are: model.rope.scaling=none"
    )
