"""Computes the bars of all steps: a measured value, and the bound that the documentation names.

Bounds of benchmarks are those of tools/bench; docs/numbers/performance.md lists them.  A bar without a measurement has
the value None.
"""

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from tools.bench.harness import DONE, Bar, Row
from tools.gpu_hour import curves
from tools.gpu_hour.step import Result

# Allocated memory / estimated memory, as in tests/standin/test_steps.py.  Above the upper bound, a run that fits by the
# estimate may run out of memory.  Below the lower bound, the estimate refuses a context that would fit.
MOST_ABOVE, MOST_BELOW = 1.02, 0.94
RESERVED = 1.05  # reserved / allocated memory; above it, torch's allocator loses too much between its blocks
PROBES = ("probe-data", "probe-leak", "probe-parity")
KINDS = ("kinds", "recurrences", "more-kinds")
STEPS = ("memory", "steps", "recompute", "offload", "longest")  # the bars of training steps use the rows of all
SPEEDS = ("speed-tp2-cp4", "speed-cp8", "speed-cp8-a2a-p2p", "speed-dp8")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The measurements of a step.

    result  None while the step has not ended
    tests   the XML text of pytest's JUnit report; empty for steps without tests
    """

    result: Result | None = None
    rows: Sequence[Row] = ()
    tests: str = ""

    @property
    def all_rows(self) -> list[Row]:
        """The rows of all cases, also of those that were not measured."""
        return [row for row in self.rows if "header" not in row]

    @property
    def measured(self) -> list[Row]:
        return [row for row in self.all_rows if row.get("status", DONE) == DONE]


Outcomes = Mapping[str, Outcome]


def probes(outcomes: Outcomes) -> Iterator[Bar]:
    for name in PROBES:
        result = outcomes[name].result
        yield Bar(name=f"{name}, exit code", value=result.exit_code if result else None, bound=0, relation="exactly")


def tests(outcomes: Outcomes) -> Iterator[Bar]:
    """The number of failed tests; None if all were skipped or none ran."""
    text = outcomes["tests"].tests
    suite = next(ElementTree.fromstring(text).iter("testsuite")).attrib if text else {}
    total, skipped, failed = (
        sum(int(suite.get(key, 0)) for key in keys) for keys in (("tests",), ("skipped",), ("failures", "errors"))
    )
    value = failed if total > skipped else None
    yield Bar(name=f"tests of GPUs that failed, of {total - skipped}", value=value, bound=0, relation="exactly")


def memory(outcomes: Outcomes) -> Iterator[Bar]:
    """Bars of every measured training step: allocated / estimated memory, and reserved / allocated memory."""
    for name in (*STEPS, *SPEEDS):
        for row in outcomes[name].measured:
            if row.get("peak_bytes") and row.get("by_equations"):
                title = f"{row['case']}, allocated over estimated memory"
                ratio = row["peak_bytes"] / row["by_equations"]
                yield Bar(name=title, value=ratio, bound=MOST_ABOVE)
                yield Bar(name=title, value=ratio, bound=MOST_BELOW, relation="at least")
            if row.get("peak_bytes") and row.get("reserved_bytes"):
                ratio = row["reserved_bytes"] / row["peak_bytes"]
                yield Bar(name=f"{row['case']}, reserved over allocated memory", value=ratio, bound=RESERVED)


def of_bench(module: str, *steps: str, also_unmeasured: bool = False) -> Callable[[Outcomes], Iterator[Bar]]:
    """A function that returns the bars of a module of tools/bench for the rows of these steps.

    also_unmeasured: whether rows of cases that were not measured are included
    The function imports the module when it is called, because the import takes seconds.
    """

    def judge(outcomes: Outcomes) -> Iterator[Bar]:
        rows = [row for n in steps for row in (outcomes[n].all_rows if also_unmeasured else outcomes[n].measured)]
        yield from importlib.import_module(f"tools.bench.{module}").bars(rows)

    return judge


GROUPS: Sequence[tuple[str, Callable[[Outcomes], Iterator[Bar]]]] = (
    ("Documents do not leak, layouts agree", probes),
    ("Tests of GPUs", tests),
    ("One curve on every layout", lambda outcomes: curves.bars(outcomes["layouts"].measured)),
    (
        "Every kind of layer beside full precision",
        lambda outcomes: curves.bars([row for name in KINDS for row in outcomes[name].all_rows]),
    ),
    ("Transformer Engine beside portable", lambda outcomes: curves.bars(outcomes["backends"].measured)),
    ("Deterministic runs", lambda outcomes: curves.deterministic_bars(outcomes["deterministic"].measured)),
    ("Kernels of attention beside float64", of_bench("kernels", "kernels", also_unmeasured=True)),
    ("Memory", memory),
    ("Loss head", of_bench("loss_head", "loss-head")),
)
OF_TIMES = (  # groups with bars of times, which mean nothing at toy sizes
    ("Training steps", of_bench("step", *STEPS)),  # roofline, MFU, packing, offload, longest context
    ("Checkpoints", of_bench("checkpoint", "checkpoint")),
)


def judged(outcomes: Outcomes, *, tiny: bool = False) -> list[tuple[str, list[Bar]]]:
    """The title and the bars of every group.

    A group without rows, or with rows that cannot be judged, has one bar without a value.
    """
    by_step = defaultdict(Outcome, outcomes)  # a run with one GPU has no outcomes of the steps that need eight
    groups = []
    for title, judge in (*GROUPS, *(() if tiny else OF_TIMES)):
        try:
            group = list(judge(by_step)) or [Bar(name="no rows, see Steps", value=None, bound=0)]
        except Exception as error:  # rows of a killed step may be incomplete, and the report must be written
            group = [Bar(name=f"cannot be judged: {type(error).__name__}: {error}", value=None, bound=0)]
        groups.append((title, group))
    return groups
