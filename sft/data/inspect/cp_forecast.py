"""Predicts times and bytes of steps in the first epoch of a run with dynamic CP, and whether dynamic CP would shorten
the steps of a run with a fixed cp.

Decides what `sft data plan` and `sft check` print about CP sizes.  A `Loader` makes the packs, so a run trains on the
same packs.  `packing/cp_grid.py` predicts times and bytes; nothing is measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np

from sft.config import Config
from sft.data.loader import Loader, make_loader
from sft.data.packing.cp_cost import Documents
from sft.data.packing.cp_grid import Prediction, fixed, predict
from sft.errors import ConfigError
from sft.layers.flops import ASSUMED_SHARE, ASSUMED_TFLOPS
from sft.parallel.layout import Layout

FEW = 10  # number of global batches for which `short_line` and `advice` predict times
HELPS = 0.95  # if a step with dynamic CP takes at most this part of the step without it, the forecast says so


@dataclass(frozen=True, kw_only=True)
class BatchForecast:
    """Predictions for one global batch with dynamic CP and with the fixed cp.

    bound_ns  a lower bound of the step's time in ns, for any assignment
    """

    dynamic: Prediction
    fixed: Prediction
    bound_ns: int

    @property
    def step(self) -> float:
        """Predicted time of the step with dynamic CP, divided by its time with the fixed cp."""
        return self.dynamic.makespan_ns / self.fixed.makespan_ns

    @property
    def step_to_bound(self) -> float:
        """Predicted time of the step with dynamic CP, divided by the lower bound of its time."""
        return self.dynamic.makespan_ns / self.bound_ns

    @property
    def num_bytes(self) -> float:
        """Predicted bytes that cp ranks receive with dynamic CP, divided by the bytes with the fixed cp."""
        return self.dynamic.num_bytes / max(1, self.fixed.num_bytes)


def batches_of(loader: Loader, count: int) -> list[BatchForecast]:
    """The forecasts of the steps that `spread_steps` chooses.  The layout of `loader` must have dynamic CP."""
    layout, lengths, cost = loader.layout, loader.corpus.shapes, loader.cp_cost
    assert cost is not None
    rank_tokens = loader.seq_length // layout.cp
    batches = []
    for step in spread_steps(loader, count):
        samples = [i for pack in loader.plans.global_batch(step) for i in pack]
        documents = Documents.of(samples, lengths, layout.cp_sizes, rank_tokens=rank_tokens, cost=cost)
        batches.append(
            BatchForecast(
                dynamic=predict(loader.grid(step), lengths, cost),
                fixed=predict(fixed(loader.slots(step), layout.cp), lengths, cost),
                bound_ns=documents.bound_ns(layout.dp * layout.cp),
            )
        )
    return batches


def spread_steps(loader: Loader, count: int) -> list[int]:
    """At most `count` steps, counted from 0, at equal distances in the first epoch."""
    steps = loader.plans.steps_per_epoch(0)
    return np.unique(np.linspace(0, steps - 1, min(steps, count)).astype(int)).tolist()


def lines(config: Config, batches: Sequence[BatchForecast]) -> list[str]:
    """The lines of `sft data plan` about CP sizes, times and bytes of a run with dynamic CP."""
    parallel, tflops = config.parallel, config.log.peak_tflops or ASSUMED_TFLOPS
    packs, tokens = ([getattr(b.dynamic, f"share_of_{unit}") for b in batches] for unit in ("packs", "tokens"))
    return [
        f"packs on {_sizes(packs)}",
        f"tokens on {_sizes(tokens)}",
        f"step {_ratios(b.step for b in batches)} of fixed cp, {_ratios(b.step_to_bound for b in batches)} of the "
        "bound (median / max)",
        f"bytes over cp {_ratios(b.num_bytes for b in batches)} of fixed cp (median / max)",
        _microbatches(batches),
        f"predicted and not measured, at {ASSUMED_SHARE:.0%} of {tflops:g} TFLOP/s, {parallel.intra_node_gb_s:g} "
        f"GB/s within a node of {parallel.gpus_per_node} GPUs, {parallel.inter_node_gb_s:g} GB/s between nodes",
    ]


def short_line(loader: Loader) -> str:
    """The line of `sft check` about times, bytes and microbatches of a run with dynamic CP."""
    batches = batches_of(loader, FEW)
    alone = mean(b.dynamic.share_of_tokens.get(1, 0.0) for b in batches)
    return (
        f"dynamic CP, predicted: a step {median(b.step for b in batches):.2f} of fixed cp, bytes over cp "
        f"{median(b.num_bytes for b in batches):.2f}, {alone:.1%} of tokens on 1 rank; {_microbatches(batches)}"
    )


def advice(config: Config, loader: Loader) -> list[str]:
    """For a run with a fixed cp: one line with the settings that turn dynamic CP on, and its predicted time and bytes.

    Empty if cp = 1, if a step with dynamic CP takes more than 95% of its time, or if the recipe cannot have dynamic CP.
    """
    if loader.layout.cp == 1:
        return []
    settings = "parallel.dynamic_cp=true"
    if config.parallel.cp_comm == "a2a+p2p":  # refused with dynamic CP
        settings += " parallel.cp_comm=p2p parallel.cp_a2a=null"
    changed = config.model_copy(update={"parallel": config.parallel.model_copy(update={"dynamic_cp": True})})
    try:
        layout = Layout.resolve(changed, loader.layout.world_size)
    except ConfigError:
        return []
    batches = batches_of(make_loader(changed, layout, loader.corpus, pad_id=0), FEW)
    step = median(b.step for b in batches)
    if step > HELPS:
        return []
    num_bytes = median(b.num_bytes for b in batches)
    return [f"{settings}: a step takes {step:.2f} of its time, with {num_bytes:.2f} of the bytes over cp (predicted)"]


def _sizes(shares: Sequence[dict[int, float]]) -> str:
    """The mean over steps of the share of each CP size: [{1: 1.0}, {1: 0.5, 2: 0.5}] -> "1 rank 75.0%, 2 ranks 25.0%"

    shares: for each step, {CP size: its share}
    """
    return ", ".join(
        f"{size} rank{'s' * (size > 1)} {mean(share.get(size, 0.0) for share in shares):.1%}"
        for size in sorted({size for share in shares for size in share})
    )


def _ratios(values: Iterable[float]) -> str:
    ratios = list(values)
    return f"{median(ratios):.2f} / {max(ratios):.2f}"


def _microbatches(batches: Sequence[BatchForecast]) -> str:
    counts = [b.dynamic.num_microbatches for b in batches]
    of_fixed = batches[0].fixed.num_microbatches
    return (
        f"microbatches {min(counts)} / {median(counts):g} / {max(counts)} (min / median / max); fixed cp has {of_fixed}"
    )
