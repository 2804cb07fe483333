"""Bytes of activations of softmax attention on the te backend, whose modules are those of Transformer Engine."""

from dataclasses import dataclass

from sft.layers.mixers.softmax_bytes import SoftmaxBytes
from sft.layers.rank_share import FP32


@dataclass(frozen=True, kw_only=True)
class TransformerEngineBytes(SoftmaxBytes):
    """Bytes of the te backend, from its source; checked on simulated GPUs (docs/numbers/performance.md)."""

    cp_comm: str = "p2p"
    norm_outputs_are_saved = True

    @property
    def num_saved_outputs(self) -> int:
        """2 with a2a (the kernel's output and the output after the all-to-all), otherwise 1."""
        return 2 if self.rank.cp > 1 and self.cp_comm.startswith("a2a") else 1

    @property
    def kept(self) -> dict[str, float]:
        """Bytes per token that the kernel keeps with train.recompute = attention_kept, by name.

        In the source of Transformer Engine, a ring also keeps its buffer of keys and values, and an all-to-all keeps
        the tensors that it has received.  Recomputation cannot supply these tensors.
        """
        sent = 0.0
        if self.rank.cp > 1 and self.cp_comm != "all_gather":
            sent = self.rank.width * (self.pairs + self.queries * self.cp_comm.startswith("a2a"))
        return super().kept | ({"received over cp": sent} if sent else {})

    def rotary(self, pack: float) -> float:
        """Bytes of the fp32 angles of the longest document, which may be the whole pack."""
        return float(FP32) * pack * self.model.rotary_dim

    def gathered(self, pack: float) -> float:
        """Bytes of gathered keys and values.

        p2p holds the parts of two ranks.  a2a holds the pack for the heads of the rank.  all_gather holds several
        copies of the pack (measured: 6.5 copies at cp 2, 7.8 at cp 4, no more at cp 8).
        """
        if self.rank.cp == 1:
            return 0.0
        return self.rank.width * self.pairs * (8.0 if self.cp_comm == "all_gather" else 4 / self.rank.cp) * pack
