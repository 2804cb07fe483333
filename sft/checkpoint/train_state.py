"""Defines the progress of a run (TrainState), and the conditions that determine its results (Conditions).

If conditions have changed since a checkpoint was written, this module decides which changes are only reported, and
which are refused unless checkpoint.allow_changes names them.
"""

import importlib.metadata
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sft.checkpoint.best import Best
from sft.checkpoint.origin import RunOrigin
from sft.config import Config
from sft.config.keys import RENAMED, is_reported, leaves, values
from sft.errors import ConfigError
from sft.metrics.totals import StepResult
from sft.parallel.layout import Layout
from sft.parallel.messages import message

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers")
# Name in the versions of a checkpoint -> name of the distribution.  `sft` on the package index is another project.
_DISTRIBUTIONS = {"sft": "sft-megatron", **{name: name for name in _PACKAGES}}
BASE = "base"  # the name of the field `Conditions.base`, in `not_compared`
_TRAINED = ("train.freeze", "optim.name")  # keys that decide which states a checkpoint has
_START_ONLY = ("model.hf", "model.init_from", "model.init_std", "model.added_rows", "lora.init_from")
# For keys whose default changes the behaviour of earlier runs: the value with the behaviour before the key existed.
_BEFORE = {"data.supervise_inserted": False}
_CONVERTED = {"optim.moments": "; the moments of the checkpoint are converted"}
_NOT_COMPUTED = ("lora.lr_ratio", "lora.export")  # keys of the group lora that do not change what the model computes


@message
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The progress of a run, as checkpoints store it.  The position in the data is computed from `step`."""

    step: int = 0  # optimizer steps done
    num_tokens: int = 0  # supervised tokens on which the run has trained
    num_real_tokens: int = 0  # tokens of samples on which the run has trained
    num_skipped: int = 0  # steps without a supervised token
    num_bad: int = 0  # steps skipped because of a non-finite loss or gradient
    bad_in_a_row: int = 0  # non-finite steps since the last finite step
    epoch: int = 0  # epoch of the last completed step
    batch: int = -1  # global batch of the last completed step, within its epoch
    chain: str = ""  # SHA-256 chain of the sample log after the last step
    evaluated: int = -1  # the last step after which all held-out sets were evaluated
    best: Best | None = None  # the best checkpoint by checkpoint.keep_best; None without keep_best
    origin: RunOrigin | None = None  # the checkpoint from which the run began, if checkpoint.resume was a path

    @staticmethod
    def read(stored: Mapping[str, Any]) -> "TrainState":
        """The state from `stored`, the result of `asdict` in a checkpoint of this or an earlier version."""
        plain = {name: value for name, value in stored.items() if name not in ("best_step", "best_value")}
        return TrainState(**{**plain, "best": Best.read(stored), "origin": RunOrigin.read(stored.get("origin"))})

    @property
    def best_step(self) -> int | None:
        return None if self.best is None else self.best.step

    def after(self, result: StepResult, location: tuple[int, int], chain: str) -> "TrainState":
        """The state after one more step.  location: its epoch and global batch; chain: the chain digest after it"""
        return replace(
            self,
            step=self.step + 1,
            num_tokens=self.num_tokens + (0 if result.is_nonfinite else result.num_tokens),
            num_real_tokens=self.num_real_tokens + (0 if result.is_nonfinite else result.num_real_tokens),
            num_skipped=self.num_skipped + (result.skipped and not result.is_nonfinite),
            num_bad=self.num_bad + result.is_nonfinite,
            bad_in_a_row=self.bad_in_a_row + 1 if result.is_nonfinite else 0,
            epoch=location[0],
            batch=location[1],
            chain=chain,
        )


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Everything that determines the results of a run.  All values are JSON types."""

    plan: dict[str, Any]  # settings that determine the order of the data (`sft.data.packing`)
    recipe: dict[str, Any]  # value of every key of the recipe
    layout: dict[str, int]
    versions: dict[str, str]
    base: str | None = None  # digest of the frozen weights beside which adapters are trained

    @staticmethod
    def of(config: Config, layout: Layout, plan: dict[str, Any], base: str | None) -> "Conditions":
        """The conditions of a run on this machine."""
        return Conditions(plan=plan, recipe=recipe_values(config), layout=layout.sizes, versions=installed(), base=base)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Differences between two Conditions.

    reported  lines for the log
    refused   {refused key: a text with the old and the new value}
    """

    reported: list[str]
    refused: dict[str, str]


def installed() -> dict[str, str]:
    """The versions of sft and of the installed packages on which results depend."""
    versions = {}
    for name, distribution in _DISTRIBUTIONS.items():
        try:
            versions[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def changes(
    before: Mapping[str, Any], now: Conditions, allowed: Sequence[str], not_compared: Collection[str] = frozenset()
) -> Changes:
    """The differences between `before`, the Conditions in a checkpoint as a dictionary, and `now`, those of this run.

    allowed       checkpoint.allow_changes
    not_compared  keys of the plan whose values in `now` are unknown
    Raises ConfigError if `allowed` names a key that is never refused.
    """
    refused = {key: text for key, text in _differences(before["plan"], now.plan) if key not in not_compared}
    recipe = dict(_differences(_with_defaults(before["recipe"], now.recipe), now.recipe))
    if "data" in refused:
        old, note = [key for key in _BEFORE if key in recipe and key not in before["recipe"]], ""
        if old:
            same = f"{old[0]} = {str(_BEFORE[old[0]]).lower()} gives the same tokens and masks"
            note = f"; the run began before {old[0]} existed, and {same}"
        refused["data"] = f"has other samples (digest {refused['data']}{note})"
    refused |= model_changes(before, now.recipe)
    refused |= {key: recipe[key] for key in _TRAINED if key in recipe}
    known = {*before["plan"], *now.plan, *filter(_describes_model, [*before["recipe"], *now.recipe])}
    known |= now.recipe.keys() & _TRAINED
    if unknown := [key for key in allowed if key not in known]:
        raise ConfigError(
            f"checkpoint.allow_changes names {unknown[0]}, which is never refused.  It may name: "
            f"{', '.join(sorted(known))}."
        )
    reported = [
        f"{key} {change}{_CONVERTED.get(key, '')}"
        for key, change in recipe.items()
        if key not in refused and is_reported(key)
    ]
    reported += [f"{key} {change}, as allowed" for key, change in refused.items() if key in allowed]
    sizes = _differences(before["layout"], now.layout)
    reported += [f"{name} {change}" for name, change in sizes if f"parallel.{name}" not in recipe]
    reported += [f"{name} {change}" for name, change in _differences(before["versions"], now.versions)]
    return Changes(reported=reported, refused={key: change for key, change in refused.items() if key not in allowed})


def model_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """The changed keys that describe the model, each with a text that names the old and the new value.

    before: the Conditions in the checkpoint, as a dictionary; now: the value of each key of the recipe
    """
    differences = _differences(_with_defaults(before["recipe"], now), now)
    return {key: change for key, change in differences if _describes_model(key)}


def recipe_values(config: Config) -> dict[str, Any]:
    """The value of every key of the recipe.  data.tokenizer is the tokenizer that is used, also if the recipe has
    null."""
    return values(config) | {"data.tokenizer": config.tokenizer}


def tokenizer_name(before: Mapping[str, Any]) -> str:
    """The tokenizer of a run: data.tokenizer; if that is null, model.hf; if both are null, byte."""
    return before["recipe"]["data.tokenizer"] or before["recipe"]["model.hf"] or "byte"


def _with_defaults(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces old names of keys in `before` by current names.

    A key of `now` that the checkpoint does not have gets its value in `_BEFORE`, or else its default.
    """
    schema = leaves()
    before = with_current_names(before)
    newer = {key: _BEFORE.get(key, schema[key].default) for key in now if key not in before and key in schema}
    return {**newer, **before}


def with_current_names(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe of a checkpoint, in which renamed keys have their current names."""
    return {RENAMED.get(key, key): value for key, value in recipe.items()}


def _describes_model(key: str) -> bool:
    """Whether a change of the key changes the computation of the model, even with tensors of the same shapes."""
    return key.startswith(("model.", "lora.")) and key not in _START_ONLY + _NOT_COMPUTED and is_reported(key)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields each key whose values differ, and a text with both values."""
    for key in dict.fromkeys([*before, *now]):
        was, is_ = before.get(key), now.get(key)
        if _plain(was) != _plain(is_):
            yield key, f"was {_shown(was)}, is {_shown(is_)}"


def _plain(value: Any) -> Any:
    """Converts `value` to a form in which equal settings are equal.

    Tuples become lists, an empty list becomes None, and keys with the value None, which older versions do not write,
    are left out.
    """
    if isinstance(value, dict):
        return {key: _plain(element) for key, element in value.items() if element is not None}
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value] or None
    return value


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return f"{text[:12]}..." if re.fullmatch(r"[0-9a-f]{64}", text) else text  # shortens a digest
