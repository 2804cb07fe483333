"""Finds the longest context that fits into memory.  Runs two steps of each tried length, in a new process.

    python -m tools.bench longest --cases 0.6b,1.7b --minutes 8

A case is a shape of tools/bench/steps/case.py.  The search begins at the length that sft/estimate/memory.py predicts;
`ratio` is the found length / the predicted length.  If no length is predicted to fit, the benchmark offloads as much of
the optimizer as host memory can hold.  --mix sets the lengths of documents: `one` needs as much memory as `1k`, but
takes far longer.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

from tools.bench.harness import DONE, Column, Option, Row, Subject
from tools.bench.step import bars
from tools.bench.steps.case import SHAPES, StepCase
from tools.bench.steps.process import HOST, OPTIONS, measured, memory_of, validate

CUDA_CONTEXT = 2**30  # bytes of memory that CUDA itself uses
FIRST = 0.05  # distance between the first two tries / predicted length; each further distance is twice as large
TOLERANCE = 0.02  # the search ends if the lengths that fit and do not fit are this close, relative to their size
TRIES = 12


@dataclass
class Search:
    """The state of the search for one model."""

    predicted: int
    fits: int = 0  # longest tried length that fits, in tokens; 0: none
    fails: int | None = None  # shortest tried length that does not fit
    tried: list[tuple[int, bool]] = field(default_factory=list)
    stopped: str | None = None  # why the search ended early

    @property
    def ratio(self) -> float | None:
        """Found length / predicted length; None if no length is predicted to fit."""
        return self.fits / self.predicted if self.predicted else None


class Stopped(Exception):
    """A try ended for another reason than a lack of memory."""


def search(predicted: int, fits: Callable[[int], bool], grain: int) -> Search:
    """The longest multiple of `grain` that fits, to within TOLERANCE.

    fits  whether a step of this many tokens fits; raises Stopped if that remains unknown
    """
    state, step = Search(predicted=predicted), FIRST
    length = _whole(predicted, grain)
    while len(state.tried) < TRIES:
        try:
            is_fitting = fits(length)
        except Stopped as error:
            state.stopped = str(error)
            return state
        state.tried.append((length, is_fitting))
        if is_fitting:
            state.fits = length  # every try lies between `fits` and `fails`
        else:
            state.fails = length
        if state.fails is not None and state.fails - state.fits <= max(grain, TOLERANCE * state.fits):
            return state
        length, step = _next(state, step, grain)
    state.stopped = f"{TRIES} tries"
    return state


def _next(state: Search, step: float, grain: int) -> tuple[int, float]:
    """The next length: longer while all tries fit, shorter while none fits, then the middle of the interval."""
    if state.fails is None:
        return _whole(max(state.fits * (1 + step), state.fits + grain), grain), 2 * step
    if not state.fits:
        return _whole(state.fails * max(0.1, 1 - step), grain), 2 * step
    return _whole((state.fits + state.fails) / 2, grain), step


def _whole(length: float, grain: int) -> int:
    return max(grain, int(length) // grain * grain)


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
    """The case and its predicted longest context.  Offloads the optimizer if no length fits otherwise."""
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
        raise ValueError("on a CPU, --memory must set the limit of the search")


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("fits", "tokens fit", ","),
        Column("fails", "tokens do not fit", ","),
        Column("predicted", "predicted", ","),
        Column("ratio", "ratio", ".3f"),
    ],
    cases=["0.6b", "1.7b", "4b", "8b"],
    tiny_cases=["tiny"],
    read=read,
    options={
        **OPTIONS,
        "memory": Option(None, 0.01, "memory limit of the search in GiB; required on a CPU", read=float),
        "keys": Option("full", help="memory-saving keys, such as full+offload"),
        "mix": Option("1k", help="mix of document lengths"),
    },
    validate=more_checks,
    bars=bars,
    device="gpu",
)
