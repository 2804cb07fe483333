"""Tokens per second that one core converts from memory-mapped files to microbatches.

A case is a mix of lengths (tools/bench/mixes.py).
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from sft.config import DataConfig
from sft.data.cache.corpus import Corpus
from sft.data.cache.encoder import EncodedRows
from sft.data.cache.row_report import LINE
from sft.data.cache.store import open_store, write_store
from sft.data.loader import Loader
from sft.data.packing.pack import Collator
from sft.data.packing.plan import EpochPlans
from sft.parallel.layout import Layout
from tools.bench.clock import cpu_time
from tools.bench.harness import Option, Subject, one_of
from tools.bench.mixes import SEQ_LENGTHS, lengths_of
from tools.bench.results import Bar, Column, Row

MULTIPLE = 32
RATE_BAR = 5e6  # tokens per second and core
NUM_SAMPLES = {"chat": 20_000, "agent": 1000}
LAYOUT = Layout(
    world_size=1, tp=1, cp=1, pp=1, dp=1, virtual_stages=1, sequence_parallel=False, global_batch_size=4,
    num_microbatches=4, doc_multiple=MULTIPLE, pack_multiple=MULTIPLE,
)  # fmt: skip


def corpus_of(folder: Path, lengths: np.ndarray) -> Corpus:
    """A store of samples of these lengths; all their tokens are 1."""
    rows, palette = np.ones(len(lengths), dtype=LINE), np.array([0, 1], dtype=np.float32)
    rows["row"], rows["tokens"] = np.arange(len(lengths)) + 1, lengths
    weights = np.ones(int(lengths.sum()), dtype=np.uint8)
    write_store(folder / "a", [EncodedRows(weights.astype(np.int32), weights, palette, rows, ())], palette)
    store = open_store(folder / "a")
    assert store is not None
    return Corpus([Path("a")], [store])


def measure(mix: str, options: argparse.Namespace) -> Iterator[Row]:
    lengths = lengths_of(mix, NUM_SAMPLES[mix] // options.divisor)
    data = DataConfig(train=["a"], seq_length=SEQ_LENGTHS[mix])
    with tempfile.TemporaryDirectory() as folder:
        corpus = corpus_of(Path(folder), lengths)
        plans = EpochPlans(corpus.lengths, data, seed=0, global_batch_size=LAYOUT.global_batch_size)
        collator = Collator(doc_multiple=data.doc_multiple, pack_multiple=LAYOUT.pack_multiple, pad_id=0)
        loader = Loader(corpus, plans, {1: collator}, LAYOUT, seq_length=data.seq_length, dp_rank=0)
        num_steps = plans.steps_per_epoch(0)  # makes the plan before the clock starts
        counts: list[int] = []
        seconds = cpu_time(
            lambda: counts.extend(mb.num_real_tokens for step in range(num_steps) for mb in loader.microbatches(step))
        )
    yield {"tokens": sum(counts), "tokens_per_s": sum(counts) / seconds}


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    for row in rows:
        name = f"{row['case']}, tokens per second and core"
        yield Bar(name=name, value=row["tokens_per_s"], bound=RATE_BAR, relation="at least")


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("tokens", "tokens", ","),
        Column("tokens_per_s", "million tokens/s/core", ".1f", 1e6),
    ],
    cases=list(NUM_SAMPLES),
    tiny_cases=["chat"],
    read=one_of(*NUM_SAMPLES),
    options={
        "divisor": Option(1, 20, "use 1/N of the samples"),
    },
    bars=bars,
)
