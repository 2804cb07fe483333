"""The keys of attention, and which backends they allow.

sft/mcore/backends implements the backends.  A recipe is checked before torch and megatron are imported, so this module
has the properties of backends on which checks of other keys depend.
"""

from typing import Literal

from sft.config.section import Section


class AttentionConfig(Section):
    backend: Literal["auto", "te", "portable"] = "auto"
    """te is Transformer Engine (CUDA); portable is plain torch and runs anywhere, cp included."""
    delta_rule: Literal["auto", "torch", "fla"] = "auto"
    """Kernel of linear attention: fla is flash-linear-attention (CUDA, bf16); torch is plain and runs anywhere."""

    @property
    def may_be_portable(self) -> bool:
        """Whether the portable backend may run, which needs no CUDA, has all kinds of layers, and shares latents."""
        return self.backend != "te"

    def may_be_te(self, device: str) -> bool:
        """Whether Transformer Engine may run on run.device.  It has FP8 and fused rotary, and reads cp_comm, cp_a2a."""
        return self.backend != "portable" and device != "cpu"
