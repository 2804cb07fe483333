"""Measures training steps with each train.recompute on a CPU: ratios of times, compared with ratios of counted FLOPs.

    python -m tools.bench recompute --check

A case is LENGTH:MIX (tools/bench/mixes.py) of a model whose heads are so wide that attention has most FLOPs of a step.
The ways train on the same pack in turns, in one process, and times are medians.  GFLOPs are those of the matrix
products that one step executes, with the share of attention's kernels.  The last two columns are the time and the FLOPs
with attention_kept, divided by those of the row.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from sft.batch import Microbatch
from sft.mcore import device as devices
from sft.mcore import process_groups
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.mcore.engine import Engine
from sft.parallel.layout import Layout
from tools.bench.clock import medians, wall
from tools.bench.harness import Bar, Column, Option, Row, Subject
from tools.bench.mixes import read_length_and_mix
from tools.bench.steps.case import StepCase
from tools.bench.steps.trainer import engine_and_loader, engine_of

KEPT = "attention_kept"
WAYS = (KEPT, "full", "selective")
MODEL = ["model.num_attention_heads=8", "model.num_query_groups=4", "model.head_dim=128"]
JUDGED, ATTENTION = "4k:one", 0.9  # the bars need at least this share of FLOPs in attention
OVER_FULL, OVER_SELECTIVE = 0.03, 1.05  # largest |time / FLOPs ratio - 1|, and largest time / FLOPs ratio


class Flops(TorchDispatchMode):
    """Counts FLOPs of matrix products.  torch's FlopCounterMode follows modules, and torch.autograd.grad then fails."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if flops := flop_registry.get(func._overloadpacket):
            self.total += flops(*args, **(kwargs or {}), out_val=result)
        return result


def counted(engine: Engine, microbatches: Sequence[Microbatch]) -> tuple[int, int]:
    """The FLOPs of all matrix products of a step, and the FLOPs of attention's kernels."""
    of_kernels = 0

    def within(function: Any, *args: Any) -> Any:
        nonlocal of_kernels
        before = counter.total
        result = function(*args)
        of_kernels += counter.total - before
        return result

    with ExitStack() as stack:
        for name in ("forward", "backward"):
            function = getattr(TorchKernel, name)
            stack.enter_context(mock.patch.object(TorchKernel, name, lambda *args, f=function: within(f, *args)))
        counter = stack.enter_context(Flops())
        engine.train_step(microbatches)
    return counter.total, of_kernels


def measure(case: tuple[int, str], options: argparse.Namespace) -> Iterator[Row]:
    length, mix = case
    step = StepCase(shape="tiny", length=length, mix=mix, recompute=KEPT)
    also = [*MODEL, *options.set]
    config = step.config("cpu", also=also)
    layout = Layout.resolve(config, 1)
    groups = process_groups.start(layout, devices.start("cpu"), seed=config.run.seed, timeout_s=300)
    first, loader = engine_and_loader(step, config, layout, groups, num_steps=1)
    engines = {KEPT: first}
    for way in WAYS[1:]:
        other = replace(step, recompute=way)
        engines[way] = engine_of(other, other.config("cpu", also=also), layout, groups)
    microbatches = loader.microbatches(0)
    flops = {way: counted(engine, microbatches) for way, engine in engines.items()}
    calls = {way: partial(engine.train_step, microbatches) for way, engine in engines.items()}
    seconds = medians(calls, repeats=options.repeats, clock=wall)
    process_groups.stop()
    for way in WAYS:
        (total, of_kernels), (kept, _) = flops[way], flops[KEPT]
        yield {
            "way": way, "tokens": length, "seconds": seconds[way], "flops": total, "attention": of_kernels / total,
            "time_ratio": seconds[KEPT] / seconds[way], "flops_ratio": kept / total,
        }  # fmt: skip


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    judged = {row["way"]: row for row in rows if row["case"] == JUDGED and row.get("attention", 0) >= ATTENTION}
    excess = {way: row["time_ratio"] / row["flops_ratio"] for way, row in judged.items()}
    full = abs(excess["full"] - 1) if "full" in excess else None
    yield Bar(name=f"{JUDGED}, {KEPT} over full: |time / FLOPs ratio - 1|", value=full, bound=OVER_FULL)
    name = f"{JUDGED}, {KEPT} over selective: time / FLOPs ratio"
    yield Bar(name=name, value=excess.get("selective"), bound=OVER_SELECTIVE)


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("seconds", "s/step", ".3f"),
        Column("flops", "GFLOPs", ",.2f", 1e9),
        Column("attention", "attention", ".1%"),
        Column("time_ratio", "time", ".3f"),
        Column("flops_ratio", "FLOPs ratio", ".3f"),
    ],
    cases=[JUDGED],
    tiny_cases=["512:chat"],
    read=read_length_and_mix,
    options={
        "set": Option([], help="KEY=VALUE of the recipe"),
        "repeats": Option(7, 1, "timed repetitions"),
    },
    bars=bars,
)
