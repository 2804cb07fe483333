"""The time that each memory-saving recipe key costs: measures the same step with different keys.

    python -m tools.bench trades --cases 1.7b:64k --minutes 9

Not yet run on a GPU.  A case is SHAPE:LENGTH, for a step of one document, or SHAPE:LENGTH+FLAGS, for example
8b:32k+optim1, if all rows of the case have these flags.  `python -m tools.bench step --help` explains the columns.
`ratio` is the time / the time of the first row.  The last row repeats the first; the difference of the two times shows
the error of the measurement.
"""

import argparse
from collections.abc import Iterator

from tools.bench.harness import Option, Subject
from tools.bench.results import DONE, Column, Row
from tools.bench.steps.bars import bars
from tools.bench.steps.case import TILE, StepCase
from tools.bench.steps.options import OPTIONS, STEP_COLUMNS, validate
from tools.bench.steps.process import measured


def read(text: str) -> list[StepCase]:
    """1.7b:64k -> selective, full, selective+offload, ..., selective"""
    shape_and_length, *flags = text.lower().split("+")
    start = StepCase.read(f"{shape_and_length}:one")
    tile = f"tile{min(TILE, start.length // 4)}"
    keys = ["selective", "full", "selective+offload", "full+offload", f"selective+{tile}", "none"]
    keys += [] if any(flag.startswith("optim") for flag in flags) else ["selective+optim1"]
    return [start.using("+".join([key, *flags])) for key in [*keys, "selective"]]


def measure(cases: list[StepCase], options: argparse.Namespace) -> Iterator[Row]:
    first_s: float | None = None
    for case in cases[: options.keys or None]:
        row = measured(case, options)
        if row["status"] == DONE:
            first_s = first_s or row["step_s"]
            row["ratio"] = row["step_s"] / first_s
        yield {**row, "way": case.memory_keys}


SUBJECT = Subject(
    measure=measure,
    columns=[Column("ratio", "ratio", ".3f"), *STEP_COLUMNS],
    cases=["1.7b:64k"],
    tiny_cases=["tiny:256"],
    read=read,
    describe=lambda cases: "\n".join(map(str, cases)),
    options={**OPTIONS, "keys": Option(0, 1, "measure only this many rows of a case; 0: all")},
    validate=validate,
    bars=bars,
    device="gpu",
)
