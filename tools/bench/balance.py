"""Balance of the work of a global batch over ranks and over microbatches, and the time that the assignment takes.

A case is MIX:MODEL:DPxMICROBATCHES.  tools/bench/mixes.py defines the mix, and the model sets the attention crossover.
An efficiency is mean work / largest work in percent; columns show medians of 20 batches:

    next-fit, best-fit  packs of these methods (tools/bench/packing.py), assigned round robin
    in order            packs of the trainer, assigned round robin
    level               packs of the trainer, assigned by sft/data/packing/balance.py; `worst` is the smallest value
    limit               an upper limit for any assignment of full packs (sft/data/inspect/forecast.py)
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from sft.data.inspect.forecast import bounds
from sft.data.packing.balance import assign, costs, efficiency
from sft.data.packing.plan import PackingPlan
from sft.layers.flops import AttentionCost
from tools.bench.clock import cpu_time
from tools.bench.harness import Option, Subject
from tools.bench.mixes import SEQ_LENGTHS, lengths_of
from tools.bench.packing import MULTIPLE, WAYS
from tools.bench.results import Bar, Column, Row

CROSSOVERS = {"llama-8b": 57_000.0, "qwen3-30b-a3b": 15_400.0}
SHAPES = ("8x4", "8x16", "32x1", "32x4")  # dp x microbatches per rank
NUM_BATCHES = 20
# Bars: efficiency per step / limit, for limits above 0.99 and for lower limits; efficiency per microbatch with at least
# 16 microbatches per rank; seconds of an assignment.
STEP_BAR, LIMITED_BAR, MICROBATCH_BAR, ASSIGN_BAR_S = 0.99, 0.98, 0.95, 0.15

Case = tuple[str, str, int, int]


def read(name: str) -> Case:
    mix, model, shape = name.lower().split(":")
    if mix not in SEQ_LENGTHS or model not in CROSSOVERS:
        raise ValueError(f"{name} is not one of {', '.join(SEQ_LENGTHS)} and one of {', '.join(CROSSOVERS)}")
    dp, num_microbatches = map(int, shape.split("x"))
    return mix, model, dp, num_microbatches


@cache
def plans_of(mix: str, num_lengths: int) -> tuple[np.ndarray, list[PackingPlan]]:
    """The lengths of a mix, and their plan by each method in WAYS."""
    lengths = lengths_of(mix, num_lengths)
    return lengths, [way(lengths, SEQ_LENGTHS[mix]) for way in WAYS.values()]


def measure(case: Case, options: argparse.Namespace) -> Iterator[Row]:
    mix, model, dp, num_microbatches = case
    lengths, (ours, *others) = plans_of(mix, options.samples)
    seq_length, attention = SEQ_LENGTHS[mix], AttentionCost(CROSSOVERS[model])
    work = costs(lengths, doc_multiple=MULTIPLE, attention=attention)

    def efficiency_of(slots: Sequence[Sequence[Sequence[int]]]) -> tuple[float, float]:
        """The efficiency per step and per microbatch."""
        return efficiency(np.array([[work[list(ids)].sum() for ids in rank] for rank in slots]))

    size = dp * num_microbatches
    dealt: list[list[tuple[float, float]]] = []
    level, limits, seconds = [], [], []
    num_batches = min(map(len, (ours, *others))) // size
    for step in np.linspace(0, num_batches - 1, NUM_BATCHES).astype(int).tolist():
        batch, slots = ours.batch(step, size), []
        seconds.append(
            cpu_time(
                lambda: slots.extend(
                    assign(batch, lengths, dp=dp, seq_length=seq_length, doc_multiple=MULTIPLE, attention=attention)
                )
            )
        )
        level.append(efficiency_of(slots))
        batches = [*(plan.batch(step, size) for plan in others), batch]
        dealt.append([efficiency_of([packs[rank::dp] for rank in range(dp)]) for packs in batches])
        limit = bounds(
            lengths[[i for ids in batch for i in ids]], dp=dp, num_microbatches=num_microbatches,
            seq_length=seq_length, doc_multiple=MULTIPLE, attention=attention,
        )  # fmt: skip
        limits.append((limit.full, limit.microbatch))
    yield row_of(np.array(dealt), np.array(level), np.array(limits), num_microbatches) | {
        "seconds_max": max(seconds), "seconds": float(np.median(seconds))
    }  # fmt: skip


def row_of(dealt: np.ndarray, level: np.ndarray, limits: np.ndarray, num_microbatches: int) -> Row:
    """dealt [batches, 3 methods, 2]; level and limits [batches, 2].  The last axis is (per step, per microbatch)."""
    row: Row = {"num_microbatches": num_microbatches}
    for i, prefix in enumerate(("step", "microbatch")):
        ways = dict(zip(("next-fit", "best-fit", "in order"), np.median(dealt[:, :, i], axis=0).tolist()))
        row |= {f"{prefix} {way}": value for way, value in ways.items()}
        row |= {
            f"{prefix} level": float(np.median(level[:, i])), f"{prefix} worst": float(level[:, i].min()),
            f"{prefix} limit": float(np.median(limits[:, i])), f"{prefix} lowest limit": float(limits[:, i].min()),
        }  # fmt: skip
    row["step of limit"] = float(np.median(level[:, 0] / limits[:, 0]))
    return row


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    for row in rows:
        bound = STEP_BAR if row["step limit"] > STEP_BAR else LIMITED_BAR
        name = f"{row['case']}, step, share of the limit"
        yield Bar(name=name, value=row["step of limit"], bound=bound, relation="at least")
        if row["num_microbatches"] >= 16:
            bound = min(MICROBATCH_BAR, row["microbatch limit"])
            name = f"{row['case']}, microbatch"
            yield Bar(name=name, value=row["microbatch level"], bound=bound, relation="at least")
        yield Bar(name=f"{row['case']}, seconds of an assignment", value=row["seconds_max"], bound=ASSIGN_BAR_S)


QUANTITIES = ("next-fit", "best-fit", "in order", "level", "worst", "limit", "lowest limit")
SUBJECT = Subject(
    measure=measure,
    columns=[
        *(Column(f"step {name}", f"step {name}", ".1f", 0.01) for name in QUANTITIES),
        *(Column(f"microbatch {name}", f"mb {name}", ".1f", 0.01) for name in QUANTITIES),
        Column("seconds_max", "ms, max", ".0f", 1e-3),
        Column("seconds", "ms", ".0f", 1e-3),
    ],
    cases=[f"{mix}:{model}:{shape}" for mix in SEQ_LENGTHS for model in CROSSOVERS for shape in SHAPES],
    tiny_cases=["chat:llama-8b:2x4"],
    read=read,
    options={
        "samples": Option(1_000_000, 5000, "number of lengths per mix"),
    },
    bars=bars,
)
