"""The keys of attention, and the traits of each backend that checks of other keys need.

sft/mcore/attention implements the backends.  A recipe is checked before torch and megatron are imported, so the traits
are declared here.  No other code compares names of backends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sft.config.section import Section


@dataclass(frozen=True, kw_only=True)
class BackendTraits:
    needs_cuda: bool  # the backend does not run on a CPU
    has_fp8: bool  # the backend supports run.fp8
    reads_cp_comm: bool  # parallel.cp_comm and cp_a2a have an effect
    has_all_layers: bool  # has all kinds of norms and of attention (`ModelConfig.portable_only`)
    shares_latents: bool  # of latent attention, can save and send latents in place of keys and values
    has_fused_rotary: bool  # rotates queries and keys in a kernel that limits the length of a pack


BACKENDS: Mapping[str, BackendTraits] = {
    "te": BackendTraits(
        needs_cuda=True,
        has_fp8=True,
        reads_cp_comm=True,
        has_all_layers=False,
        shares_latents=False,
        has_fused_rotary=True,
    ),
    "portable": BackendTraits(
        needs_cuda=False,
        has_fp8=False,
        reads_cp_comm=False,
        has_all_layers=True,
        shares_latents=True,
        has_fused_rotary=False,
    ),
}


class AttentionConfig(Section):
    backend: Literal["auto", "te", "portable"] = "auto"
    """te is Transformer Engine (CUDA); portable is plain torch and runs anywhere, cp included."""
    delta_rule: Literal["auto", "torch", "fla"] = "auto"
    """Kernel of linear attention: fla is flash-linear-attention (CUDA, bf16); torch is plain and runs anywhere."""

    @property
    def candidates(self) -> Mapping[str, BackendTraits]:
        """The backends that `backend` allows, the preferred one first; auto allows all."""
        return BACKENDS if self.backend == "auto" else {self.backend: BACKENDS[self.backend]}

    @property
    def needs_cuda(self) -> bool:
        return all(traits.needs_cuda for traits in self.candidates.values())

    @property
    def may_have_fp8(self) -> bool:
        return any(traits.has_fp8 for traits in self.candidates.values())

    @property
    def may_have_all_layers(self) -> bool:
        return any(traits.has_all_layers for traits in self.candidates.values())

    @property
    def is_auto(self) -> bool:
        return len(self.candidates) > 1

    @property
    def may_share_latents(self) -> bool:
        return any(traits.shares_latents for traits in self.candidates.values())

    def may_read_cp_comm(self, device: str) -> bool:
        """Whether an allowed backend reads parallel.cp_comm.  `device` is run.device: "auto", "cuda" or "cpu"."""
        return any(traits.reads_cp_comm for traits in self._runnable(device))

    def may_fuse_rotary(self, device: str) -> bool:
        """Whether an allowed backend rotates in a fused kernel.  `device` is run.device."""
        return any(traits.has_fused_rotary for traits in self._runnable(device))

    def _runnable(self, device: str) -> list[BackendTraits]:
        return [traits for traits in self.candidates.values() if not (traits.needs_cuda and device == "cpu")]
