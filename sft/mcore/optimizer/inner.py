"""Access to the torch optimizers inside core's optimizer, and to the states that they keep.

Usually core's optimizer has one Adam, which updates the parameters of all groups.  An optimizer that consists of
several lists them in `sub_optimizers`, and each updates some of the parameters: core's hybrid optimizer (`offload.py`)
has an Adam for the device and others for the host.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from sft.config.train import ADAM
from sft.mcore.sharding.core_buffers import ShardParameter

# Keys that only core's hybrid optimizer has in its groups.
_HYBRID_KEYS = (
    "offload_fraction",
    "cpu_optimizer_cls",
    "gpu_optimizer_cls",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
    "overlap_cpu_optimizer_d2h_h2d",
    "bias_correction",
)


def chained_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers inside core's optimizer that have parameters.

    A model with experts has two, one for the experts and one for all other parameters.
    """
    return [core for core in all_chained(optimizer) if not is_empty(core)]


def all_chained(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """All optimizers inside core's optimizer, also those without parameters.  So all ranks run the same collectives."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def is_empty(core: MegatronOptimizer) -> bool:
    return bool(getattr(core, "is_stub_optimizer", False))


def inner_optimizers(optimizer: MegatronOptimizer) -> list[Optimizer]:
    """Every torch optimizer inside `optimizer` and its chained optimizers that updates parameters."""
    inners = [core.optimizer for core in chained_optimizers(optimizer)]
    return [updater for inner in inners for updater in getattr(inner, "sub_optimizers", [inner])]


def updater_lookup(core: MegatronOptimizer) -> Callable[[Tensor], tuple[Optimizer, Tensor]]:
    """A function that gets a parameter of `core`, and returns the optimizer that updates it and the tensor that this
    optimizer has.

    The tensor is the parameter itself, or the hybrid optimizer's copy of it.
    """
    inner = core.optimizer
    owners = {
        tensor: updater
        for updater in inner_optimizers(core)
        for group in updater.param_groups
        for tensor in group["params"]
    }
    copies = inner.param_to_inner_param if isinstance(inner, HybridDeviceOptimizer) else {}
    return lambda param: (owners[copies.get(param, param)], copies.get(param, param))


@dataclass(frozen=True, kw_only=True)
class HeldPart:
    """Elements `start` to `start + n - 1` of the flattened weight `param`, which this rank's optimizer updates.

    updater: the torch optimizer that updates them; main: the tensor that it has, of n elements
    is_copy: whether `main` has fp32 weights of its own; False: it is `param`
    gradient: the summed gradient of these elements, [n]
    replica: the number of this copy of the elements among the copies on data-parallel ranks; None: every data-parallel
        rank has a copy, with the number that the model's sharded state dict gives the weight
    """

    param: Tensor
    start: int
    updater: Optimizer
    main: Tensor
    is_copy: bool
    gradient: Tensor
    replica: int | None = None


def held_parts(core: MegatronOptimizer) -> Iterator[HeldPart]:
    """All parts of weights that `core` updates on this rank."""
    yield from _distributed_parts(core) if isinstance(core, DistributedOptimizer) else _whole_parts(core)


def _distributed_parts(core: Any) -> Iterator[HeldPart]:
    find = updater_lookup(core)
    for param, (group, order) in core.model_param_group_index_map.items():
        elements = core._get_model_param_range_map(param)["param"]
        updater, main = find(core.optimizer.param_groups[group]["params"][order])
        whole, start, replica = param, elements.start, 0
        if isinstance(param, ShardParameter):
            whole, start, replica = param.whole, param.start, param.replica
        gradient = param.main_grad.view(-1)[elements.start : elements.end]
        yield HeldPart(
            param=whole, start=start, updater=updater, main=main, is_copy=True, gradient=gradient, replica=replica
        )


def _whole_parts(core: Any) -> Iterator[HeldPart]:
    find = updater_lookup(core)
    pairs: list[tuple[Any, Tensor]] = []
    if hasattr(core, "fp32_from_float16_groups"):
        for params, mains in zip(core.float16_groups, core.fp32_from_float16_groups):
            pairs += zip(params, mains)
        pairs += [(param, param) for group in core.fp32_from_fp32_groups for param in group]
    else:
        pairs = [(param, param) for group in core.optimizer.param_groups for param in group["params"]]
    for param, main in pairs:
        updater, main = find(main)
        gradient = param.main_grad.view(-1)
        yield HeldPart(param=param, start=0, updater=updater, main=main, is_copy=main is not param, gradient=gradient)


def moments_of(optimizer: Optimizer, tensor: Tensor) -> dict[str, Tensor]:
    """The states that `optimizer` keeps for each element of `tensor`, by name.  Allocates them before the first step.

    An optimizer of ours names its states in `state_types`, a method that gets the tensor and returns their dtypes by
    name.  Adam has two moments in fp32.  An optimizer with a method `read` may return copies; `write` takes them back.
    """
    if hasattr(optimizer, "read"):
        moments: dict[str, Tensor] = optimizer.read(tensor)
        return moments
    state = optimizer.state[tensor]
    own = getattr(optimizer, "state_types", None)
    types = dict.fromkeys(ADAM.moments, torch.float32) if own is None else own(tensor)
    if not state:
        state.update({name: torch.zeros_like(tensor.data, dtype=dtype) for name, dtype in types.items()})
        if counts_by_parameter(optimizer):
            state["step"] = new_step(optimizer, tensor)
    return {name: state[name] for name in types}


def set_moments(optimizer: Optimizer, tensor: Tensor, moments: Mapping[str, Tensor]) -> None:
    """Put changed states of `tensor`, which `moments_of` has returned, into the optimizer, if they are copies."""
    if hasattr(optimizer, "write"):
        optimizer.write(tensor, moments)


def group_values(core: MegatronOptimizer) -> list[dict[str, Any]]:
    """The values of each parameter group of `core` that do not depend on the kind of Adam, without the parameters."""
    drop = ("params", "fused", *(_HYBRID_KEYS if isinstance(core.optimizer, HybridDeviceOptimizer) else ()))
    return [{key: value for key, value in group.items() if key not in drop} for group in core.optimizer.param_groups]


def use_fused_kernel(optimizer: MegatronOptimizer) -> None:
    """Make torch's AdamW, which core uses without Transformer Engine, update a GPU's parameters in one kernel.

    The default kernel needs temporaries of 4 bytes per parameter.  Call this function before the states exist.
    """
    for adam in inner_optimizers(optimizer):
        for group in adam.param_groups if counts_by_parameter(adam) else []:
            if all(param.is_cuda for param in group["params"]):
                group["fused"] = True


def counts_by_parameter(adam: Optimizer) -> bool:
    """Whether this Adam keeps `step` per parameter, as torch's does.

    The Adam of Transformer Engine and that of Apex keep it per parameter group.
    """
    return isinstance(adam, Adam | AdamW)


def new_step(adam: Optimizer, tensor: Tensor) -> Tensor:
    """A step of 0 for a parameter of torch's Adam, on the parameter's device if the kernel reads the step there."""
    on_device = any(group.get("fused") or group.get("capturable") for group in adam.param_groups)
    return torch.zeros((), dtype=torch.float32, device=tensor.device if on_device else "cpu")
