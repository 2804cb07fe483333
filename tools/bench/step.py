"""A whole training step on one GPU: tokens per second, FLOPs, memory, where the time goes, beside what is possible.

    python -m tools.bench step --minutes 20 --json rows.jsonl       the cases of --list, in that order
    python -m tools.bench step --cases 4b:128k:one:full,4b:64k:chat
    python -m tools.bench step --judge rows.jsonl more.jsonl        the bars, of rows of several runs

Not yet run on a GPU.  A case is SHAPE:LENGTH:MIX[:MEMORY] (tools/bench/steps/case.py): random weights of a Qwen3
shape, one pack a step, the second half of every sample supervised.  MEMORY is none, selective (the default) or full,
and any of +offload0.5 (+offload is 1), +tile4k and +optim0.5: train.recompute, train.offload_fraction, train.mlp_tile,
optim.offload_fraction.  --set reaches every other recipe key.  Every case has a process of its own, and one that does
not fit is a row.  After a step that warms up, steps are timed for --seconds, and one more is profiled (the timed one
itself where steps are longer than --seconds).

MFU counts causal attention, and the head where supervised, against --peak-tflops.  `of keep`, `of full`: of the floors
of keep-attention and of full recomputation, of rates that the case itself measured (tools/bench/steps/roofline.py).
`by eq.` is what sft/estimate/memory.py says the device holds, `host` what the process took of host memory.
"""

import argparse
from collections.abc import Iterator

from tools.bench.harness import Subject
from tools.bench.results import Row
from tools.bench.steps.bars import bars
from tools.bench.steps.case import StepCase
from tools.bench.steps.options import OPTIONS, STEP_COLUMNS, validate
from tools.bench.steps.process import measured

# By importance: --minutes may leave no time for the last.
CASES = (
    "1.7b:64k:one:selective 4b:64k:one:selective+offload 1.7b:128k:one:selective+offload "
    "4b:128k:one:selective+offload0.8 4b:128k:one:full 1.7b:32k:chat 1.7b:32k:padded "
    "1.7b:64k:one:selective+offload 1.7b:64k:one:full "
    "1.7b:128k:longmix:selective+offload 1.7b:128k:agent:selective+offload 0.6b:64k:one 8b:32k:one:full+optim0.5 "
    "4b:64k:longmix:selective+offload 4b:32k:chat 0.6b:32k:chat 0.6b:128k:one:selective+offload "
    "8b:64k:one:full+offload+optim0.5 1.7b:256k:longmix:selective+offload0.75 1.7b:256k:one:selective+offload0.75 "
    "8b:128k:one:full+offload+optim0.5 4b:256k:one:full+offload"
).split()


def measure(case: StepCase, options: argparse.Namespace) -> Iterator[Row]:
    yield measured(case, options)


def describe(case: StepCase) -> str:
    estimate = case.estimate("cuda")
    device, host = estimate.device / 2**30, estimate.host / 2**30
    return f"{str(case):<42} {device:>7.1f} GiB, host {host:>6.1f} GiB, by the equations"


SUBJECT = Subject(
    measure=measure,
    columns=STEP_COLUMNS,
    cases=CASES,
    tiny_cases=["tiny:512:chat:full"],
    read=StepCase.read,
    describe=describe,
    options=OPTIONS,
    validate=validate,
    bars=bars,
    device="gpu",
)
