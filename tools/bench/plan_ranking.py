"""Ranking of layouts by predicted step time, compared with measured steps, after a calibration on the same ranks.

    python -m tools.bench plan_ranking --check                both networks: as it is, and 400mbit, which needs root
    python -m tools.bench plan_ranking --cases none --json rows.jsonl
    python -m tools.bench plan_ranking --tiny                 sizes that say nothing about time

A case is a network: `none` is the loopback as it is, and a rate of tc(8), such as 400mbit, is that of a loopback in a
network namespace (tools/shaped_loopback.sh).  Two ranks, each pinned to a core of its own, first calibrate as `sft plan
--calibrate` does.  Then they take steps of every way, a layout with settings, in turns.  A row compares the median of a
way's steps with the prediction of sft/estimate/step_time.py from the measured constants.  No step of a way is used for
the constants.

The bars: Kendall's tau between predicted and measured times of all ways, and over a limited network the share of ways
whose prediction is within 20%.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from sft.estimate.constants import read
from sft.estimate.lengths import Lengths
from sft.estimate.step_time import step_time
from tools.bench.harness import Option, Refused, Subject
from tools.bench.plan_ranking_settings import Setting, Work
from tools.bench.results import Bar, Column, Row

ROOT = Path(__file__).resolve().parents[2]
UNLIMITED = "none"
WAYS = (
    *("tp2:512:none", "tp2:2048:none", "tp2:2048:full"),
    *("cp2:512:none", "cp2:2048:none", "cp2:2048:full", "cp2:2048:none:short"),
    *("pp2:512:none", "pp2:2048:none", "pp2:1024:full"),
    *("dp2:512:none", "dp2:2048:selective", "dp2:2048:full", "dp2:1024:none:wide"),
    *("dp2:1024:none:experts", "ep2:1024:none:experts", "ep2:1024:full:experts", "tp2:1024:selective:wide"),
)
TINY_WAYS = ("tp2:512:none", "ep2:1024:none:experts")
MIN_TAU, CLOSE, MIN_CLOSE = 0.6, 0.2, 2 / 3  # CLOSE: |predicted / measured - 1|


def measured(work: Work, network: str) -> dict[str, Any]:
    """What `plan_ranking_rank.turns` returns, over this network."""
    shaped = [] if network == UNLIMITED else ["bash", str(ROOT / "tools" / "shaped_loopback.sh"), network]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory(prefix="bench-plan-ranking-") as folder:
        result = Path(folder) / "rows.json"
        command = [*shaped, sys.executable, "-m", "tools.bench.plan_ranking_rank", work.json(), str(result)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        if process.returncode:
            raise Refused(process.stderr.strip()[-4000:])
        (row,) = json.loads(result.read_text(encoding="utf-8"))
    return dict(row)


def measure(network: str, options: argparse.Namespace) -> Iterator[Row]:
    sizes = {name: getattr(options, name) for name in ("hidden", "layers", "tokens", "rounds", "steps", "tiny")}
    ways = options.ways if not options.tiny else [way for way in options.ways if way in TINY_WAYS]
    work = Work(settings=ways, **sizes)
    yield from rows_of(work, measured(work, network))


def rows_of(work: Work, measurement: dict[str, Any]) -> Iterator[Row]:
    """One row for each way.  The first one also has the constants and the errors of the short steps."""
    with tempfile.TemporaryDirectory(prefix="bench-plan-ranking-") as folder:
        file = Path(folder) / "cpu.json"
        file.write_text(json.dumps(measurement["constants"]), encoding="utf-8")
        constants = read(file)
    facts = {name: measurement[name] for name in ("constants", "errors")}
    for way, seconds in measurement["seconds"].items():
        setting = Setting.read(way)
        config, lengths = work.config(setting), Lengths.all_of(setting.document)
        predicted = step_time(config, work.layout(setting), config.model.vocab_size or 0, lengths, constants)
        real_s = median(seconds)
        yield {
            "way": way, "measured_s": real_s, "predicted_s": predicted.step_s, "ratio": predicted.step_s / real_s,
            "least_s": min(seconds), "most_s": max(seconds), "parts": predicted.parts, **facts,
        }  # fmt: skip
        facts = {}


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """(pairs in the same order - pairs in the opposite order) / pairs.  1 2 3 and 10 30 20 -> 1/3"""
    signs = [(a > b) - (a < b) for a, b in combinations(first, 2)]
    others = [(a > b) - (a < b) for a, b in combinations(second, 2)]
    return sum(a * b for a, b in zip(signs, others, strict=True)) / len(signs)


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    for network in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == network]
        tau = kendall_tau([row["predicted_s"] for row in own], [row["measured_s"] for row in own])
        name = f"{network}, Kendall's tau of {len(own)} layouts"
        yield Bar(name=name, value=tau, bound=MIN_TAU, relation="at least")
        if network != UNLIMITED:
            close = sum(abs(row["ratio"] - 1) <= CLOSE for row in own) / len(own)
            name = f"{network}, share of layouts predicted within {CLOSE:.0%}"
            yield Bar(name=name, value=close, bound=MIN_CLOSE, relation="at least")


def validate(options: argparse.Namespace) -> None:
    if min(options.layers, options.rounds, options.steps) < 1 or options.hidden % 128 or options.tokens % 4096:
        raise ValueError(
            "--layers, --rounds and --steps must be at least 1, --hidden a multiple of 128, --tokens of 4096"
        )


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("measured_s", "measured s", ".3f"),
        Column("predicted_s", "predicted", ".3f"),
        Column("ratio", "ratio", ".2f"),
        Column("least_s", "min", ".3f"),
        Column("most_s", "max", ".3f"),
    ],
    cases=[UNLIMITED, "400mbit"],
    tiny_cases=[UNLIMITED],
    read=str,
    ways=WAYS,
    options={
        "hidden": Option(256, 128, "width of the model, with a query head per 32"),
        "layers": Option(4, 2, "layers"),
        "tokens": Option(4096, help="tokens of a step"),
        "rounds": Option(3, 1, "times that each way takes its steps"),
        "steps": Option(2, 1, "timed steps of a way in a round"),
    },
    validate=validate,
    bars=bars,
)
