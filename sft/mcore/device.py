"""Chooses between CUDA and CPU, and enables megatron-core to run on a CPU.

megatron-core names "cuda" in some 250 lines.  In a CPU run, `start` redirects the calls that this project reaches to
the CPU, until the process ends.  No other file of the project patches another package.  On CUDA this file patches
nothing.
"""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sft.errors import ConfigError
from sft.mcore import determinism

_CPU_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}

# The function that a torch function mode receives when code reads `tensor.is_cuda`.
_IS_CUDA = getattr(torch.Tensor, "is_cuda").__get__  # noqa: B009

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_LOCAL = (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))  # set by torchrun; the defaults are for a single process

# Fields of TransformerConfig whose defaults need CUDA kernels.
CPU_TRANSFORMER_FIELDS: dict[str, Any] = dict(
    gradient_accumulation_fusion=False,
    masked_softmax_fusion=False,
    apply_rope_fusion=False,
    bias_activation_fusion=False,
    bias_dropout_fusion=False,
    persist_layer_norm=False,
)


def choose(wanted: str) -> str:
    """`auto | cuda | cpu` -> the device type of this process.  Raises ConfigError if cuda is named and missing."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device = cuda, but torch sees no CUDA device.  Use run.device=cpu or auto.")
    return wanted


def start(device_type: str, *, deterministic: bool = False) -> torch.device:
    """Prepare this process for megatron-core on `device_type`, and return its device.  Repeated calls are safe."""
    determinism.set_mode(deterministic)
    if device_type == "cuda":
        local_rank, processes = (int(os.environ.get(name, default)) for name, default in _LOCAL)
        if processes > torch.cuda.device_count():  # every process of the machine raises the error, including rank 0
            raise ConfigError(
                f"{processes} processes were started on a machine with {torch.cuda.device_count()} visible GPUs.  "
                f"Start at most {torch.cuda.device_count()} processes per machine, or use run.device=cpu."
            )
        torch.cuda.set_device(local_rank)
        _bind_to_cpus_near(local_rank)
        _compile_in_this_process()
        return torch.device("cuda", local_rank)
    if not _Redirect.active:
        _redirect_cuda_to_cpu()
    return torch.device("cpu")


def _bind_to_cpus_near(index: int) -> None:
    """Let this process run only on the CPUs of its GPU's NUMA node, as far as it may run there.

    Memory that the process pins then lies on that node too, so copies between host and GPU do not cross the sockets.
    If Linux does not report which CPUs are near, the function does nothing.  `torchrun --numa-binding node` is not
    used: in that case it ends the run or binds all ranks to node 0, and it needs numactl.
    """
    gpu: Any = torch.cuda.get_device_properties(index)
    try:
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        near = _cpus((_PCI_DEVICES / address / "local_cpulist").read_text())
    except (OSError, AttributeError):  # torch 2.8 has no PCI addresses
        return
    if allowed := near & os.sched_getaffinity(0):
        os.sched_setaffinity(0, allowed)


def _cpus(ranges: str) -> set[int]:
    """`0-2,8` -> {0, 1, 2, 8}"""
    ends = [part.partition("-")[::2] for part in ranges.strip().split(",") if part]
    return {cpu for first, last in ends for cpu in range(int(first), int(last or first) + 1)}


def _compile_in_this_process() -> None:
    """Make torch compile core's few small kernels in this process, unless the environment sets a number of processes.

    By default, every rank starts a pool with one process per CPU core.  Starting the pool takes longer than the
    compilation, and sometimes the pool did not end.
    """
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config

        config.compile_threads = 1


def enter(device: torch.device) -> None:
    """Make `device` the current device of this thread.  A new thread starts on the first GPU of the machine."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `tensor` from the CPU to the device.  The host does not wait for work in progress on a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def lock_pages(address: int, num_bytes: int, device: torch.device) -> str | None:
    """Lock pages of host memory for copies from and to a GPU.  Returns the reason if CUDA refuses, else None."""
    # In a thread of its own: CUDA keeps the last error of each thread, and torch would raise it after a later kernel.
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(_lock_pages, address, num_bytes, device).result()


def _lock_pages(address: int, num_bytes: int, device: torch.device) -> str | None:
    enter(device)
    try:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)))
    except RuntimeError as error:
        return f"CUDA reports: {error}"
    return None


def unlock_pages(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):  # in any thread, because the garbage collector calls this
        torch.cuda.cudart().cudaHostUnregister(address)


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak bytes that torch allocated and reserved on this GPU since the last call; empty on a CPU."""
    if device.type != "cuda":
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"memory_allocated": float(allocated), "memory_reserved": float(reserved)}


def memory_outside_torch(device: torch.device) -> float | None:
    """Bytes in use on this GPU that torch's allocator has not reserved; None on a CPU.

    They belong to CUDA's context, to NCCL, and to other processes on this GPU.
    """
    if device.type != "cuda":
        return None
    free, capacity = torch.cuda.mem_get_info(device)
    return float(capacity - free - torch.cuda.memory_reserved(device))


class WithoutPinning(TorchFunctionMode):
    """A context in which `Tensor.pin_memory` returns the tensor itself, without a pinned copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.pin_memory else func(*args, **(kwargs or {}))


class _Redirect(TorchFunctionMode):
    """Creates tensors on the CPU if megatron-core requests them on "cuda"; makes `Tensor.type()` return CUDA names."""

    active = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _CPU_TYPE_NAMES.get(args[0].dtype, func(*args))
        if func is torch.Tensor.to and any(_is_cuda(a) for a in args[1:]):
            args = tuple("cpu" if _is_cuda(a) else a for a in args)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


class _Stream:
    """A stream or event whose methods do nothing, because a CPU runs everything in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()


class _PretendCuda(TorchFunctionMode):
    """Makes `is_cuda` true for all tensors except copies made by `cpu()` and tensors computed from those copies.

    Core's hybrid optimizer offloads a share of the parameters whose `is_cuda` is true.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, Any] = {}  # by id; the reference prevents reuse of the id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_CUDA:
            return id(args[0]) not in self._copies
        result = args[0] if func is torch.Tensor.pin_memory else func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (func is torch.Tensor.cpu or id(args[0]) in self._copies):
            self._copies[id(result)] = result
        return result


def _listed(sizes: Any) -> Any:
    """`sizes` as a list of int.  Core passes numpy arrays, which gloo refuses."""
    return sizes if sizes is None else [int(size) for size in sizes]


def _redirect_cuda_to_cpu() -> None:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as core_random
    from megatron.core.transformer.moe import token_dispatcher

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args: None
    cuda.current_stream = cuda.default_stream = lambda *args: _Stream()
    cuda.stream = lambda *args: contextlib.nullcontext()
    cuda.Stream = cuda.Event = _Stream
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.empty_cache = lambda: None
    core: Any = core_random
    core._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    core._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    dispatcher: Any = token_dispatcher
    dispatcher.all_to_all = lambda group, x, out, into, **more: mappings.all_to_all(
        group, x, _listed(out), _listed(into), **more
    )
    hybrid: Any = HybridDeviceOptimizer
    share_out = hybrid._get_sub_optimizer_param_groups

    def share_out_as_on_a_gpu(optimizer: Any, fraction: float) -> Any:
        with _PretendCuda():
            return share_out(optimizer, fraction)

    hybrid._get_sub_optimizer_param_groups = share_out_as_on_a_gpu
    _Redirect().__enter__()
    _Redirect.active = True
