"""Optimizer offload, and access to the Adam instances inside core's optimizer.

Without `optim.offload_fraction`, one Adam updates the parameters of its groups.  With `optim.offload_fraction`, core
uses its hybrid optimizer, which makes an fp32 copy of each parameter of its groups, on the host or on the device.  Each
copy on the host has its own Adam.

Core's state dict of the hybrid optimizer contains Python classes, and making it fails for fp32 parameters.  So
checkpoints read and write Adam's states in place (`optimizer_shards.py`).
"""

import gc
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from sft.errors import StorageError
from sft.mcore.page_locked import Arena, aligned

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


def enable_offload(core: OptimizerConfig, fraction: float) -> None:
    """Make core keep this fraction of Adam's states on the host, and update these parameters there.

    Call this function on a complete config: without Transformer Engine, the constructor of core 0.16 refuses the values
    that it sets.
    """
    core.optimizer_cpu_offload = True
    core.optimizer_offload_fraction = fraction
    # Gradients move to the host, and weights back to the device, while other parameters are updated.
    core.overlap_cpu_optimizer_d2h_h2d = True
    # With these values only the hybrid optimizer holds fp32 weights.  Otherwise the device would hold fp32 weights of
    # all parameters, and the host would hold copies of its fraction of them.
    core.use_precision_aware_optimizer = True
    core.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True


def check_and_free(optimizer: MegatronOptimizer) -> None:
    """Check an offloaded optimizer that core has just built, and free the memory of its first version.

    Core first builds a hybrid optimizer for whole parameters, then another one for this rank's shards.  The first one
    is in a reference cycle, so only the garbage collector frees its fp32 copies on the host and on the device.
    """
    for core in chained_optimizers(optimizer):
        hybrid = core.optimizer
        params = [param for group in hybrid.param_groups for param in group["params"]]
        # Core loses the gradient of an fp32 parameter on the device, so core would never update the parameter.
        assert all(param in hybrid.param_to_fp32_param for param in params), "a parameter is not bf16"
    gc.collect()
    for core in chained_optimizers(optimizer):
        page_lock(core.optimizer)


def page_lock(hybrid: HybridDeviceOptimizer) -> None:
    """Move the fp32 weights on the host to one arena, with room for their gradients.

    These tensors move between host and device in each step.  Core would copy weights from pageable memory, and
    gradients to one page-locked block for each parameter.

    Raises StorageError if the host cannot page-lock so much memory.
    """
    devices = hybrid.cpu_copys_map_gpu_param
    if not devices:
        return
    try:
        arena = Arena(sum(2 * aligned(weight.nbytes) for weight in devices), next(iter(devices.values())).device)
    except MemoryError as error:
        raise StorageError(
            f"optim.offload_fraction: {error}.  The block holds the fp32 weights and the gradients of the parameters "
            "that this rank updates on the host.  Use a smaller fraction, more ranks, or a higher limit (ulimit -l, "
            "memory of the job)."
        ) from error
    for weight in devices:
        weight.data = arena.take(weight.shape, weight.dtype).copy_(weight.data)
        gradient = arena.take(weight.shape, weight.dtype).zero_()
        weight.grad = hybrid.cpu_copy_map_grad[weight] = gradient


def use_fused_kernel(optimizer: MegatronOptimizer) -> None:
    """Make torch's AdamW, which core uses without Transformer Engine, update a GPU's parameters in one kernel.

    The default kernel needs temporaries of 4 bytes per parameter.  Call this function before the states exist.
    """
    for adam in adam_instances(optimizer):
        for group in adam.param_groups if counts_by_parameter(adam) else []:
            if all(param.is_cuda for param in group["params"]):
                group["fused"] = True


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


def adam_instances(optimizer: MegatronOptimizer) -> list[Optimizer]:
    """Every Adam inside `optimizer` and its chained optimizers."""
    inners = [core.optimizer for core in chained_optimizers(optimizer)]
    return [
        adam
        for inner in inners
        for adam in (inner.sub_optimizers if isinstance(inner, HybridDeviceOptimizer) else [inner])
    ]


def adam_lookup(core: MegatronOptimizer) -> Callable[[Tensor], tuple[Optimizer, Tensor]]:
    """A function that gets a parameter of `core`, and returns the Adam that updates it and the tensor that Adam has.

    The tensor is the parameter itself, or the hybrid optimizer's copy of it.
    """
    inner = core.optimizer
    if not isinstance(inner, HybridDeviceOptimizer):
        return lambda param: (inner, param)
    owners = {
        tensor: adam for adam in adam_instances(core) for group in adam.param_groups for tensor in group["params"]
    }
    copies = inner.param_to_inner_param
    return lambda param: (owners[copies[param]], copies[param])


def group_values(core: MegatronOptimizer) -> list[dict[str, Any]]:
    """The values of each parameter group of `core` that do not depend on the kind of Adam, without the parameters."""
    drop = ("params", "fused", *(_HYBRID_KEYS if isinstance(core.optimizer, HybridDeviceOptimizer) else ()))
    return [{key: value for key, value in group.items() if key not in drop} for group in core.optimizer.param_groups]


def counts_by_parameter(adam: Optimizer) -> bool:
    """Whether this Adam keeps `step` per parameter, as torch's does.

    The Adam of Transformer Engine and that of Apex keep it per parameter group.
    """
    return isinstance(adam, Adam | AdamW)


def new_step(adam: Optimizer, tensor: Tensor) -> Tensor:
    """A step of 0 for a parameter of torch's Adam, on the parameter's device if the kernel reads the step there."""
    on_device = any(group.get("fused") or group.get("capturable") for group in adam.param_groups)
    return torch.zeros((), dtype=torch.float32, device=tensor.device if on_device else "cpu")
