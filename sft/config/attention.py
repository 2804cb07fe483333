"""Keys of attention, and the backends that they allow.

sft/mcore/backends implements the backends.  A recipe is checked before torch and megatron are imported, so this module
defines the properties of backends that checks of other keys need.
"""

from typing import Annotated, Literal

from pydantic import Field

from sft.config.section import Section

Kernel = Literal["fa4", "fa3", "fa2", "ffpa", "torch"]


class AttentionConfig(Section):
    backend: Literal["auto", "te", "portable"] = "auto"
    """te: Transformer Engine (CUDA).  portable: the kernels below, on any device, also with cp."""
    kernels: Annotated[list[Kernel], Field(min_length=1)] | None = None
    """Kernels of portable that may compute softmax attention; null: all (docs/reference/kernels.md)."""
    delta_rule: Literal["auto", "torch", "fla"] = "auto"
    """Kernel of recurrences.  fla: flash-linear-attention (CUDA, bf16).  torch: plain torch, on any device."""

    @property
    def may_be_portable(self) -> bool:
        """Whether the portable backend may run.  It needs no CUDA, computes all kinds of layers, and sends latents."""
        return self.backend != "te"

    def may_be_te(self, device: str) -> bool:
        """Whether Transformer Engine may run on run.device `device`.  It has FP8 and fused rotary positions, and reads
        parallel.cp_comm and cp_a2a."""
        return self.backend != "portable" and device != "cpu"
