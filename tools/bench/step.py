"""Measures training steps on one GPU: tokens per second, FLOPs, memory, and shares of time, compared with a roofline.

    python -m tools.bench step --minutes 20 --json rows.jsonl       the cases that --list prints, in this order
    python -m tools.bench step --cases 4b:128k:one:full,4b:64k:chat
    python -m tools.bench step --judge rows.jsonl more.jsonl        compare the rows of several runs with the bars

A case is SHAPE:LENGTH:MIX[:MEMORY] (tools/bench/steps/case.py).  The model has random weights of a Qwen3 shape, a step
has one pack, and the second half of every sample is supervised.  MEMORY is none, selective (the default),
attention_kept or full for train.recompute, followed by any of +offload0.5 (train.offload_fraction; +offload is 1),
+tile4k (train.mlp_tile), +optim0.5 (optim.offload_fraction) and +lora16 (lora.rank).  --set sets other recipe keys.
Every case runs in a new process; a case that runs out of memory is a row with this status.  After one warm-up step,
steps are timed for --seconds, then one step is profiled.  If a step takes longer than --seconds, one step is both timed
and profiled.

MFU is FLOP/s / --peak-tflops, for the FLOPs of layers, causal attention, and the head for supervised tokens.  `of keep`
and `of full` are shares of the roofline with keep-attention and with full recomputation, computed from rates that the
case measured (tools/bench/steps/roofline.py).  `by eq.` is the device memory that sft/estimate/memory.py predicts, and
`host` is the host memory that the process used.

With +lora, the process then makes a second engine without adapters.  Both take steps on the same pack, in turns.
`/ full FT` is the median time of a step / the median time of a step of full fine-tuning.  A note has the bytes of
gradients and of optimizer states of both.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tools.bench.harness import DONE, Bar, Column, Row, Subject
from tools.bench.mixes import short
from tools.bench.steps.case import StepCase
from tools.bench.steps.process import OPTIONS, measured, validate

# Most important cases first, because --minutes may end the run before the last ones.
CASES = (
    "1.7b:64k:one:selective 4b:64k:one:selective+offload 1.7b:128k:one:selective+offload "
    "4b:128k:one:selective+offload0.8 4b:128k:one:full 1.7b:32k:chat 1.7b:32k:padded "
    "1.7b:64k:one:selective+offload 1.7b:64k:one:full "
    "1.7b:128k:longmix:selective+offload 1.7b:128k:agent:selective+offload 0.6b:64k:one 8b:32k:one:full+optim0.5 "
    "4b:64k:longmix:selective+offload 4b:32k:chat 0.6b:32k:chat 0.6b:128k:one:selective+offload "
    "8b:64k:one:full+offload+optim0.5 1.7b:256k:longmix:selective+offload0.75 1.7b:256k:one:selective+offload0.75 "
    "8b:128k:one:full+offload+optim0.5 4b:256k:one:full+offload"
).split()

# Only rows that were measured on a GPU count for bars.  If several rows belong to a bar, the bar uses the best row,
# except for the bar of activation offload, which uses the worst pair of rows.
ROOFLINE, MFU, PACKED, LONGEST, OFFLOAD = 0.85, 0.42, 2.0, 0.95, 1.03
# Attention kept / full recompute, 1.7b at 64K: 0.84 of the FLOPs (backward of attention counts 2.5 times), and 5% more.
KEPT = 0.88
MODELS, ALL_MODELS = ("1.7b", "4b"), ("0.6b", "1.7b", "4b", "8b")
LONG = 65_536  # tokens; from this length on, a bar requires that computation hides activation offload

Steps = Sequence[tuple[StepCase, Mapping[str, Any]]]


def measure(case: StepCase, options: argparse.Namespace) -> Iterator[Row]:
    yield measured(case, options)


def describe(case: StepCase) -> str:
    estimate = case.estimate("cuda")
    device, host = estimate.device / 2**30, estimate.host / 2**30
    return f"{str(case):<42} {device:>7.1f} GiB, host {host:>6.1f} GiB, predicted by sft/estimate/memory.py"


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """All bars; a bar without rows has the value None."""
    rows = [row for row in rows if row.get("device") == "cuda" and row.get("status") == DONE]
    steps = [(StepCase.read(row["step"]), row) for row in rows if "step" in row and ":peer" not in row["step"]]
    steps = [(case, row) for case, row in steps if not case.lora]
    yield from _rates(steps)
    yield _packed(steps)
    yield _kept(steps)
    yield from _offload(steps)
    yield from _longest(rows)


def _rates(steps: Steps) -> Iterator[Bar]:
    for length, key, bound, title in (
        (LONG, "of_keep", ROOFLINE, "share of the roofline with keep-attention"),
        (2 * LONG, "of_keep", ROOFLINE, "share of the roofline with keep-attention"),
        (2 * LONG, "mfu", MFU, "causal MFU"),
    ):
        for shape in MODELS:
            values = [row[key] for c, row in steps if (c.shape, c.length, c.mix) == (shape, length, "one")]
            name = f"{shape} at {short(length)}, {title}"
            yield Bar(name=name, value=max(values, default=None), bound=bound, relation="at least")


def _packed(steps: Steps) -> Bar:
    """The bar of packing: real tokens per second of packed chats / those of padded chats."""
    rates = {c: row["tokens_per_s"] for c, row in steps}
    ratios = [
        rate / rates[padded]
        for c, rate in rates.items()
        if c.mix == "chat" and (padded := replace(c, mix="padded")) in rates
    ]
    name = "chat, tokens per second packed / padded"
    return Bar(name=name, value=max(ratios, default=None), bound=PACKED, relation="at least")


def _kept(steps: Steps) -> Bar:
    """The bar of 1.7b at 64K in one document: time of a step with attention kept / time with full recomputation.

    It has the largest ratio of two cases that differ only in recomputation.
    """
    seconds = {c: row["seconds"] / row["steps"] for c, row in steps}
    ratios = [
        taken / seconds[full]
        for c, taken in seconds.items()
        if (c.shape, c.length, c.mix) == ("1.7b", LONG, "one")
        and c.recompute == "attention_kept"
        and (full := replace(c, recompute="full")) in seconds
    ]
    name = f"1.7b at {short(LONG)}, time with attention kept / time with full recomputation"
    return Bar(name=name, value=max(ratios, default=None), bound=KEPT)


def _offload(steps: Steps) -> Iterator[Bar]:
    """Bars of activation offload: for each shape, the largest ratio of seconds of a step with it / without it."""
    seconds = {c: row["seconds"] / row["steps"] for c, row in steps}
    for shape in MODELS:
        ratios = [
            taken / seconds[without]
            for c, taken in seconds.items()
            if c.shape == shape and c.offload and c.length >= LONG and (without := replace(c, offload=0.0)) in seconds
        ]
        name = f"{shape} from {short(LONG)} on, time with activation offload / time without"
        yield Bar(name=name, value=max(ratios, default=None), bound=OFFLOAD)


def _longest(rows: Sequence[Row]) -> Iterator[Bar]:
    for shape in ALL_MODELS:
        ratios = [row["ratio"] for row in rows if row.get("longest") == shape and row["ratio"] is not None]
        name = f"{shape}, longest context that fits / predicted longest context"
        yield Bar(name=name, value=max(ratios, default=None), bound=LONGEST, relation="at least")


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("steps", "steps"),
        Column("step_s", "s/step", ".3f"),
        Column("time_ratio", "/ full FT", ".3f"),
        Column("tokens_per_s", "tokens/s", ",.0f"),
        Column("tflops", "TFLOP/s", ".1f"),
        Column("mfu", "MFU", ".1%"),
        Column("peak_bytes", "GiB", ".1f", 2**30),
        Column("by_equations", "by eq.", ".1f", 2**30),
        Column("host_bytes", "host", ".1f", 2**30),
        Column("of_keep", "of keep", ".1%"),
        Column("of_full", "of full", ".1%"),
    ],
    cases=CASES,
    tiny_cases=["tiny:512:chat:full", "tiny:512:chat:full+lora8"],
    read=StepCase.read,
    describe=describe,
    options=OPTIONS,
    validate=validate,
    bars=bars,
    device="gpu",
)
