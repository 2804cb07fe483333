"""The longest document that plain transformers can train on, in code that a user writes without a trainer.

    python -m tools.bench peer --cases 1.7b,4b --minutes 7

Not yet run on a GPU.  A case is a shape of tools/bench/steps/case.py.  128K tokens are tried first, then 64K, 32K and
16K, until one fits.  `python -m tools.bench step --help` explains the columns, and
tools/bench/steps/transformers_peer.py holds the code.
"""

import argparse
from collections.abc import Iterator

from tools.bench.harness import Subject
from tools.bench.longest import read
from tools.bench.results import Row
from tools.bench.steps.case import StepCase
from tools.bench.steps.options import OPTIONS, STEP_COLUMNS, validate
from tools.bench.steps.process import measured

LENGTHS = (131_072, 65_536, 32_768, 16_384)


def measure(shape: str, options: argparse.Namespace) -> Iterator[Row]:
    for length in [256] if options.tiny else LENGTHS:
        case = StepCase(shape=shape, length=length, mix="one", recompute="peer")
        row = measured(case, options)
        yield {**row, "way": f"{length:,} tokens"}
        if not row["status"].startswith("out of memory"):
            return


SUBJECT = Subject(
    measure=measure,
    columns=STEP_COLUMNS,
    cases=["1.7b", "4b"],
    tiny_cases=["tiny"],
    read=read,
    options=OPTIONS,
    validate=validate,
    device="gpu",
)
