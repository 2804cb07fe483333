"""Sets the environment variables that torch's CUDA allocator, CUDA, Triton, NCCL and Transformer Engine read.

`prepare` sets them before the first CUDA call, however a run is started.  A variable that the user has set keeps its
value.  sft/parallel/rendezvous.py sets the network interfaces when the ranks meet.
"""

import ctypes
import fcntl
import os
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path

from sft.config import Config
from sft.parallel import rendezvous
from sft.parallel.layout import Layout

# If the user has set one variable of a line, this project sets no variable of that line.
_TOGETHER = (
    # torch 2.9 ignores the second name, and torch before 2.12 warns of the first name.
    ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS"),
    ("TRITON_CACHE_DIR",),
    ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",),
    ("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",),
    ("NCCL_DEBUG",),
    ("NVTE_BATCH_MHA_P2P_COMM",),
)
NAMES = tuple(name for names in _TOGETHER for name in names) + rendezvous.INTERFACES
_BLACKWELL = 10  # major compute capability


def prepare(config: Config, layout: Layout) -> frozenset[str]:
    """Set the variables for this process.  Returns the names of the variables that the user has set.

    CUDA reads its variables once, when a library of the process first calls it.  The import of Transformer Engine can
    make this call, so `prepare` must be called before the import of sft/mcore.
    """
    from_user = frozenset(name for name in NAMES if name in os.environ)
    if config.run.device != "cpu":
        chosen = _choices(config, layout)
        for names in _TOGETHER:
            if from_user.isdisjoint(names):
                os.environ.update({name: chosen[name] for name in names if name in chosen})
    return from_user


def describe(from_user: Collection[str], device_type: str) -> str:
    """One line with the values of the variables that are set; empty if none is set that matters on this device.

    environment NCCL_DEBUG=WARN, GLOO_SOCKET_IFNAME=eth0 (set by the user)
    """
    names = NAMES if device_type == "cuda" else (rendezvous.GLOO,)
    values = [
        f"{name}={os.environ[name]}{' (set by the user)' if name in from_user else ''}"
        for name in names
        if name in os.environ
    ]
    return f"environment {', '.join(values)}" if values else ""


def _choices(config: Config, layout: Layout) -> dict[str, str]:
    # Packs differ in length.  Without expandable segments, up to a tenth of the memory is reserved in pieces that fit
    # no later tensor.
    chosen = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_DEBUG": "WARN"}
    offloads = config.train.offload_fraction > 0.0 or config.optim.offload_fraction > 0.0
    chosen |= connections(layout, offloads=offloads, capability=_compute_capability())
    if cache := _folder_of_this_user("sft-triton"):
        chosen["TRITON_CACHE_DIR"] = cache
    if layout.cp > 1:
        # In the ring over cp, Transformer Engine otherwise sends each message alone, and torch then opens a
        # communicator with each neighbour, outside of its own memory.
        chosen["NVTE_BATCH_MHA_P2P_COMM"] = "1"
    # Some file names in the cache of flash-attn-4 do not contain the type of GPU, so each type gets a folder.
    # flash-attn-4 would end the run if the folder allowed no locks.
    cache = _folder_of_this_user(f"sft-flash-attention-4-sm{_compute_capability() or 0}0")
    if cache and _has_locks(cache):
        chosen["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
        chosen["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = cache
    return chosen


def connections(layout: Layout, *, offloads: bool, capability: int | None) -> dict[str, str]:
    """The variables that set the number of CUDA's hardware queues for kernels and for copies.  CUDA's default is 8
    each.

    offloads    activations or optimizer states are copied to host memory during a step
    capability  major compute capability of the GPUs; None if unknown, which is treated as Hopper

    Before Blackwell, tp and cp need one queue for kernels: kernels then start in the order of their launches, so that a
    collective starts before the matrix product that hides it.  With one queue for copies, a copy that waits for a
    kernel would delay all later copies.  From Blackwell on, one queue has no advantage, and many streams need more than
    8 queues.  NVIDIA's Megatron-Bridge has the same rules; megatron-core's training arguments require one queue before
    Blackwell.
    """
    if layout.tp == layout.cp == 1:
        return {}
    if capability is not None and capability >= _BLACKWELL:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "32"} if layout.dp > 1 or layout.pp > 1 else {}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | ({"CUDA_DEVICE_MAX_COPY_CONNECTIONS": "8"} if offloads else {})


def _compute_capability() -> int | None:
    """The major compute capability of the machine's first GPU; None if unknown.  Read by NVML, which does not start
    CUDA.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    gpu, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    error = (
        nvml.nvmlInit_v2()
        or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))
        or nvml.nvmlDeviceGetCudaComputeCapability(gpu, ctypes.byref(major), ctypes.byref(minor))
    )
    return None if error else major.value


def _folder_of_this_user(name: str) -> str | None:
    """A folder on this machine that only this user can write; None if another user made it, or it cannot be made.

    The caches of Triton and flash-attn-4 contain code that they run, so no other user may write there.
    """
    folder = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return str(folder) if is_ours else None


def _has_locks(folder: str) -> bool:
    """Whether files in the folder can be made and locked, which some network file systems do not allow."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
