"""Sharded tensors <-> disk, in Megatron's torch_dist format.

A folder written here holds the model under Megatron-LM's own keys, the optimizer in the fully reshardable form (so
any tp, cp, pp, dp can read it) and one small dictionary of plain values.  Which folder, when, and which is the
latest is `checkpoint.py`'s business.
"""

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import MegatronOptimizer
from torch.optim import AdamW

from sft.errors import CheckpointError
from sft.mcore.engine import Engine
from sft.mcore.model import sharded_tensors

CHECKPOINT_VERSION = 3.0  # Megatron-LM's number for the layout of these dictionaries


def _metadata(engine: Engine) -> dict[str, Any]:
    """How the state is to be described; a new dictionary each time, because core writes groups into it."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": engine.groups.collection.dp_cp,
    }


def save(engine: Engine, folder: Path, plain: dict[str, Any]) -> None:
    """Write model, optimizer, schedule and `plain` (JSON-like values) into the existing, empty `folder`.

    Collective: every rank calls it.  The files are complete when it returns, but nothing says so yet.
    """
    _materialise(engine.optimizer)
    model = _model_state(engine)
    state: dict[str, Any] = {
        "checkpoint_version": CHECKPOINT_VERSION,
        "distributed_optimizer": engine.config.parallel.distributed_optimizer,
        **plain,
        **model,
        "optimizer": engine.optimizer.sharded_state_dict(model, metadata=_metadata(engine)),
        "opt_param_scheduler": engine.scheduler.state_dict(),
    }
    dist_checkpointing.save(state, str(folder))


def load(engine: Engine, folder: Path) -> dict[str, Any]:
    """Read model, optimizer and schedule into `engine`; return the plain values.  Collective.

    Raises CheckpointError where the folder does not hold what this model needs.
    """
    _check_optimizer(engine, folder)
    _materialise(engine.optimizer)
    model = _model_state(engine)
    optimizer = engine.optimizer.sharded_state_dict(model, is_loading=True, metadata=_metadata(engine))
    wanted = {**model, "optimizer": optimizer}
    state = _read(wanted, folder)
    _load_model(engine, state)
    _load_optimizer(engine.optimizer, state["optimizer"])
    engine.scheduler.num_steps = 0
    engine.scheduler.step(state["opt_param_scheduler"]["num_steps"])
    return {key: value for key, value in state.items() if key not in wanted and key != "opt_param_scheduler"}


def load_weights(engine: Engine, folder: Path) -> None:
    """Read the model only; moments, schedule and step stay those of a new run.  Collective."""
    _load_model(engine, _read(_model_state(engine), folder))
    engine.optimizer.reload_model_params()


def _check_optimizer(engine: Engine, folder: Path) -> None:
    """The two optimizers store moments under the same keys but describe them differently."""
    here = engine.config.parallel.distributed_optimizer
    there = dist_checkpointing.load_common_state_dict(str(folder)).get("distributed_optimizer", here)
    if there != here:
        raise CheckpointError(
            f"{folder} was written with parallel.distributed_optimizer = {str(there).lower()} and cannot be resumed "
            f"with {str(here).lower()}.  Set it as it was, or start from the weights alone with model.init_from."
        )


def _check_shapes(wanted: dict[str, Any], folder: Path) -> None:
    """Name what is missing or of another shape, which a failed read does not."""
    try:
        there = dist_checkpointing.load_tensors_metadata(str(folder))
    except (CheckpointingException, OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is not a whole torch_dist checkpoint: {error}") from error
    problems = {}
    for shard in sharded_tensors(wanted):
        if shard.key not in there:
            problems[shard.key] = "not there"
        elif tuple(there[shard.key].global_shape) != tuple(shard.global_shape) and not shard.allow_shape_mismatch:
            problems[shard.key] = f"{tuple(there[shard.key].global_shape)} there, {tuple(shard.global_shape)} here"
    if problems:
        shown = [f"{key}: {what}" for key, what in sorted(problems.items())[:5]]
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"{folder} is of another model: {'; '.join(shown)}{more}.")


def _read(wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
    _check_shapes(wanted, folder)
    try:
        state: dict[str, Any] = dist_checkpointing.load(wanted, str(folder), strict=StrictHandling.RAISE_UNEXPECTED)
    except (
        CheckpointingException,
        torch.distributed.checkpoint.CheckpointException,
        OSError,
        ValueError,
    ) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{folder} cannot be loaded into this model: {first}") from error
    return state


def _model_state(engine: Engine) -> dict[str, Any]:
    """One entry per model chunk, named as Megatron-LM names them."""
    names = ["model"] if len(engine.chunks) == 1 else [f"model{i}" for i in range(len(engine.chunks))]
    return {n: chunk.module.sharded_state_dict(metadata=_metadata(engine)) for n, chunk in zip(names, engine.chunks)}


def _load_model(engine: Engine, state: dict[str, Any]) -> None:
    if len(engine.chunks) == 1:
        engine.chunks[0].module.load_state_dict(state["model"])
        return
    for i, chunk in enumerate(engine.chunks):
        chunk.module.load_state_dict(state[f"model{i}"])


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _materialise(optimizer: MegatronOptimizer) -> None:
    """Give torch's AdamW its state before the first step: core describes only states that exist."""
    for part in _parts(optimizer):
        inner = part.optimizer
        if not isinstance(inner, AdamW):
            continue
        for group in inner.param_groups:
            for param in group["params"]:
                if not inner.state[param]:
                    inner.state[param]["step"] = torch.zeros((), dtype=torch.float32)
                    inner.state[param]["exp_avg"] = torch.zeros_like(param.data)
                    inner.state[param]["exp_avg_sq"] = torch.zeros_like(param.data)


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Load, working around three traps of core with torch's AdamW, which keeps `step` beside the moments of each
    parameter: a step of 0 is not stored; the distributed optimizer looks for a stored tensor of that name; and
    afterwards all parameters share one `step`, which then advances once per parameter."""
    parts = _parts(optimizer)
    states: list[dict[str, Any]] = [state] if len(parts) == 1 else list(state.values())
    for part, stored in zip(parts, states):
        moments = stored.pop("param_state", None)
        plain = stored.get("optimizer", stored).get("state")  # not of the distributed optimizer
        if plain and isinstance(part.optimizer, AdamW):
            plain.setdefault("common_step", torch.zeros((), dtype=torch.float32))
        part.load_state_dict(stored)
        inner = part.optimizer
        steps = {p: s.pop("step") for p, s in inner.state.items() if "step" in s}
        if moments is not None:
            part.load_parameter_state_from_fully_reshardable(moments)
        for param, step in steps.items():
            inner.state[param]["step"] = step.detach().clone()
