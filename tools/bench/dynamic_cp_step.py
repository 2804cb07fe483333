"""Wall time of training steps with dynamic CP, compared with fixed CP, where communication takes time.

    python -m tools.bench dynamic_cp_step --check       as root: 2 and 4 ranks on gloo, at three rates of the loopback
    python -m tools.bench dynamic_cp_step --cases 2:1   2 ranks, communication as long as computation
    python -m tools.bench dynamic_cp_step --tiny        the loopback as it is; needs no root

A case is RANKS:SHARE.  The ranks are processes in a network namespace whose loopback tools/shaped_loopback.sh limits to
a rate, which all ranks share.  SHARE is the time that communication adds to a step with fixed CP, divided by the time
of this step at SHARE 0, where the rate has no limit.  The rate is calculated from two short measurements, without a
limit and with one; the column `share` is what was then measured, and it must not exceed SHARE by more than 15%.

Both recipes have parallel.cp = RANKS and the same model, weights and global batches of chats, among which 6% are long
and hold 44% of the tokens.  Steps take turns in the same processes.  `ratio` is the median over pairs
of steps of dynamic / fixed.  The recipe's bandwidths and log.peak_tflops are what the ranks measured before.

`K/V` are bytes of keys, values and their gradients that collectives sent in a step, and `planned` what
sft/data/packing/cp_prediction.py predicts.  `loopback` is dynamic / fixed of all bytes on the loopback, gradients of
weights too.  `predicted` is dynamic / fixed of the predicted time.  `at cp 1` is the share of tokens in packs of one
rank.

With more ranks than cores, ranks share cores: one that waits leaves its share to the others, so the times show less of
an unequal division of work than separate machines would.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from tools.bench.dynamic_cp_rank import DYNAMIC, FIXED, Work
from tools.bench.harness import Option, Refused, Subject
from tools.bench.results import Bar, Column, Row

ROOT = Path(__file__).resolve().parents[2]
SHAPED_LOOPBACK = ROOT / "tools" / "shaped_loopback.sh"
RATIOS = {0.0: 1.02, 1.0: 0.80, 2.0: 0.70}  # bars by SHARE
TOO_SLOW = 1.15  # of the measured share / SHARE; a slower network would flatter dynamic CP


class Case(NamedTuple):
    num_ranks: int
    share: float

    @staticmethod
    def read(text: str) -> "Case":
        """`4:1` -> Case(4, 1.0).  Raises ValueError."""
        num_ranks, separator, share = text.partition(":")
        if not separator or not num_ranks.isdecimal() or int(num_ranks) < 2 or float(share) < 0:
            raise ValueError(f"{text} is not RANKS:SHARE with at least 2 ranks, such as 4:1")
        return Case(int(num_ranks), float(share))


class Link(NamedTuple):
    """Of a step with fixed CP: seconds without a limit, bytes on the loopback, and seconds that hide communication."""

    seconds: float
    num_bytes: float
    hidden_s: float
    tflops: float

    def rate(self, share: float) -> int:
        """Bits per second at which communication adds share * seconds."""
        return round(8 * self.num_bytes / (share * self.seconds + self.hidden_s))


@cache
def measured(work: Work, rate: str | None) -> Mapping[str, Any]:
    """What `dynamic_cp_rank.turns` returns, over a loopback of this rate; None: the loopback as it is."""
    shaped = [] if rate is None else ["bash", str(SHAPED_LOOPBACK), rate]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory(prefix="bench-dynamic-cp-") as folder:
        result = Path(folder) / "rows.json"
        command = [*shaped, sys.executable, "-m", "tools.bench.dynamic_cp_rank", json.dumps(asdict(work)), str(result)]
        process = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, cwd=ROOT, capture_output=True, text=True
        )
        if process.returncode:
            raise Refused(process.stderr.strip()[-4000:])
        (row,) = json.loads(result.read_text(encoding="utf-8"))
    return dict(row)


@cache
def link_of(work: Work) -> Link:
    """Measured without a limit, and at the rate at which all bytes would take as long as the step."""
    free = measured(work, "none")
    seconds, num_bytes = step_seconds(free, FIXED), mean(fact["loopback"] for fact in free["facts"][FIXED])
    without = Link(seconds, num_bytes, 0.0, free["tflops"])
    limited = measured(replace(work, rounds=1, tflops=free["tflops"]), f"{without.rate(1.0)}bit")
    added = step_seconds(limited, FIXED) - seconds
    return without._replace(hidden_s=max(0.0, seconds - added))


def step_seconds(row: Mapping[str, Any], side: str) -> float:
    """The mean over batches of the median over rounds."""
    seconds, num_batches = row["seconds"][side], len(row["facts"][side])
    return mean(median(seconds[batch::num_batches]) for batch in range(num_batches))


def measure(case: Case, options: argparse.Namespace) -> Iterator[Row]:
    sizes = {name: getattr(options, name) for name in ("hidden", "layers", "seq_length", "packs", "batches", "rounds")}
    work = Work(num_ranks=case.num_ranks, **sizes)
    if options.tiny:
        yield row_of(measured(work, None), step_seconds(measured(work, None), FIXED))
    elif not case.share:
        yield row_of(measured(work, "none"), step_seconds(measured(work, "none"), FIXED))
    else:
        link = link_of(work)
        rate = link.rate(case.share)
        row = row_of(measured(replace(work, tflops=link.tflops), f"{rate}bit"), link.seconds)
        yield {**row, "rate": rate, "wanted_share": case.share}


def row_of(measurement: Mapping[str, Any], unlimited_s: float) -> Row:
    """unlimited_s: seconds of a step with fixed CP without a limit"""
    seconds, facts = measurement["seconds"], measurement["facts"]
    pairs = [dynamic / fixed for fixed, dynamic in zip(seconds[FIXED], seconds[DYNAMIC], strict=True)]
    totals = {
        (side, name): sum(fact[name] for fact in facts[side]) for side in facts for name in ("sent", "loopback")
    } | {
        (side, name): sum(fact["plan"][name] for fact in facts[side])
        for side in facts
        for name in ("num_bytes", "makespan_ns")
    }
    num_batches = len(facts[FIXED])
    return {
        "fixed_s": step_seconds(measurement, FIXED),
        "dynamic_s": step_seconds(measurement, DYNAMIC),
        "ratio": median(pairs), "ratio_min": min(pairs), "ratio_max": max(pairs),
        "share": step_seconds(measurement, FIXED) / unlimited_s - 1,
        "fixed_bytes": totals[FIXED, "sent"] / num_batches,
        "dynamic_bytes": totals[DYNAMIC, "sent"] / num_batches,
        "planned_bytes": totals[DYNAMIC, "num_bytes"] / num_batches,
        "unplanned_bytes": sum(abs(f["sent"] - f["plan"]["num_bytes"]) for side in facts for f in facts[side]),
        "loopback_ratio": totals[DYNAMIC, "loopback"] / totals[FIXED, "loopback"],
        "predicted": totals[DYNAMIC, "makespan_ns"] / totals[FIXED, "makespan_ns"],
        "alone": mean(fact["plan"]["share_of_tokens"].get("1", 0.0) for fact in facts[DYNAMIC]),
        "gb_s": measurement["gb_s"], "tflops": measurement["tflops"], "seconds": seconds,
    }  # fmt: skip


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    for row in rows:
        case, share = row["case"], row.get("wanted_share", 0.0)
        name = f"{case}, seconds of a step, dynamic / fixed"
        if share in RATIOS:
            yield Bar(name=name, value=row["ratio"], bound=RATIOS[share])
        if share:
            yield Bar(name=f"{case}, measured share / SHARE", value=row["share"] / share, bound=TOO_SLOW)
        unplanned = row["unplanned_bytes"]
        yield Bar(name=f"{case}, K/V bytes beside the plan", value=unplanned, bound=0, relation="exactly")


def validate(options: argparse.Namespace) -> None:
    if min(options.layers, options.packs, options.batches, options.rounds) < 1 or options.hidden % 32:
        raise ValueError("--layers, --packs, --batches and --rounds must be at least 1, and --hidden a multiple of 32")


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("rate", "Mbit/s", ",.0f", 1e6),
        Column("share", "share", ".2f"),
        Column("fixed_s", "fixed s", ".2f"),
        Column("dynamic_s", "dynamic s", ".2f"),
        Column("ratio", "ratio", ".3f"),
        Column("ratio_min", "min", ".3f"),
        Column("ratio_max", "max", ".3f"),
        Column("predicted", "predicted", ".3f"),
        Column("fixed_bytes", "fixed K/V MiB", ",.1f", 2**20),
        Column("dynamic_bytes", "dynamic K/V", ",.1f", 2**20),
        Column("planned_bytes", "planned", ",.1f", 2**20),
        Column("loopback_ratio", "loopback", ".3f"),
        Column("alone", "at cp 1", ".0%"),
    ],
    cases=["2:0", "2:1", "2:2", "4:0", "4:1", "4:2"],
    tiny_cases=["2:0"],
    read=Case.read,
    options={
        "hidden": Option(256, 64, "width of the model, with a key and value head per 32"),
        "layers": Option(1, help="layers"),
        "seq_length": Option(8192, 1024, "longest document and pack"),
        "packs": Option(3, 2, "packs of a global batch"),
        "batches": Option(3, 2, "global batches"),
        "rounds": Option(4, 1, "times that each batch is timed with each recipe"),
    },
    validate=validate,
    bars=bars,
)
