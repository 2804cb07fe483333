"""The bars of a training step on one GPU, for rows of the subjects `step`, `trades` and `longest`.

    python -m tools.bench step --check                          apply the bars to the rows of this run
    python -m tools.bench step --judge rows.jsonl more.jsonl    apply the bars to the rows of several runs together

Only rows that were measured on a GPU count.  If several rows belong to a bar, the bar uses the best row, except for
the bar of activation offload, which uses the worst pair of rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tools.bench.mixes import short
from tools.bench.results import DONE, Bar, Row
from tools.bench.steps.case import StepCase

ROOFLINE, MFU, PACKED, LONGEST, OFFLOAD = 0.85, 0.42, 2.0, 0.95, 1.03
MODELS, ALL_MODELS = ("1.7b", "4b"), ("0.6b", "1.7b", "4b", "8b")
LONG = 65_536  # tokens; from this length on, computation must hide activation offload

Steps = Sequence[tuple[StepCase, Mapping[str, Any]]]


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """All bars; a bar without rows has the value None."""
    rows = [row for row in rows if row.get("device") == "cuda" and row.get("status") == DONE]
    steps = [(StepCase.read(row["step"]), row) for row in rows if "step" in row and ":peer" not in row["step"]]
    steps = [(case, row) for case, row in steps if not case.lora]
    yield from _rates(steps)
    yield _packed(steps)
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
    """Real tokens per second of chats: packed / padded."""
    rates = {c: row["tokens_per_s"] for c, row in steps}
    ratios = [
        rate / rates[padded]
        for c, rate in rates.items()
        if c.mix == "chat" and (padded := replace(c, mix="padded")) in rates
    ]
    name = "chat, tokens per second packed / padded"
    return Bar(name=name, value=max(ratios, default=None), bound=PACKED, relation="at least")


def _offload(steps: Steps) -> Iterator[Bar]:
    """Seconds of a step with activation offload / seconds without it: the largest ratio of a shape."""
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
