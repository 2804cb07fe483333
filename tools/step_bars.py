"""The bars of a training step on one GPU, and whether rows that bench_step wrote meet them.

    python -m tools.bench_step --check ...             judges what that run measured
    python -m tools.step_bars rows.jsonl more.jsonl    judges rows of several runs together

Exit status 1 where a bar is missed.  A bar that nothing here says anything about is told as not measured.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.measure import short
from tools.step_choices import Case

ROOFLINE, MFU, PACKED, LONGEST, OFFLOAD = 0.85, 0.42, 2.0, 0.95, 1.03
MODELS, ALL_MODELS = ("1.7b", "4b"), ("0.6b", "1.7b", "4b", "8b")
LONG = 65_536  # tokens from which offloading must hide


@dataclass(frozen=True, kw_only=True)
class Bar:
    name: str
    wanted: float
    found: float | None  # None: not measured
    at_most: bool = False

    @property
    def is_missed(self) -> bool:
        if self.found is None:
            return False
        return not (self.found <= self.wanted if self.at_most else self.found >= self.wanted)

    def __str__(self) -> str:
        """`met         1.7b at 64K, ...: 0.91, at least 0.85`"""
        if self.found is None:
            return f"{'not measured':<14}{self.name}"
        bound = f"{'at most' if self.at_most else 'at least'} {self.wanted:g}"
        return f"{'MISSED' if self.is_missed else 'met':<14}{self.name}: {self.found:.3f}, {bound}"


def judged(rows: Iterable[Mapping[str, Any]]) -> list[Bar]:
    """Every bar.  Only what a GPU measured counts; where several rows tell of a bar, the best of them."""
    rows = [row for row in rows if row.get("device") == "cuda" and row.get("status") == "done"]
    steps = [(Case.read(row["case"]), row) for row in rows if "case" in row and ":peer" not in row["case"]]
    return [*_rates(steps), _packed(steps), *_offload(steps), *_longest(rows)]


def missed(bars: Iterable[Bar]) -> list[Bar]:
    return [bar for bar in bars if bar.is_missed]


Steps = Sequence[tuple[Case, Mapping[str, Any]]]


def _rates(steps: Steps) -> Iterator[Bar]:
    for length, key, wanted, what in (
        (LONG, "of_keep", ROOFLINE, "of the roofline of keep-attention"),
        (2 * LONG, "of_keep", ROOFLINE, "of the roofline of keep-attention"),
        (2 * LONG, "mfu", MFU, "causal MFU"),
    ):
        for shape in MODELS:
            found = [row[key] for c, row in steps if (c.shape, c.length, c.mix) == (shape, length, "one")]
            yield Bar(name=f"{shape} at {short(length)}, {what}", wanted=wanted, found=max(found, default=None))


def _packed(steps: Steps) -> Bar:
    """Real tokens a second of chats, packed over padded."""
    rates = {c: row["tokens_per_s"] for c, row in steps}
    pairs = [
        rate / rates[padded]
        for c, rate in rates.items()
        if c.mix == "chat" and (padded := replace(c, mix="padded")) in rates
    ]
    return Bar(name="chat, packed over padded", wanted=PACKED, found=max(pairs, default=None))


def _offload(steps: Steps) -> Iterator[Bar]:
    """Seconds of a step with activations offloaded over those without: the worst of all pairs of a shape."""
    seconds = {c: row["seconds"] / row["steps"] for c, row in steps}
    for shape in MODELS:
        pairs = [
            taken / seconds[without]
            for c, taken in seconds.items()
            if c.shape == shape and c.offload and c.length >= LONG and (without := replace(c, offload=0.0)) in seconds
        ]
        name = f"{shape} from {short(LONG)} on, time with activations offloaded over without"
        yield Bar(name=name, wanted=OFFLOAD, found=max(pairs, default=None), at_most=True)


def _longest(rows: Sequence[Mapping[str, Any]]) -> Iterator[Bar]:
    for shape in ALL_MODELS:
        found = [row["ratio"] for row in rows if row.get("longest") == shape and row["ratio"] is not None]
        name = f"{shape}, longest context that fits over that of the equations"
        yield Bar(name=name, wanted=LONGEST, found=max(found, default=None))


def told(bars: Sequence[Bar]) -> str:
    return "\n".join(["bars", *(f"  {bar}" for bar in bars)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="what bench_step --out wrote")
    lines = [line for path in parser.parse_args(argv).files for line in path.read_text(encoding="utf-8").splitlines()]
    bars = judged(json.loads(line) for line in lines)
    print(told(bars))
    return 1 if missed(bars) else 0


if __name__ == "__main__":
    sys.exit(main())
