"""Measures the questions of `sft eval --long` on a CPU, compared with a plain evaluation of the same tokens.

    python -m tools.bench long_questions --check

A case is the longest of five lengths of questions.  The plain way evaluates all questions as one held-out set, in packs
of this length.  Both ways take turns, and times are medians of CPU time.  GFLOPs are those of matrix products.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from sft.console import QUIET
from sft.data.cache.corpus import Corpus
from sft.data.cache.store import open_store
from sft.data.chat.tokenizer import ByteTokenizer
from sft.data.loader import Loader, make_loader
from sft.data.long.suite import Suite, SuiteSettings, make_suites
from sft.mcore import device as devices
from sft.mcore import process_groups
from sft.mcore.engine import Engine
from sft.parallel.layout import Layout
from sft.run.evaluation import evaluate
from sft.run.long_evaluation import score_suite
from tools.bench.clock import cpu_time, medians
from tools.bench.harness import Bar, Column, Option, Row, Subject
from tools.bench.mixes import read_length
from tools.bench.recompute import Flops
from tools.bench.steps.case import StepCase
from tools.bench.steps.trainer import engine_of

TASKS = ("needle", "counting", "code", "records")
LENGTHS = 5  # each twice the one before, as the default of data.long.lengths
JUDGED, MOST = "5k", 1.05  # largest ratio of times


def measure(case: int, options: argparse.Namespace) -> Iterator[Row]:
    step = StepCase(shape="tiny", length=case, mix="one")
    config = step.config("cpu", also=options.set)
    layout = Layout.resolve(config, 1)
    groups = process_groups.start(layout, devices.start("cpu"), seed=config.run.seed, timeout_s=300)
    engine = engine_of(step, config, layout, groups)
    lengths = tuple(case >> (LENGTHS - 1 - i) for i in range(LENGTHS))
    settings = SuiteSettings(tasks=TASKS, lengths=lengths, depths=(0.0, 1.0), questions=options.questions, seed=0)
    with TemporaryDirectory() as folder:
        suites = make_suites(settings, ByteTokenizer(), Path(folder), QUIET, 1)
        plain = _plain(engine, suites)
        calls: dict[str, Callable[[], Any]] = {
            "questions": partial(_ask, engine, suites),
            "plain": partial(evaluate, engine, plain),
        }
        flops, passes = {}, {}
        for way, call in calls.items():
            with Flops() as counter:
                passes[way] = _passes(engine, call)
            flops[way] = counter.total
        seconds = medians(calls, repeats=options.repeats, clock=cpu_time)
    process_groups.stop()
    for way in calls:
        yield {
            "way": way, "questions": sum(len(suite.facts) for suite in suites),
            "tokens": sum(int(suite.corpus.lengths.sum()) for suite in suites), "passes": passes[way],
            "flops": flops[way], "seconds": seconds[way],
            "flops_ratio": flops[way] / flops["plain"], "time_ratio": seconds[way] / seconds["plain"],
        }  # fmt: skip


def _plain(engine: Engine, suites: Sequence[Suite]) -> Loader:
    """All questions as a held-out set, in packs of the longest length."""
    folders = [Path(str(file)) for suite in suites for file in suite.corpus.files]
    stores = [store for folder in folders if (store := open_store(folder)) is not None]
    corpus = Corpus(folders, stores)
    return make_loader(engine.config, engine.layout, corpus, pad_id=0, dp_rank=0, cp_rank=0, is_held_out=True)


def _ask(engine: Engine, suites: Sequence[Suite]) -> None:
    for suite in suites:
        assert score_suite(engine, suite, 0) is not None


def _passes(engine: Engine, call: Callable[[], Any]) -> int:
    """The number of microbatches that the model reads in a call."""
    with mock.patch.object(engine, "measure", side_effect=engine.measure) as calls:
        call()
    return sum(len(arguments.args[0]) for arguments in calls.call_args_list)


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    asked = [row for row in rows if row["case"] == JUDGED and row.get("way") == "questions"]
    for key, name in (("flops_ratio", "FLOPs"), ("time_ratio", "CPU time")):
        value = asked[0][key] if asked else None
        yield Bar(name=f"{JUDGED}, questions over a plain evaluation: {name}", value=value, bound=MOST)


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("questions", "questions", ","),
        Column("tokens", "tokens", ","),
        Column("passes", "passes", ","),
        Column("flops", "GFLOPs", ",.2f", 1e9),
        Column("seconds", "s", ".2f"),
        Column("flops_ratio", "FLOPs ratio", ".3f"),
        Column("time_ratio", "time", ".3f"),
    ],
    cases=[JUDGED],
    tiny_cases=["1k"],
    read=read_length,
    options={
        "set": Option([], help="KEY=VALUE of the recipe"),
        "questions": Option(5, 1, "questions of each task, length and depth"),
        "repeats": Option(3, 1, "timed repetitions"),
    },
    bars=bars,
)
