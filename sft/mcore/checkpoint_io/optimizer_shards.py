"""Describes the part of each optimizer tensor that this rank holds, as chunks of the unsharded tensor.

Decides the keys of the optimizer's moments and of the fp32 weights in a checkpoint, and the position of each chunk.
With and without the distributed optimizer, keys and shapes are those of Megatron-LM's fully reshardable form.

The distributed optimizer divides its buffer evenly among ranks, so a rank holds elements a to b - 1 of a flattened
parameter.  Such a range consists of a few rectangular chunks of the parameter, and a checkpoint may store a tensor in
any chunks.  So every rank writes the elements that it holds, and reads them in place.  Core would first gather all
elements on every rank.

    a parameter of 4 x 5, of which this rank holds elements 3 to 15:
    . . . x x        chunk 1: row 0, columns 3 and 4
    x x x x x        chunk 2: rows 1 and 2
    x x x x x
    x . . . .        chunk 3: row 3, column 0
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from sft.mcore.optimizer.inner import (
    HeldPart,
    chained_optimizers,
    counts_by_parameter,
    group_values,
    held_parts,
    inner_optimizers,
    moments_of,
    set_moments,
)
from sft.mcore.sharding.parts import pieces, shards_by_param, with_all_axes

MAIN = "param"  # the fp32 weights that the optimizer updates
PREFIX = "optimizer.state."
# Prefix of the fp32 weights, with and without core's distributed optimizer.
MAIN_PREFIX = {True: f"{PREFIX}param.", False: f"{PREFIX}fp32_param."}


@dataclass(frozen=True, kw_only=True)
class OptimizerSlice:
    """The optimizer states of elements `start` to `start + n - 1` of the flattened `param`: tensors [n] by name.

    gradient: the summed gradient of these elements, [n]
    replica: the number of this copy of the elements among the copies on data-parallel ranks; None: every data-parallel
        rank has a copy, with the number that the model's sharded state dict gives the weight
    write: puts changed `tensors` into the optimizer's states, if they are copies of them
    """

    param: Tensor
    start: int
    tensors: dict[str, Tensor]
    gradient: Tensor
    replica: int | None = None
    write: Callable[[], None]


def optimizer_slices(optimizer: MegatronOptimizer) -> Iterator[OptimizerSlice]:
    """All slices of this rank's optimizer.  Allocates the states if no step has allocated them yet."""
    for core in chained_optimizers(optimizer):
        yield from map(_slice, held_parts(core))


def sharded_slices(slices: Sequence[OptimizerSlice], model: Any, *, main: str) -> list[ShardedTensor]:
    """The tensors of the slices, described as chunks of the unsharded tensors.

    model: sharded state dict of the model
    main: the prefix of the keys of fp32 weights (tensors named MAIN); "": these have the keys of the model's weights
    """
    param_shards = shards_by_param(model)
    return [
        replace(with_all_axes(piece), key=f"{main if name == MAIN else f'{PREFIX}{name}.'}{piece.key}")
        for part in slices
        for name, flat in part.tensors.items()
        for first, shard in param_shards[id(part.param)]
        for piece in pieces(shard, first, flat, part.start, replica=part.replica)
    ]


def step_of(optimizer: MegatronOptimizer) -> int:
    """The number of updates that the optimizer has made, equal for all parameters; 0 if this rank trains nothing."""
    for updater in inner_optimizers(optimizer):
        for values in (*updater.state.values(), *updater.param_groups):
            if "step" in values:
                return int(values["step"])
    return 0


def set_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Set the optimizer's step.  Every parameter gets its own tensor: a shared one would advance once per parameter."""
    for updater in inner_optimizers(optimizer):
        if counts_by_parameter(updater):
            for state in updater.state.values():
                state["step"] = torch.full_like(state["step"], step)
        else:
            for group in updater.param_groups:
                group["step"] = step


def plain_form(optimizer: MegatronOptimizer, ep: int, step: int) -> Any:
    """The plain values of an optimizer, in the form that Megatron-LM loads.

    Megatron-LM has a separate optimizer for experts only if expert parallelism, `ep`, is above 1.  This trainer may
    also have one with ep = 1 (`reduce_apart` in experts/layer.py).  Then both optimizers have equal plain values, and
    the plain values of the first are returned.

    step: the optimizer's step, also on a rank that trains nothing
    """
    forms = [_plain_form(core, step) for core in chained_optimizers(optimizer)]
    return dict(enumerate(forms)) if ep > 1 else forms[0]


def stored_step(plain: Any) -> int:
    """The step in plain values that `plain_form` or core made.  Raises KeyError if they hold no step."""
    if 0 in plain:
        return stored_step(plain[0])
    inner = plain.get("optimizer", plain)
    if "common_step" in inner.get("state", {}):
        return int(inner["state"]["common_step"])
    steps = {int(group["step"]) for group in inner["param_groups"] if "step" in group}
    if steps:
        return steps.pop()
    if "state" in inner:  # core leaves out a step of 0
        return 0
    raise KeyError("step")


def _plain_form(core: MegatronOptimizer, step: int) -> dict[str, Any]:
    # Transformer Engine's Adam reads its step and bias_correction from a group; torch's Adam has no bias_correction.
    groups = [{"bias_correction": True, **group, "step": step} for group in group_values(core)]
    if isinstance(core, DistributedOptimizer):
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    has_common = step and counts_by_parameter(core.optimizer)
    inner = {"state": {"common_step": torch.tensor(float(step))} if has_common else {}, "param_groups": groups}
    return {"optimizer": inner} if hasattr(core, "fp32_from_float16_groups") else inner


def _slice(part: HeldPart) -> OptimizerSlice:
    main = {MAIN: part.main.detach().view(-1)} if part.is_copy else {}
    moments = {name: moment.view(-1) for name, moment in moments_of(part.updater, part.main).items()}
    return OptimizerSlice(
        param=part.param,
        start=part.start,
        tensors=main | moments,
        gradient=part.gradient,
        replica=part.replica,
        write=partial(set_moments, part.updater, part.main, moments),
    )
