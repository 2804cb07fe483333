"""The keys of attention, and which backends they allow.

sft/mcore/backends implements the backends.  A recipe is checked before torch and megatron are imported, so this module
has the properties of backends on which checks of other keys depend.
"""

from typing import Annotated, Literal

from pydantic import Field

from sft.config.section import Section

Kernel = Literal["fa4", "fa3", "fa2", "ffpa", "torch"]


class AttentionConfig(Section):
    backend: Literal["auto", "te", "portable"] = "auto"
    """te is Transformer Engine (CUDA); portable has the kernels below and runs anywhere, cp included."""
    kernels: Annotated[list[Kernel], Field(min_length=1)] | None = None
    """Kernels of portable that may compute softmax attention; null: all (docs/reference/kernels.md)."""
    delta_rule: Literal["auto", "torch", "fla"] = "auto"
    """Kernel of recurrences: fla is flash-linear-attention (CUDA, bf16); torch is plain and runs anywhere."""

    @property
    def may_be_portable(self) -> bool:
        """Whether the portable backend may run, which needs no CUDA, has all kinds of layers, and shares latents."""
        return self.backend != "te"

    def may_be_te(self, device: str) -> bool:
        """Whether Transformer Engine may run on run.device.  It has FP8 and fused rotary, and reads cp_comm, cp_a2a."""
        return self.backend != "portable" and device != "cpu"
