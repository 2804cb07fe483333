"""Predicts time, bytes over cp and balance of steps with a CP size for each pack (dynamic CP), compared with fixed CP.

A case is MIX:MODEL:RANKSxMICROBATCHES:CP.  RANKS is dp x cp, and MICROBATCHES is the number of packs per dp rank and
global batch with fixed CP.  The plan with dynamic CP and the plan with fixed CP have the same global batches, and packs
of seq_length / CP tokens per rank.  A column is the mean over the global batches, or the largest or smallest value
where the list says so:

    bytes          bytes over cp / bytes over cp with fixed CP
    least          the same ratio if each document is on the smallest group that holds it
    step / bound   largest value: time of the step / lower bound of the time of any assignment
    step / fixed   time of the step / time of the step with fixed CP (sft/data/packing/balance.py)
    balance        smallest value: mean work of a rank / time of the step
    microbatch     smallest value: `balance` if all ranks wait for each other after every microbatch
    level          smallest value: `microbatch` of a plan that is made for ranks that wait after every microbatch
    level / bound  largest value: time of that plan / lower bound of the time of any plan with such waits
                   (waiting_bound.py); 1 / this is the share of the best possible balance
    ms, max        largest CPU time of making a plan

Only in the columns `microbatch`, `level` and `level / bound` do ranks wait for each other within a step.  The cost
model of sft/data/packing/cp_cost.py predicts times of steps.
"""

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from sft.data.packing import balance
from sft.data.packing.cp_cost import CpCost, Documents
from sft.data.packing.cp_grid import Grid, fixed, predict
from sft.data.packing.dynamic_cp import assign, unless_longer
from sft.data.packing.plan import PackingPlan, plan_epoch
from sft.layers.flops import AttentionCost
from sft.parallel.cp_group import cp_sizes
from tools.bench.clock import cpu_time
from tools.bench.harness import Bar, Column, Option, Row, Subject
from tools.bench.mixes import MULTIPLE, SEQ_LENGTHS, TRACES, lengths_of
from tools.bench.waiting_bound import waiting_bound_ns

# For bf16, tp 1, no recompute, an H100 at 35% of its peak: 6 FLOPs per token and active parameter of the layers.
COSTS = {
    "llama-8b": CpCost(
        doc_multiple=MULTIPLE, attention=AttentionCost(57_000.0),
        token_ns=121_000.0, microbatch_ns=16e6, kv_bytes=32 * 2 * 8 * 128 * 8,
    ),
    "qwen3-30b-a3b": CpCost(
        doc_multiple=MULTIPLE, attention=AttentionCost(15_400.0),
        token_ns=47_600.0, microbatch_ns=24e6, kv_bytes=48 * 2 * 4 * 128 * 8,
    ),
}  # fmt: skip
GRIDS = ("16x8:16", "32x8:8", "64x8:16", "256x4:16")
# 8 and 32 ranks: dp 1 and 4 at fixed CP.
BALANCE = ("8x4:8", "8x16:8", "32x8:8", "32x32:8")
LARGE = "128x32:8"  # 16 dp ranks with 32 packs each: global batches of 512 packs
BYTES_BAR, STEP_BAR, BALANCE_BAR, PLAN_BAR_S = 0.45, 1.05, 0.95, 0.050  # seconds for 512 packs
# Shares of the best possible balance of microbatches.  FEW_BAR: for batches with fewer than FEW documents per rank, of
# which most need several ranks.
LEVEL_BAR, FEW_BAR, FEW = 0.94, 0.88, 1.25

Case = tuple[str, str, int, int, int]


def read(name: str) -> Case:
    mix, model, shape, cp = name.lower().split(":")
    if mix not in SEQ_LENGTHS | TRACES or model not in COSTS:
        raise ValueError(f"{name} is not one of {', '.join(SEQ_LENGTHS | TRACES)} and one of {', '.join(COSTS)}")
    ranks, num_microbatches = map(int, shape.split("x"))
    return mix, model, ranks, num_microbatches, int(cp)


@cache
def plan_of(mix: str, num_lengths: int) -> tuple[np.ndarray, PackingPlan]:
    """The lengths of a mix, and the trainer's plan of an epoch of them."""
    lengths, capacity = lengths_of(mix, num_lengths), (SEQ_LENGTHS | TRACES)[mix]
    return lengths, plan_epoch(lengths, capacity=capacity, doc_multiple=MULTIPLE, seed=0, epoch=0, shuffle=True)


def measure(case: Case, options: argparse.Namespace) -> Iterator[Row]:
    mix, model, ranks, num_microbatches, cp = case
    (lengths, plan), cost, seq_length = plan_of(mix, options.samples), COSTS[model], (SEQ_LENGTHS | TRACES)[mix]
    dp = ranks // cp
    results: list[dict[str, float]] = []
    num_batches = len(plan) // (dp * num_microbatches)
    for step in np.linspace(0, num_batches - 1, options.batches).astype(int).tolist():
        packs = plan.batch(step, dp * num_microbatches)
        ids = np.array([i for pack in packs for i in pack], dtype=np.int64)
        waits = replace(cost, wait_ranks=ranks)
        plain = fixed(
            balance.assign(
                packs, lengths, dp=dp, seq_length=seq_length, doc_multiple=MULTIPLE, attention=cost.attention
            ),
            cp,
        )

        def planned(costs: CpCost) -> Grid:
            grid = assign(ids, lengths, dp=dp, cp=cp, rank_tokens=seq_length // cp, cost=costs)
            return unless_longer(grid, ids, lengths, lambda: plain, cp=cp, rank_tokens=seq_length // cp, cost=costs)

        grids: list[Grid] = []
        gc.freeze()  # so that the time of a plan does not include a collection of all imported modules
        seconds = max(cpu_time(lambda: grids.append(planned(costs))) for costs in (cost, waits))
        of_plan, of_fixed = (predict(grid, lengths, cost) for grid in (grids[0], plain))
        level = predict(grids[1], lengths, waits)
        documents = Documents.of(ids, lengths, cp_sizes(cp), rank_tokens=seq_length // cp, cost=cost)
        least = sum(
            int(cost.num_bytes(lengths[documents.ids[documents.least == k]], MULTIPLE, size).sum())
            for k, size in enumerate(documents.sizes)
        )
        lowest = documents.bound_ns(ranks)
        results.append(
            {
                "bytes": of_plan.num_bytes / of_fixed.num_bytes,
                "least": least / of_fixed.num_bytes,
                "bound": of_plan.makespan_ns / lowest,
                "fixed": of_plan.makespan_ns / of_fixed.makespan_ns,
                "balance": of_plan.per_step,
                "microbatch": of_plan.per_microbatch,
                "level": level.per_microbatch,
                "seconds": seconds,
                "documents": len(ids) / ranks,
                "num_microbatches": float(of_plan.num_microbatches),
                "level_bound": level.makespan_ns / waiting_bound_ns(documents, ranks),
            }
        )
    columns = {name: np.array([result[name] for result in results]) for name in results[0]}
    row: Row = {name: float(values.mean()) for name, values in columns.items()}
    row |= {name: float(columns[name].max()) for name in ("bound", "level_bound", "seconds")}
    row |= {name: float(columns[name].min()) for name in ("balance", "microbatch", "level")}
    yield row | {"packs": dp * num_microbatches}


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    for row in rows:
        name = row["case"]
        if name.startswith(("math", "chat")):
            yield Bar(name=f"{name}, bytes of fixed CP", value=row["bytes"], bound=BYTES_BAR)
        yield Bar(name=f"{name}, time of the bound", value=row["bound"], bound=STEP_BAR)
        yield Bar(name=f"{name}, balance", value=row["balance"], bound=BALANCE_BAR, relation="at least")
        yield Bar(
            name=f"{name}, balance of microbatches / best possible",
            value=1 / row["level_bound"],
            bound=FEW_BAR if row["documents"] < FEW else LEVEL_BAR,
            relation="at least",
        )
        bound_s = PLAN_BAR_S * max(1.0, row["packs"] / 512)
        yield Bar(name=f"{name}, seconds of a plan", value=row["seconds"], bound=bound_s)


MIXES = (*TRACES, *SEQ_LENGTHS)
SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("packs", "packs", ","),
        Column("num_microbatches", "M", ".1f"),
        Column("bytes", "bytes", ".2f"),
        Column("least", "least", ".2f"),
        Column("bound", "step / bound", ".3f"),
        Column("fixed", "step / fixed", ".2f"),
        Column("balance", "balance", ".1f", 0.01),
        Column("microbatch", "microbatch", ".1f", 0.01),
        Column("level", "level", ".1f", 0.01),
        Column("level_bound", "level / bound", ".3f"),
        Column("seconds", "ms, max", ".0f", 1e-3),
    ],
    cases=[
        *(f"{mix}:{model}:{grid}" for mix in MIXES for model in COSTS for grid in GRIDS),
        *(f"{mix}:{model}:{grid}" for mix in SEQ_LENGTHS for model in COSTS for grid in BALANCE if grid not in GRIDS),
        *(f"{mix}:llama-8b:{LARGE}" for mix in MIXES),
    ],
    tiny_cases=["math:llama-8b:8x2:4"],
    read=read,
    options={
        "samples": Option(200_000, 2000, "number of lengths per mix"),
        "batches": Option(3, 1, "global batches per case"),
    },
    bars=bars,
)
