"""Computes numbers of the log from facts of the run, such as its layout and its FLOPs per token, and from totals."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sft.config import Config
from sft.layers.adapters import Trained
from sft.layers.flops import TrainFlops, num_parameters
from sft.metrics.totals import Totals
from sft.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts of a run from which, together with totals, numbers of the log are computed.

    peak_tflops  peak dense TFLOP/s of one GPU in the run's precision; None: unknown
    """

    config: Config
    layout: Layout
    num_parameters: int
    flops: TrainFlops
    peak_tflops: float | None = None
    seconds: float = 0.0  # duration of the step or of the held-out pass

    @staticmethod
    def of(
        config: Config,
        layout: Layout,
        vocab_size: int,
        trained: Trained = Trained(),
        *,
        peak_tflops: float | None = None,
    ) -> "RunFacts":
        """peak_tflops: of the device, if log.peak_tflops does not say it"""
        return RunFacts(
            config=config,
            layout=layout,
            num_parameters=num_parameters(config.model, vocab_size),
            flops=TrainFlops.of(config.model, vocab_size, trained, config.lora.rank or 0),
            peak_tflops=config.log.peak_tflops or peak_tflops,
        )

    def capacity(self, totals: Totals) -> int:
        """The number of tokens that the packs of a step, with their CP sizes, can hold."""
        return self.config.data.seq_length // self.layout.cp * totals.num_slots

    def num_microbatches(self, totals: Totals) -> int:
        """The number of packs of a step on each rank, which is equal on all ranks."""
        return totals.num_slots // (self.layout.dp * self.layout.cp)

    def cp_size(self, totals: Totals) -> float:
        """The mean over aligned tokens of the CP size of their packs."""
        by_size = totals.num_aligned_by_cp_size
        return sum(int(size) * tokens for size, tokens in by_size.items()) / max(1, totals.num_aligned_tokens)

    def over_all_ranks(self, num_bytes: float) -> int:
        """The bytes of all ranks.  num_bytes: bytes of the dp x cp ranks of one tp rank and the mean pipeline stage"""
        return round(num_bytes * self.layout.tp * self.layout.pp)

    def tflops_per_rank(self, totals: Totals) -> float:
        """Model FLOPs of real tokens per second and rank, in TFLOP/s."""
        flops = totals.num_real_tokens * self.flops.per_token + totals.num_rows * self.flops.per_label
        return (flops + totals.attention_flops) / self.seconds / self.layout.world_size / 1e12

    def mfu(self, totals: Totals) -> float | None:
        """Model FLOPs utilisation: `tflops_per_rank` / `peak_tflops`; None if the peak is unknown."""
        return None if self.peak_tflops is None else self.tflops_per_rank(totals) / self.peak_tflops


@dataclass(frozen=True)
class Formula:
    """Computes a number from the totals of a step or a held-out pass, and from the facts of the run.

    kind   the word of docs/reference/metrics.md for the ranks over which the number is combined; "" if it is not
           combined
    value  computes the number from (totals, facts)
    """

    kind: str
    value: Callable[[Any, RunFacts], Any]
