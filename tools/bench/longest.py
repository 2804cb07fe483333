"""The longest context that fits, by trying: each length in a process of its own, two steps.

    python -m tools.bench longest --cases 0.6b,1.7b --minutes 8

Not yet run on a GPU.  A case is a shape of tools/bench/steps/case.py.  The search begins at what the equations
predict; a try that runs out of memory leaves nothing behind for the next.  `ratio` is of that length.  Where by
arithmetic nothing fits, as much of the optimizer as the host takes is offloaded.  Documents of --mix: `one` takes as
much memory as `1k`, and far longer.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

from tools.bench.harness import Option, Subject
from tools.bench.results import DONE, Column, Row
from tools.bench.steps.bars import bars
from tools.bench.steps.case import SHAPES, StepCase
from tools.bench.steps.options import OPTIONS, validate
from tools.bench.steps.process import HOST, measured, memory_of

CUDA_CONTEXT = 2**30  # bytes that CUDA takes for itself
FIRST = 0.05  # of the predicted length: how far the second try is from the first; each further one twice as far
TOLERANCE = 0.02  # between the longest that fits and the shortest that does not
TRIES = 12


@dataclass
class Search:
    """What is known of one model."""

    predicted: int
    fits: int = 0  # tokens, the longest that was tried and fits; 0: none
    fails: int | None = None  # the shortest that does not
    tried: list[tuple[int, bool]] = field(default_factory=list)
    stopped: str | None = None  # why the search ended before it was sure

    @property
    def ratio(self) -> float | None:
        """Of the predicted length; None where nothing is predicted to fit."""
        return self.fits / self.predicted if self.predicted else None


class Stopped(Exception):
    """A try that says nothing about memory."""


def search(predicted: int, fits: Callable[[int], bool], grain: int) -> Search:
    """The longest multiple of `grain` that fits, to within TOLERANCE.

    fits  whether a step of so many tokens fits; Stopped where that cannot be known
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
            state.fits = length  # every try is above what fits, and below what does not
        else:
            state.fails = length
        if state.fails is not None and state.fails - state.fits <= max(grain, TOLERANCE * state.fits):
            return state
        length, step = _next(state, step, grain)
    state.stopped = f"{TRIES} tries"
    return state


def _next(state: Search, step: float, grain: int) -> tuple[int, float]:
    """Further up while all fit, further down while none does, then the middle."""
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
