"""Optimizer offload: core's hybrid optimizer, with its fp32 weights on the host in page-locked memory.

The hybrid optimizer makes an fp32 copy of each parameter of its groups, on the host or on the device.  Each copy on the
host has its own Adam.

Core's state dict of the hybrid optimizer contains Python classes, and making it fails for fp32 parameters.  So
checkpoints read and write Adam's states in place (`optimizer_shards.py`).
"""

import gc

from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from sft.errors import StorageError
from sft.mcore.optimizer.inner import chained_optimizers
from sft.mcore.page_locked import Arena, aligned


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
