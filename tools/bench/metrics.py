"""Cost of the metrics of a step: their share of the time of a step of the demo's model, and bytes that a rank sends.

A case is the number of chats in a pack of 12,288 tokens.  Steps and the accumulation of the metrics of the same
microbatch are measured in turns, in one process.  Times are medians.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from sft.batch import Microbatch, Sample
from sft.config import Config
from sft.data.packing.pack import local_part, make_pack
from sft.mcore import device, process_groups
from sft.mcore.engine import Engine
from sft.mcore.initial_weights import initialise
from sft.metrics.accumulator import Accumulator, SupervisedTokens
from sft.parallel.layout import Layout
from sft.recipe.load import load_recipe
from tools.bench.clock import medians, wall
from tools.bench.counter import Counter
from tools.bench.harness import Option, Subject
from tools.bench.results import Bar, Column, Row

SHARE_BAR = 0.01  # share of the time of a step
BYTES_BAR = 64 << 10
NUMBER_BYTES = 8  # per document: a float64
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "demo.yaml"


def microbatch(config: Config, num_documents: int) -> Microbatch:
    """A pack of random chats; the last 40% of each chat are supervised."""
    rng = np.random.default_rng(0)
    multiple = config.data.doc_multiple
    length = config.data.seq_length // num_documents - multiple
    samples = [
        Sample(
            sample_id=i,
            tokens=rng.integers(0, 256, size=length, dtype=np.int32),
            weights=(np.arange(length) >= 0.6 * length).astype(np.float32),
        )
        for i in range(num_documents)
    ]
    pack = make_pack(samples, doc_multiple=multiple, pad_id=0)
    return local_part(pack, np.arange(len(pack.tokens)), cp_size=1, doc_multiple=multiple)


def accumulate(accumulator: Accumulator, mb: Microbatch) -> None:
    """All work that a step does for metrics after the pipeline schedule has ended."""
    nll, buckets = np.ones(mb.num_tokens), accumulator.buckets(mb)
    tokens = SupervisedTokens(objective=1.0, denominator=1.0, nll=nll, entropy=None, correct=nll, buckets=buckets)
    accumulator.totals([mb], [tokens])


def measure(num_documents: int, options: argparse.Namespace) -> Iterator[Row]:
    overrides = ["parallel.cp=1", "run.device=cpu", f"data.seq_length={options.tokens}"]
    config = load_recipe(str(RECIPE), overrides).config
    layout = Layout.resolve(config, 1)
    groups = process_groups.start(layout, device.start("cpu"), seed=1, timeout_s=60)
    try:
        engine = Engine(config, layout, groups, vocab_size=259, num_steps=100)
        initialise(engine)
        mb = microbatch(config, num_documents)
        accumulator = engine._accumulator(("train",))
        calls = {"step": lambda: engine.train_step([mb]), "metrics": lambda: accumulate(accumulator, mb)}
        seconds = medians(calls, repeats=options.repeats, clock=wall)
        with Counter(storages=False) as counter:
            accumulate(accumulator, mb)
    finally:
        process_groups.stop()
    yield {
        "step_s": seconds["step"],
        "metrics_s": seconds["metrics"],
        "share": seconds["metrics"] / seconds["step"],
        "bytes_sent": counter.bytes_sent + NUMBER_BYTES * len(mb.lengths),  # second term: the all-reduce over cp
    }


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    for row in rows:
        name = f"{row['case']} chats"
        yield Bar(name=f"{name}, share of the step's time", value=row["share"], bound=SHARE_BAR)
        yield Bar(name=f"{name}, bytes that a rank sends", value=row["bytes_sent"], bound=BYTES_BAR)


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("step_s", "step ms", ".1f", 1e-3),
        Column("metrics_s", "metrics ms", ".3f", 1e-3),
        Column("share", "share", ".3%"),
        Column("bytes_sent", "bytes sent, cp above 1", ","),
    ],
    cases=["12", "300"],
    tiny_cases=["3"],
    read=int,
    options={
        "tokens": Option(12_288, 512, "tokens of the pack"),
        "repeats": Option(7, 1, "timed repetitions"),
    },
    bars=bars,
)
