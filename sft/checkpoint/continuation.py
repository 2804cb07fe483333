"""Finds the checkpoint from which a run would continue, and checks how the recipe has changed since it was saved.

`sft check`, `sft status` and every start of a run call `check`, so all of them refuse a run with the same message.
The facts of a checkpoint are the state of the training and the conditions of the run (`Continuation.facts`).  They are
in manifest.json.  Older versions of this trainer stored them only in a pickle, which `safe_reader.py` reads.  This
module neither writes nor renames files, and computes no SHA-256.
"""

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.checkpoint import folders, manifest, resume_setting
from sft.checkpoint.manifest import Manifest
from sft.checkpoint.origin import RunOrigin
from sft.checkpoint.train_state import BASE, Changes, Conditions, changes
from sft.config import CheckpointConfig, Config
from sft.errors import CheckpointError, first_few

# Keys of which another value always gives weights of another number or shape.
_SHAPES = [f"model.{name}" for name in ("num_layers", "hidden_size", "ffn_hidden_size")]


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """The checkpoint from which a run continues.

    path      the folder, or the URL of a copy in checkpoint.remote
    is_named  whether checkpoint.resume is a path that leads to the checkpoint
    facts     the TrainState (key "state") and the fields of Conditions; None if another program wrote the checkpoint
    damaged   one text for each newer checkpoint that is skipped because it is damaged
    reported  one line for each change of recipe, plan, layout or versions that is not refused
    """

    path: Path | str
    is_named: bool
    facts: Mapping[str, Any] | None
    damaged: tuple[str, ...] = ()
    reported: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.facts["state"]["step"]) if self.facts else folders.step_of(Path(self.path)) or 0


def check(
    config: Config, folder: Path, now: Conditions, not_compared: Collection[str] = frozenset()
) -> Continuation | None:
    """The checkpoint from which the run continues, with the changes since its save; None if a new run starts.

    folder: the folder with the checkpoints of the run
    not_compared: keys of the plan, or BASE, whose values in `now` are unknown
    Raises CheckpointError or ConfigError if the run cannot continue.
    """
    paths, is_named = selected(config.checkpoint, folder)
    damaged: list[str] = []
    for path in paths:
        try:
            if config.checkpoint.verify != "off" and (entries := manifest_of(path)) is not None:
                manifest.refuse(path, manifest.damage(path, entries, verify="size"))
            facts = facts_of(path)
        except CheckpointError as error:
            if is_named:
                raise
            damaged.append(str(error))
            continue
        reported = compare(path, facts, now, config.checkpoint, is_named=is_named, not_compared=not_compared)
        return Continuation(path=path, is_named=is_named, facts=facts, damaged=tuple(damaged), reported=tuple(reported))
    if damaged:
        raise CheckpointError(none_undamaged(folder, damaged))
    return None


def selected(config: CheckpointConfig, folder: Path) -> tuple[list[Path], bool]:
    """The checkpoints from which the run may continue, newest first, and whether checkpoint.resume is their path.

    Raises CheckpointError if checkpoint.resume does not allow the run to begin or to continue.
    """
    resume_setting.check(config, folder)
    candidates = folders.candidates(folder)
    if config.resume in resume_setting.WORDS or _started_from(Path(config.resume), candidates):
        return candidates, False
    return [resume_setting.named(config)], True


def _started_from(named: Path, candidates: list[Path]) -> bool:
    """Whether the run that wrote `candidates` (newest first) started from `named`, the path in checkpoint.resume.

    If so, the run continues from its own checkpoints.  A requeued job that continued from `named` would lose its steps.
    Skips damaged candidates.  If all are damaged, returns True, and the caller's verification reports the damage.
    Raises CheckpointError if nothing shows whether `named` is the checkpoint from which the run started.
    """
    if candidates and named.exists() and named.samefile(candidates[0].parent):
        return True
    for path in candidates:
        try:
            facts = facts_of(path) or {}
            origin = RunOrigin.read(facts["state"]["origin"])
        except (CheckpointError, KeyError, TypeError):
            continue
        return origin is not None and origin.is_named_by(named, folders.step_of(path) or 0)
    return bool(candidates)


def manifest_of(path: Path) -> Manifest | None:
    """The manifest of the checkpoint in `path`; None if another program wrote the checkpoint without a manifest.

    Raises CheckpointError if the manifest is damaged, or if a checkpoint of this trainer has none.
    """
    entries = manifest.read(path)
    if entries is None and facts_of(path) is not None:
        raise CheckpointError(f"{path / manifest.NAME} is missing; this trainer writes it into every checkpoint.")
    return entries


def facts_of(path: Path) -> Mapping[str, Any] | None:
    """The TrainState (key "state") and the fields of Conditions in a checkpoint; None if another program wrote it."""
    try:
        entries = manifest.read(path)
    except CheckpointError:  # reported by `manifest_of`, unless checkpoint.verify = off
        entries = None
    if entries is not None and "state" in entries.facts:
        return entries.facts
    from sft.mcore.checkpoint_io import safe_reader  # imports torch, which a manifest with facts does not need

    facts: Mapping[str, Any] | None = safe_reader.common_state(path).get("sft")
    return facts


def compare(
    path: Path | str,
    facts: Mapping[str, Any] | None,
    now: Conditions,
    config: CheckpointConfig,
    *,
    is_named: bool,
    not_compared: Collection[str] = frozenset(),
) -> list[str]:
    """Compares a checkpoint with this run.  Returns one line for each change since the save that is not refused.

    facts: the result of `facts_of`; now: the conditions of this run; is_named, not_compared: as for `Continuation` and
           `check`

    Raises CheckpointError if a change is refused, or if another program wrote the checkpoint and checkpoint.resume does
    not name it.  Raises ConfigError if checkpoint.allow_changes names a key that is never refused.
    """
    if facts is None and not is_named:
        raise CheckpointError(
            f"{path} was not written by this trainer and does not say which samples were used.  Start from its "
            f"weights with model.init_from={path}, or resume weights, moments, schedule and step with "
            f"checkpoint.resume={path}."
        )
    check_tokens(path, facts, now.recipe)
    if facts is None:
        return []
    check_base(path, facts.get("base"), now.base, is_compared=False)
    changed = changes(facts, now, config.allow_changes, not_compared)
    if changed.refused:
        raise CheckpointError(_refusal(path, changed, config.allow_changes))
    check_base(path, facts.get("base"), now.base, is_compared=BASE not in not_compared)
    return changed.reported


def check_base(path: Path | str, stored: str | None, base: str | None, *, is_compared: bool = True) -> None:
    """Raise CheckpointError if the checkpoint and this run differ in their frozen weights, beside which adapters are
    trained, or in whether they train adapters.

    stored, base: digest of the frozen weights, in the checkpoint and now; None if all weights are trained
    is_compared: False compares only whether adapters are trained, and not the digests
    """
    if stored == base or (stored is not None and base is not None and not is_compared):
        return
    weights = f" of the weights {stored[:12]}" if stored and base else ""
    other = f" of the weights {base[:12]}" if stored and base else ""
    raise CheckpointError(
        f"{path} trains {'all weights' if stored is None else 'adapters' + weights}, but this recipe trains "
        f"{'all weights' if base is None else 'adapters' + other}.  Give model.hf, model.init_from, "
        "model.base_dtype and lora.rank the values of that run; or start a new run with another run.dir"
        f"{f', from these weights: model.init_from={path}' if stored is None else ''}."
    )


def check_tokens(path: Path | str, facts: Mapping[str, Any] | None, recipe: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the run of the checkpoint added the same tokens in the same order as this recipe.

    Rows of the embedding belong to these tokens.  Shapes do not show a change, because the padding has rows, too.
    facts: the result of `facts_of`; recipe: the value of each key now
    """
    before, now = (
        [token for key in ("data.add_tokens", "data.add_special_tokens") for token in values.get(key) or []]
        for values in ((facts or {}).get("recipe") or {}, recipe)
    )
    if before != now:
        added, adds = (
            f"the tokens {', '.join(first_few(map(repr, tokens)))}" if tokens else "no tokens"
            for tokens in (before, now)
        )
        raise CheckpointError(
            f"the run of {path} added {added}, but this recipe adds {adds}.  Give data.add_tokens and "
            "data.add_special_tokens the values of that run.  To add further tokens to its model, export the "
            "checkpoint (`sft export`), and start from the exported folder (model.hf=FOLDER model.init_from=null) with "
            "only the further tokens in these keys."
        )


def none_undamaged(folder: Path, damaged: Collection[str]) -> str:
    """The error message if all checkpoints are damaged.  damaged: a text for each"""
    return (
        f"{folder} holds no undamaged checkpoint, and a run that has saved is not started over.\n  "
        + "\n  ".join(first_few(damaged))
        + "\n  To train from the beginning, choose another run.dir."
    )


def lines(resumed: Continuation | None, num_steps: int | None = None) -> list[str]:
    """Lines that name the checkpoint and the changed settings.  num_steps: steps of the whole run; None if unknown"""
    if resumed is None:
        return ["a new run starts"]
    of = "" if num_steps is None else f" of {num_steps:,}"
    end = ""
    if num_steps is not None and resumed.step >= num_steps:
        end = "; no step is left, so the run only evaluates and ends"
    return [
        *(f"passed over: {text}" for text in resumed.damaged),
        f"continues after step {resumed.step:,}{of}, from {resumed.path}{end}",
        *(f"changed: {line}" for line in resumed.reported),
    ]


def _refusal(path: Path | str, changed: Changes, allowed: list[str]) -> str:
    override = shlex.quote(f"checkpoint.allow_changes=[{', '.join([*allowed, *changed.refused])}]")
    refused = "; ".join(f"{key} {change}" for key, change in changed.refused.items())
    others = f"  Also changed: {'; '.join(changed.reported)}." if changed.reported else ""
    refusal = f"{path} cannot be resumed with this recipe: {refused}.{others}  Undo the change; or "
    if any(key in changed.refused for key in _SHAPES):
        return f"{refusal}start a new run with another run.dir: the weights have other shapes."
    weights = path if isinstance(path, Path) else "FOLDER, after you have copied it there,"
    return (
        f"{refusal}accept it, if the tensors keep their shapes: {override}; or start a new run from the weights of the "
        f"checkpoint: model.init_from={weights} with another run.dir."
    )
