"""The Adam optimizers below core's: how a share of their work is put on the host, and which of them has a parameter.

Decides nothing where all of it stays on the device: there is one Adam then, and it works on the parameters of its
groups.  With `optim.offload_fraction` core has its hybrid optimizer in that place.  This one makes a copy in fp32 of
each parameter of its groups, on the host or on the device, and an Adam for each copy on the host.

Core's way of storing it has Python classes among the values of its groups, and fails where a parameter is fp32.  So
states are read and written in place, where the Adams have them; what of that is stored, and how, is `moments.py`.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

# What core's hybrid optimizer keeps in its groups and other Adams do not.
_OF_HYBRID = (
    "offload_fraction",
    "cpu_optimizer_cls",
    "gpu_optimizer_cls",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
    "overlap_cpu_optimizer_d2h_h2d",
    "bias_correction",
)


def offload(core: OptimizerConfig, fraction: float) -> None:
    """Have this share of Adam's states and of its update on the host.

    Set once `core` is made: while it is, core 0.16 asks for the version of Transformer Engine, which may not be there.
    """
    core.optimizer_cpu_offload = True
    core.optimizer_offload_fraction = fraction
    # Gradients leave the device, and weights come back to it, while other parameters are updated.
    core.overlap_cpu_optimizer_d2h_h2d = True
    # By these names core leaves the fp32 weights to the hybrid optimizer.  Otherwise the device would keep all of them,
    # and the host copies of its share.
    core.use_precision_aware_optimizer = True
    core.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True


def settle(optimizer: MegatronOptimizer) -> None:
    """After core has built an optimizer that is partly on the host: see that it is whole, and free what was in between.

    Core builds it of whole parameters first, then of this rank's parts.  The first refers to itself, so that only the
    collector finds its fp32 copies, on the host and on the device.
    """
    for part in parts(optimizer):
        hybrid = part.optimizer
        params = [param for group in hybrid.param_groups for param in group["params"]]
        # Of an fp32 parameter that stays on the device core loses the gradient, and with it every update.
        assert all(param in hybrid.param_to_fp32_param for param in params), "a parameter is no bf16"
    gc.collect()
    if torch.accelerator.is_available() and hasattr(torch.accelerator, "empty_host_cache"):  # newer than torch 2.8
        torch.accelerator.empty_host_cache()  # of pinned copies, which torch would keep for reuse


def fuse(optimizer: MegatronOptimizer) -> None:
    """Have torch's AdamW, which is core's where Transformer Engine is not installed, update a GPU's parameters in one
    kernel: else it makes temporaries of another 4 bytes for each.  Before anything makes its states."""
    for part in parts(optimizer):
        for adam in adams(part):
            for group in adam.param_groups if counts_by_parameter(adam) else []:
                if all(param.is_cuda for param in group["params"]):
                    group["fused"] = True


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """One, or one for experts and one for everything else."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def adams(part: MegatronOptimizer) -> list[Optimizer]:
    """All that update parameters of `part`."""
    inner = part.optimizer
    return list(inner.sub_optimizers) if isinstance(inner, HybridDeviceOptimizer) else [inner]


def finder(part: MegatronOptimizer) -> Callable[[Tensor], tuple[Optimizer, Tensor]]:
    """Parameter of the groups of `part` -> the Adam that updates it, and the tensor that this one works on."""
    inner = part.optimizer
    if not isinstance(inner, HybridDeviceOptimizer):
        return lambda param: (inner, param)
    owners = {tensor: adam for adam in adams(part) for group in adam.param_groups for tensor in group["params"]}
    works_on = inner.param_to_inner_param
    return lambda param: (owners[works_on[param]], works_on[param])


def group_values(part: MegatronOptimizer) -> list[dict[str, Any]]:
    """The groups of `part` without their parameters, which kernel has them, and what only a hybrid optimizer says."""
    drop = ("params", "fused", *(_OF_HYBRID if isinstance(part.optimizer, HybridDeviceOptimizer) else ()))
    return [{key: value for key, value in group.items() if key not in drop} for group in part.optimizer.param_groups]


def counts_by_parameter(adam: Optimizer) -> bool:
    """torch's Adam keeps `step` beside the moments of each parameter; Transformer Engine's and Apex's in the group."""
    return isinstance(adam, Adam | AdamW)


def new_step(adam: Optimizer, tensor: Tensor) -> Tensor:
    """The step of 0 that torch's Adam keeps of a parameter: on its device where the kernel reads it there."""
    on_device = any(group.get("fused") or group.get("capturable") for group in adam.param_groups)
    return torch.zeros((), dtype=torch.float32, device=tensor.device if on_device else "cpu")
