"""Which implementation of attention a run gets, and why: `attention.backend` and what is there."""

import importlib.metadata
from dataclasses import dataclass
from typing import Literal

import torch

from sft.config import Config, ParallelConfig
from sft.errors import ConfigError
from sft.mcore import flash

# Release of Transformer Engine from which context parallelism other than p2p takes packed documents; from its sources.
_PACKED_SINCE = {"a2a": (2, 10), "all_gather": (2, 18)}


@dataclass(frozen=True, kw_only=True)
class Backend:
    """name: which layers the model is built of; by_flash: portable by torch's flash kernel; why: in words"""

    name: Literal["te", "portable"]
    by_flash: bool
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


def choose(config: Config, device_type: str) -> Backend:
    """`auto` is te where Transformer Engine and CUDA are there.  Raises ConfigError where te is named and cannot be."""
    wanted = config.attention.backend
    against_te = _against_te(config, device_type)
    if wanted == "te" and against_te:
        raise ConfigError(f"attention.backend = te: {against_te}.  attention.backend=portable runs anywhere.")
    if wanted != "portable" and not against_te:
        _check_communication(config.parallel)
        return Backend(name="te", by_flash=False, why="Transformer Engine")
    dtype = torch.bfloat16 if config.run.precision == "bf16" else torch.float32
    against_flash = flash.why_not(config.model.resolved_head_dim, dtype, device_type)
    kernel = f"plain torch, no flash kernel: {against_flash}" if against_flash else "torch's flash kernel"
    return Backend(
        name="portable",
        by_flash=against_flash is None,
        why=kernel if wanted == "portable" or device_type == "cpu" else f"{kernel}; not te: {against_te}",
    )


def _check_communication(parallel: ParallelConfig) -> None:
    """Older releases stop in the first step, with an assertion."""
    needed = _PACKED_SINCE.get(parallel.cp_comm, (0, 0))
    there = importlib.metadata.version("transformer-engine")
    if parallel.cp > 1 and tuple(int(part) for part in there.split(".")[:2]) < needed:
        major, minor = needed
        raise ConfigError(
            f"parallel.cp_comm = {parallel.cp_comm}: Transformer Engine {there} is here, and takes packed documents so "
            f"from {major}.{minor} on.  parallel.cp_comm=p2p works."
        )


def _against_te(config: Config, device_type: str) -> str | None:
    if device_type != "cuda":
        return "Transformer Engine needs CUDA and this run is on the CPU"
    if config.run.precision == "fp32":
        return "Transformer Engine's attention computes in bf16 and run.precision is fp32"
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        return f"transformer_engine does not import here ({error}); install the extra: pip install sft[te]"
    return None
