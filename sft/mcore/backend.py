"""Which implementation of attention a run gets, and why: `attention.backend` and what is there."""

from dataclasses import dataclass
from typing import Literal

import torch

from sft.config import Config
from sft.errors import ConfigError
from sft.mcore import flash


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
        return Backend(name="te", by_flash=False, why="Transformer Engine")
    dtype = torch.bfloat16 if config.run.precision == "bf16" else torch.float32
    against_flash = flash.why_not(config.model.resolved_head_dim, dtype, device_type)
    kernel = f"plain torch, no flash kernel: {against_flash}" if against_flash else "torch's flash kernel"
    return Backend(
        name="portable",
        by_flash=against_flash is None,
        why=kernel if wanted == "portable" or device_type == "cpu" else f"{kernel}; not te: {against_te}",
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
