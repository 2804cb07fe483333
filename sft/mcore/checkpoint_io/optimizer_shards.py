"""What the optimizer of this rank holds of each parameter, as parts of whole tensors.

Decides how Adam's moments and the fp32 weights are named in a checkpoint and where each piece lies: the keys and the
shapes of the whole tensors are those of Megatron-LM's fully reshardable form, whichever optimizer wrote them.

The distributed optimizer cuts a parameter where its buffer happens to be cut, as flat elements a to b.  Such a run of
elements is a few boxes of the parameter, and a checkpoint may hold a tensor in any boxes.  So every rank writes and
reads just what it has, in place; core's own way gathers all of it on every rank first.

    a parameter of 4 x 5, of which this rank has elements 3 to 16:
    . . . x x        row 0, columns 3 to 5
    x x x x x        rows 1 to 3
    x x x x x
    x . . . .        row 3, column 0
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.optim import Optimizer

from sft.mcore.model import sharded_tensors
from sft.mcore.optimizer.offload import adams, counts_by_parameter, finder, group_values, new_step, parts

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "param"  # the weights that the optimizer works on, in fp32
PREFIX = "optimizer.state."
# What core's distributed optimizer calls them, and what the other one does.
MAIN_PREFIX = {True: f"{PREFIX}param.", False: f"{PREFIX}fp32_param."}


@dataclass(frozen=True, kw_only=True)
class Held:
    """Elements `start` to `start + n` of `param`, flattened: tensors of [n] by name."""

    param: Tensor
    start: int
    tensors: dict[str, Tensor]
    is_part: bool  # other data-parallel ranks hold other elements; otherwise they all hold the same


def held(optimizer: MegatronOptimizer) -> Iterator[Held]:
    """Everything that this rank's optimizer keeps of its parameters.  Makes Adam's state where no step has yet."""
    for part in parts(optimizer):
        yield from _held_in_part(part) if isinstance(part, DistributedOptimizer) else _held_whole(part)


def sharded(held_here: Sequence[Held], model: Any, *, main: str) -> list[ShardedTensor]:
    """The tensors of `held_here`, described as boxes of whole tensors; `model` describes the parameters themselves.

    main: the prefix of the fp32 weights; empty: they are those of the model
    """
    places = _places(model)
    prefixes = {name: f"{PREFIX}{name}." for name in MOMENTS} | {MAIN: main}
    return [
        shard
        for one in held_here
        for name, flat in one.tensors.items()
        for place in places[id(one.param)]
        for shard in _boxes_of(place, prefixes[name], flat, one)
    ]


def step_of(optimizer: MegatronOptimizer) -> int:
    """Updates that Adam has made; core keeps all parameters at the same."""
    for adam in _all_adams(optimizer):
        for state in adam.state.values():
            if "step" in state:
                return int(state["step"])
        for group in adam.param_groups:
            if "step" in group:
                return int(group["step"])
    return 0


def set_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Give every parameter a step of its own: one shared tensor would advance once per parameter."""
    for adam in _all_adams(optimizer):
        if counts_by_parameter(adam):
            for state in adam.state.values():
                state["step"] = torch.full_like(state["step"], step)
        else:
            for group in adam.param_groups:
                group["step"] = step


def plain_form(optimizer: MegatronOptimizer, ep: int) -> Any:
    """What Megatron-LM stores of an optimizer beside its tensors, in the form that it loads.

    It has an optimizer of its own for experts only where expert parallelism, `ep`, is above 1.  Here there may be one
    at 1 as well (see `model._reduce_experts_apart`), which says nothing that the first does not.
    """
    forms = [_plain_form(part) for part in parts(optimizer)]
    return dict(enumerate(forms)) if ep > 1 else forms[0]


def stored_step(plain: Any) -> int:
    """The step that a form made by `plain_form`, or by core, tells.  Raises KeyError where it tells none."""
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


def _plain_form(part: MegatronOptimizer) -> dict[str, Any]:
    step = step_of(part)
    # Transformer Engine's Adam takes its step from a group, and asks for bias_correction, which torch's has not.
    groups = [{"bias_correction": True, **group, "step": step} for group in group_values(part)]
    if isinstance(part, DistributedOptimizer):
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    has_common = step and counts_by_parameter(part.optimizer)
    inner = {"state": {"common_step": torch.tensor(float(step))} if has_common else {}, "param_groups": groups}
    return {"optimizer": inner} if hasattr(part, "fp32_from_float16_groups") else inner


def _all_adams(optimizer: MegatronOptimizer) -> Iterator[Optimizer]:
    for part in parts(optimizer):
        yield from adams(part)


def _held_in_part(part: Any) -> Iterator[Held]:
    find = finder(part)
    for param, (group, order) in part.model_param_group_index_map.items():
        elements = part._get_model_param_range_map(param)["param"]
        adam, main = find(part.optimizer.param_groups[group]["params"][order])
        tensors = {MAIN: main.detach(), **_moments(adam, main)}
        yield Held(param=param, start=elements.start, tensors=tensors, is_part=True)


def _held_whole(part: Any) -> Iterator[Held]:
    if hasattr(part, "fp32_from_float16_groups"):
        for params, mains in zip(part.float16_groups, part.fp32_from_float16_groups):
            for param, main in zip(params, mains):
                tensors = {MAIN: main.detach().flatten(), **_moments(part.optimizer, main)}
                yield Held(param=param, start=0, tensors=tensors, is_part=False)
        params = [param for group in part.fp32_from_fp32_groups for param in group]
    else:
        params = [param for group in part.optimizer.param_groups for param in group["params"]]
    for param in params:
        yield Held(param=param, start=0, tensors=_moments(part.optimizer, param), is_part=False)


def _moments(adam: Optimizer, main: Tensor) -> dict[str, Tensor]:
    state = adam.state[main]
    if not state:
        state.update({name: torch.zeros_like(main.data) for name in MOMENTS})
        if counts_by_parameter(adam):
            state["step"] = new_step(adam, main)
    return {name: state[name].view(-1) for name in MOMENTS}


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Elements `start` to `start + n` of a parameter, flattened, are this shard of a whole tensor."""

    start: int
    shard: ShardedTensor


def _places(model: Any) -> dict[int, list[_Place]]:
    """By id of the parameter.  A factory (gate and up projection in one) makes several shards of one parameter."""
    found: dict[int, list[_Place]] = {}
    for leaf in _leaves(model):
        for shard in sharded_tensors(leaf):
            assert shard.data.is_contiguous(), shard.key
            start = shard.data.storage_offset() - leaf.data.storage_offset()
            found.setdefault(id(leaf.data), []).append(_Place(start=start, shard=shard))
    return found


def _leaves(state: Any) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    if isinstance(state, ShardedTensor | ShardedTensorFactory):
        if state.data is not None:
            yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _leaves(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _leaves(value)


def _boxes_of(place: _Place, prefix: str, flat: Tensor, one: Held) -> Iterator[ShardedTensor]:
    """The part of `flat` that belongs to `place`, in boxes."""
    shard = place.shard
    shape, axes = tuple(shard.data.shape), shard.prepend_axis_num
    first = max(one.start, place.start)
    last = min(one.start + flat.numel(), place.start + prod(shape))
    replica = (*shard.replica_id[:-1], 0) if one.is_part else shard.replica_id
    for offset, size in boxes(first - place.start, last - place.start, shape):
        begin = place.start + _flat_index(offset, shape) - one.start
        data = flat[begin : begin + prod(size)].view((1,) * axes + size)
        inner = tuple(o + here for o, here in zip(shard.global_offset[axes:], offset))
        yield replace(
            shard,
            key=prefix + shard.key,
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_offset=(*shard.global_offset[:axes], *inner),
            axis_fragmentations=None,
            replica_id=replica,
            prepend_axis_num=0,
        )


def boxes(first: int, last: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offset and size of the boxes that hold flat elements `first` to `last` of a tensor, in order.

    boxes(3, 16, (4, 5)) -> ((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 1))
    """
    if first >= last:
        return
    if not shape:
        yield (), ()
        return
    row, rest = prod(shape[1:]), shape[1:]
    whole_from, whole_to = -(-first // row), last // row
    if whole_from > whole_to:  # within one row
        yield from _in_row(first // row, first % row, last - first // row * row, rest)
        return
    if first % row:
        yield from _in_row(first // row, first % row, row, rest)
    if whole_from < whole_to:
        yield (whole_from, *(0 for _ in rest)), (whole_to - whole_from, *rest)
    if last % row:
        yield from _in_row(whole_to, 0, last % row, rest)


def _in_row(
    index: int, first: int, last: int, rest: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, size in boxes(first, last, rest):
        yield (index, *offset), (1, *size)


def _flat_index(offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
    index = 0
    for position, size in zip(offset, shape):
        index = index * size + position
    return index
