"""Fill of packs and time of an epoch's plan, compared with simpler packing methods.

A case is a mix of lengths (tools/bench/mixes.py), clipped to the mix's seq_length.  `ours` is sft/data/packing/plan.py.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sft.data.packing.plan import PackingPlan, plan_epoch, plan_of
from sft.data.packing.shuffle import shuffled
from sft.parallel.alignment import aligned
from tools.bench.clock import cpu_time
from tools.bench.harness import Option, Subject, one_of
from tools.bench.mixes import SEQ_LENGTHS, lengths_of
from tools.bench.results import Bar, Column, Row

MULTIPLE = 32
FILL_BAR, PLAN_BAR_S = 0.994, 1.0  # seconds per million lengths


def ours(lengths: np.ndarray, seq_length: int) -> PackingPlan:
    return plan_epoch(lengths, capacity=seq_length, doc_multiple=MULTIPLE, seed=0, epoch=0, shuffle=True)


def next_fit(lengths: np.ndarray, seq_length: int) -> PackingPlan:
    """Packs in order, and opens a new pack if a length does not fit into the last one."""
    counts, free = [0], seq_length
    for size in aligned(lengths, MULTIPLE).tolist():
        if size > free:
            counts.append(0)
            free = seq_length
        counts[-1] += 1
        free -= size
    return plan_of(np.arange(len(lengths)), np.array(counts), lengths, seq_length, MULTIPLE)


def best_fit_decreasing(lengths: np.ndarray, seq_length: int) -> PackingPlan:
    """Puts each length, longest first, into the fullest pack with room.  The fill is that of first-fit decreasing."""
    order = np.argsort(-lengths, kind="stable")
    packs_by_free: list[list[int]] = [[] for _ in range(seq_length // MULTIPLE + 1)]
    non_empty, num_packs, pack_of = 0, 0, []  # bit r of `non_empty`: packs_by_free[r] has a pack
    for size in (aligned(lengths[order], MULTIPLE) // MULTIPLE).tolist():
        if fitting := non_empty >> size:
            free = size + (fitting & -fitting).bit_length() - 1
            pack = packs_by_free[free].pop()
            non_empty ^= 0 if packs_by_free[free] else 1 << free
        else:
            free, pack, num_packs = seq_length // MULTIPLE, num_packs, num_packs + 1
        pack_of.append(pack)
        packs_by_free[free - size].append(pack)
        non_empty |= 1 << (free - size)
    packs = shuffled(num_packs, 0, 0)[np.array(pack_of)]  # shuffled, because neighbouring packs hold similar lengths
    return plan_of(order[np.argsort(packs, kind="stable")], np.bincount(packs), lengths, seq_length, MULTIPLE)


WAYS: dict[str, Callable[[np.ndarray, int], PackingPlan]] = {
    "ours": ours,
    "next-fit in order": next_fit,
    "best-fit decreasing": best_fit_decreasing,
}


def measure(mix: str, options: argparse.Namespace) -> Iterator[Row]:
    lengths, seq_length = lengths_of(mix, options.samples), SEQ_LENGTHS[mix]
    for name, way in WAYS.items():
        plans: list[PackingPlan] = []
        repeats = 3 if name == "ours" else 1
        seconds = min(cpu_time(lambda: plans.append(way(lengths, seq_length))) for _ in range(repeats))
        yield {
            "way": name, "samples": len(lengths), "mean": float(lengths.mean()), "packs": len(plans[-1]),
            "fill": float(plans[-1].fill), "seconds": seconds,
        }  # fmt: skip


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    for row in rows:
        if row["way"] == "ours":
            bound = PLAN_BAR_S * row["samples"] / 1e6
            yield Bar(name=f"{row['case']}, fill", value=row["fill"], bound=FILL_BAR, relation="at least")
            yield Bar(name=f"{row['case']}, seconds of a plan", value=row["seconds"], bound=bound)


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("samples", "lengths", ","),
        Column("mean", "mean", ",.0f"),
        Column("packs", "packs", ","),
        Column("fill", "fill", ".3%"),
        Column("seconds", "seconds", ".2f"),
    ],
    cases=list(SEQ_LENGTHS),
    tiny_cases=list(SEQ_LENGTHS),
    read=one_of(*SEQ_LENGTHS),
    options={
        "samples": Option(1_000_000, 5000, "number of lengths per mix"),
    },
    bars=bars,
)
