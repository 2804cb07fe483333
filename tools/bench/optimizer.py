"""Measures the update of the weights by each optimizer on a CPU, without forward and backward.

    python -m tools.bench optimizer

A case is the hidden size of a model of four layers.  The optimizers update the same weights in turns, in one process.
Times are medians of CPU time, with clipping of the gradients.  `ratio` is the time divided by that of AdamW with
moments in fp32.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

from sft.mcore import device as devices
from sft.mcore import process_groups
from sft.mcore.optimizer.build import update
from sft.parallel.layout import Layout
from tools.bench.clock import cpu_time, medians
from tools.bench.harness import Column, Option, Row, Subject
from tools.bench.steps.case import StepCase
from tools.bench.steps.trainer import engine_and_loader, state_of

ADAMW = "adamw"
WAYS = {
    ADAMW: [],
    "adamw, moments in bf16": ["optim.moments=bf16"],
    "adamw, moments in int8": ["optim.moments=int8"],
    "muon": ["optim.name=muon"],
    "muon, ns_dtype fp32": ["optim.name=muon", "optim.muon.ns_dtype=fp32"],
}
CASE = StepCase(shape="tiny", length=256, mix="one")
HEADS = 8


def measure(hidden: int, options: argparse.Namespace) -> Iterator[Row]:
    sizes = {"num_layers": 4, "hidden_size": hidden, "ffn_hidden_size": 3 * hidden, "head_dim": hidden // HEADS}
    sizes |= {"num_attention_heads": HEADS, "num_query_groups": HEADS // 2}
    model = [f"model.{name}={value}" for name, value in sizes.items()]
    calls: dict[str, Any] = {}
    parameters, groups = 0, None
    for way, overrides in WAYS.items():
        config = CASE.config("cpu", also=[*model, "run.precision=bf16", *overrides])
        layout = Layout.resolve(config, 1)
        groups = groups or process_groups.start(layout, devices.start("cpu"), seed=config.run.seed, timeout_s=300)
        engine, loader = engine_and_loader(CASE, config, layout, groups, num_steps=1)
        engine.train_step(loader.microbatches(0))
        calls[way] = partial(update, engine.optimizer, engine.chunks, groups.device)
        parameters = state_of(engine)["trained"]
    seconds = medians(calls, repeats=options.repeats, clock=cpu_time)
    process_groups.stop()
    for way in WAYS:
        yield {
            "way": way, "seconds": seconds[way], "ratio": seconds[way] / seconds[ADAMW],
            "parameters": parameters,
        }  # fmt: skip


def _read(name: str) -> int:
    hidden = int(name)
    if hidden < HEADS or hidden % (2 * HEADS):
        raise ValueError(f"{name} is not a multiple of {2 * HEADS}")
    return hidden


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("parameters", "M params", ",.1f", 1e6),
        Column("seconds", "ms/update", ",.1f", 1e-3),
        Column("ratio", "ratio", ".2f"),
    ],
    cases=["256", "512"],
    tiny_cases=["64"],
    read=_read,
    options={"repeats": Option(7, 1, "timed repetitions")},
)
