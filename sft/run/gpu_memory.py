"""Logs the memory that CUDA and NCCL take on the GPU, once after the first step of a start.

sft/estimate assumes a value for this memory.  The line compares it with the measured value on this machine.
"""

from dataclasses import dataclass

import torch

from sft.config import Config
from sft.console import Console
from sft.estimate.communicators import compared
from sft.mcore.device import memory_outside_torch
from sft.parallel.layout import Layout


@dataclass
class GpuMemory:
    """Logs the memory outside of torch once."""

    config: Config
    layout: Layout
    device: torch.device
    console: Console
    is_logged: bool = False

    def after_step(self) -> None:
        """Log the line after the first step, in which the communicators have opened."""
        if not self.is_logged and (measured := memory_outside_torch(self.device)) is not None:
            self.console.say(compared(self.config, self.layout, measured))
        self.is_logged = True
