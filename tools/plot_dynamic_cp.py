"""Draws docs/pictures/dynamic-cp.png: one step of chats with long documents among them, at cp 16 and with dynamic CP.

    python -m tools.plot_dynamic_cp

Lengths have the distribution `longmix` of tools/bench/mixes.py, with seq_length 128K; the costs are those of Llama 8B.
"""

from pathlib import Path

from sft.data.inspect.cp_picture import drawn
from sft.data.packing import balance
from sft.data.packing.cp_grid import fixed, timeline
from sft.data.packing.dynamic_cp import assign
from sft.parallel.cp_group import cp_sizes
from tools.bench.dynamic_cp import COSTS, plan_of
from tools.bench.mixes import MULTIPLE, SEQ_LENGTHS

OUT = Path(__file__).resolve().parents[1] / "docs/pictures/dynamic-cp.png"
MIX, CP, DP, MICROBATCHES = "longmix", 16, 1, 8


def main() -> None:
    (lengths, plan), cost = plan_of(MIX, 6000), COSTS["llama-8b"]
    seq_length = SEQ_LENGTHS[MIX]
    packs = plan.batch(0, DP * MICROBATCHES)
    slots = balance.assign(
        packs, lengths, dp=DP, seq_length=seq_length, doc_multiple=MULTIPLE, attention=cost.attention
    )
    samples = [sample for pack in packs for sample in pack]
    dynamic = assign(samples, lengths, dp=DP, cp=CP, rank_tokens=seq_length // CP, cost=cost)
    panels = [timeline(grid, lengths, cost) for grid in (fixed(slots, CP), dynamic)]
    drawn(*panels, num_ranks=DP * CP, cp_sizes=cp_sizes(CP)).savefig(OUT, dpi=120, format="png")


if __name__ == "__main__":
    main()
