"""Says what a changed recipe does to the learning rate of a run that continues.

A run computes each rate from its own recipe, as if all its steps had had this recipe.  So the rate may change at once
where a run continues with another length, peak, warm-up or schedule.  `sft check` and every start say so.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sft.checkpoint.continuation import Continuation
from sft.checkpoint.train_state import with_current_names
from sft.config import Config, OptimConfig
from sft.config.keys import leaves
from sft.config.schedule import KEYS, Schedule
from sft.errors import ConfigError

StepsOf = Callable[[int], int]  # converts epochs to steps
_JUMP = 2.0  # a rate that changes by more than this factor jumps
_UNKNOWN = "learning rates not compared: the data decide how many steps there are (--no-data)"
_LENGTH = ("train.num_steps", "train.num_epochs")


def change(
    resumed: Continuation, config: Config, num_steps: int | None, steps_of: StepsOf | None
) -> tuple[str, bool] | None:
    """A line about the new learning rates, and whether the rate jumps; None if the recipe changes no rate.

    Both rates are those of the next step, because a warm-up of the unchanged recipe may double the rate in one step.
    If the next step is after the end of the checkpoint's recipe, that recipe's last rate is compared.

    num_steps  steps of the whole run by this recipe; None if they are unknown
    steps_of   None if the data are not read.  Then the length of a recipe with epochs is unknown

    cosine from 1e-3 to 1e-5, resumed after step 6, num_steps 6 -> 12: step 7 has 3.77e-4 instead of 1e-5, a jump
    """
    step = resumed.step
    if num_steps is not None and step >= num_steps:
        return None
    stored = {} if resumed.facts is None else with_current_names(resumed.facts["recipe"])
    now = {f"optim.{key}": getattr(config.optim, key) for key in KEYS}
    now |= {key: getattr(config.train, key.removeprefix("train.")) for key in _LENGTH}
    if stored and all(stored.get(key, _default(key)) == value for key, value in now.items()):
        return None
    own = _schedule(stored, steps_of) if stored else None
    if num_steps is None or (stored and own is None):
        return _UNKNOWN, False
    schedule = Schedule.resolve(config.optim, num_steps)
    new, end = schedule.rate(config.optim, step + 1), schedule.rate(config.optim, num_steps)
    ours = f"{new:.3g} at step {step + 1} of {num_steps} by this recipe, which ends with {end:.3g}"
    if own is None:
        return f"learning rate: {ours}; {resumed.path} does not say which rates it had", False
    optim, before = own
    if (before, [getattr(optim, key) for key in KEYS]) == (schedule, [getattr(config.optim, key) for key in KEYS]):
        return None  # epochs and steps of the same number
    length = before.num_steps
    last, old = before.rate(optim, min(step, length)), before.rate(optim, min(step + 1, length))
    text = (
        f"{last:.3g} at step {min(step, length)} of {length} by the recipe of {resumed.path}, which "
        f"{'ended' if step >= length else 'would have ended'} with {before.rate(optim, length):.3g}; {ours}"
    )
    if old <= _JUMP * new and new <= _JUMP * old:
        return f"learning rate: {text}", False
    return (
        f"the learning rate jumps where the run continues: {text}.  If this is not meant, give the keys of optim and "
        "the length of the run their former values; to train on at a low rate, set optim.lr to it and "
        "optim.schedule=constant."
    ), True


def _default(key: str) -> Any:
    return leaves()[key].default


def _schedule(recipe: Mapping[str, Any], steps_of: StepsOf | None) -> tuple[OptimConfig, Schedule] | None:
    """The optimizer settings and the schedule of a recipe in a checkpoint.

    None if the number of its steps is unknown, or if its values are no longer valid.
    """
    num_steps = recipe.get("train.num_steps")
    if num_steps is None and steps_of is None:
        return None
    values = {key: recipe[f"optim.{key}"] for key in OptimConfig.model_fields if f"optim.{key}" in recipe}
    try:
        optim = OptimConfig.model_validate(values)
        return optim, Schedule.resolve(optim, num_steps or (steps_of or int)(recipe.get("train.num_epochs") or 1))
    except (ValueError, ConfigError):  # pydantic raises ValueError
        return None
