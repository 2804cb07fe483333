"""The longest context that fits, by trying: each length in a process of its own, two steps.

    python -m tools.bench longest --cases 0.6b,1.7b --minutes 8

Not yet run on a GPU.  A case is a shape of tools/bench/steps/case.py.  The search begins at what the equations
predict (tools/bench/steps/search.py).  `ratio` is of that length.  Where by arithmetic nothing fits, as much of the
optimizer as the host takes is offloaded.  Documents of --mix: `one` takes as much memory as `1k`, and far longer.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

from tools.bench.harness import DONE, Column, Option, Row, Subject
from tools.bench.steps.bars import bars
from tools.bench.steps.case import SHAPES, StepCase
from tools.bench.steps.options import OPTIONS, validate
from tools.bench.steps.process import HOST, measured, memory_of
from tools.bench.steps.search import Stopped, search

CUDA_CONTEXT = 2**30  # bytes that CUDA takes for itself


def read(shape: str) -> str:
    if shape.lower() not in SHAPES:
        raise ValueError(f"{shape} is not one of {', '.join(SHAPES)}")
    return shape.lower()


def measure(shape: str, options: argparse.Namespace) -> Iterator[Row]:
    case, predicted = start_of(shape, options)

    def fits(length: int) -> bool:
        row = measured(replace(case, length=length), options, only_fits=True)
        gib = (row.get("peak_bytes") or 0) / 2**30
        print(f"    {row['step']}: {row['status']}, {gib:.1f} GiB", file=sys.stderr, flush=True)
        if row["status"] != DONE and not row["status"].startswith("out of memory"):
            raise Stopped(row["status"])
        return bool(row["status"] == DONE)

    result = search(predicted, fits, grain=64 if options.tiny else 1024)
    yield {
        "way": case.memory_keys, "longest": shape, "memory": case.memory_keys, "mix": case.mix,
        "device": options.device.type, **asdict(result), "ratio": result.ratio, "status": result.stopped or DONE,
    }  # fmt: skip


def start_of(shape: str, options: argparse.Namespace) -> tuple[StepCase, int]:
    """The case, and the longest context by the equations; the optimizer on the host where nothing fits without."""
    case = StepCase.read(f"{shape}:1k:{options.mix}:{options.keys}")
    device_gib, host_gib = memory_of(options)
    available = device_gib * 2**30 - (CUDA_CONTEXT if options.memory is None else 0)
    work = options.work
    predicted = case.longest(work.device, available, also=work.overrides)
    if not predicted and not case.optim:
        offloaded = [replace(case, optim=share) for share in (1.0, 0.75, 0.5, 0.25)]
        case = next((c for c in offloaded if c.estimate(work.device).host <= HOST * host_gib * 2**30), case)
        predicted = case.longest(work.device, available, also=work.overrides)
    return case, predicted


def more_checks(options: argparse.Namespace) -> None:
    validate(options)
    StepCase.read(f"tiny:1k:{options.mix}:{options.keys}")
    if options.device == "cpu" and options.memory is None:
        raise ValueError("on a CPU --memory must give a limit to search for")


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("fits", "tokens fit", ","),
        Column("fails", "do not fit", ","),
        Column("predicted", "by the equations", ","),
        Column("ratio", "ratio", ".3f"),
    ],
    cases=["0.6b", "1.7b", "4b", "8b"],
    tiny_cases=["tiny"],
    read=read,
    options={
        **OPTIONS,
        "memory": Option(None, 0.01, "GiB to search within; a CPU has no limit of its own", read=float),
        "keys": Option("full", help="how memory is saved, like full+offload"),
        "mix": Option("1k"),
    },
    validate=more_checks,
    bars=bars,
    device="gpu",
)
