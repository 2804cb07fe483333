"""Which implementation of attention a run gets, and why: `attention.backend` and what is there."""

import importlib.metadata
from dataclasses import dataclass
from typing import Literal

import torch

from sft.config import Config, ParallelConfig
from sft.errors import ConfigError
from sft.mcore import fp8
from sft.mcore.attention import flash_kernel

# Release of Transformer Engine from which context parallelism other than p2p takes packed documents; from its sources.
_PACKED_SINCE = {"a2a": (2, 10), "all_gather": (2, 18), "a2a+p2p": (2, 19)}


@dataclass(frozen=True, kw_only=True)
class Backend:
    """name: which layers the model is built of; by_flash: portable by torch's flash kernel; why: in words"""

    name: Literal["te", "portable"]
    by_flash: bool
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


def choose(config: Config, device_type: str) -> Backend:
    """`auto` is te where Transformer Engine and CUDA are there.

    Raises ConfigError where te is named and cannot be, and where run.fp8 is, which portable has not.
    """
    wanted = config.attention.backend
    against_te = _against_te(config, device_type)
    if wanted == "te" and against_te:
        raise ConfigError(f"attention.backend = te: {against_te}.  attention.backend=portable runs anywhere.")
    if config.run.fp8 and against_te:
        raise ConfigError(
            f"run.fp8 = {config.run.fp8} is Transformer Engine's: {against_te}.  run.fp8=null needs none."
        )
    if wanted != "portable" and not against_te:
        _check_communication(config.parallel)
        _check_fp8(config.run.fp8)
        return Backend(name="te", by_flash=False, why="Transformer Engine")
    dtype = torch.bfloat16 if config.run.precision == "bf16" else torch.float32
    against_flash = flash_kernel.why_not(config.model.resolved_head_dim, dtype, device_type)
    kernel = f"plain torch, no flash kernel: {against_flash}" if against_flash else "torch's flash kernel"
    return Backend(
        name="portable",
        by_flash=against_flash is None,
        why=kernel if wanted == "portable" or device_type == "cpu" else f"{kernel}; not te: {against_te}",
    )


def _check_communication(parallel: ParallelConfig) -> None:
    """Older releases stop in the first step, with an assertion."""
    needed, there = _PACKED_SINCE.get(parallel.cp_comm, (0, 0)), _installed()
    if parallel.cp > 1 and _numbers(there) < needed:
        major, minor = needed
        raise ConfigError(
            f"parallel.cp_comm = {parallel.cp_comm}: Transformer Engine {there} is here, and takes packed documents so "
            f"from {major}.{minor} on.  parallel.cp_comm=p2p works."
        )


def _check_fp8(wanted: str | None) -> None:
    """Transformer Engine asserts in the first step."""
    if wanted is None:
        return
    gpu, cuda = torch.cuda.get_device_capability(), _numbers(torch.version.cuda or "0.0")
    against = fp8.why_not(wanted, te=_numbers(_installed()), gpu=gpu, cuda=cuda)
    if against:
        others = [name for name in fp8.that_run_on(gpu) if name != wanted]
        raise ConfigError(f"run.fp8 = {wanted}: {against}.  For this GPU there are: {', '.join([*others, 'null'])}.")


def _installed() -> str:
    return importlib.metadata.version("transformer-engine")


def _numbers(version: str) -> tuple[int, int]:
    """ "2.20.2+abc" -> (2, 20)"""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


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
