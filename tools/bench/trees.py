"""Compares a trace of an agent as a tree of turns with separate samples: tokens, FLOPs, calls, and time of a step.

    python -m tools.bench trees --check

A case is the number of turns of a synthetic trace: a system message of 3,000 tokens, and turns of 600 tokens of
thinking, 200 of action and 600 of observation.  Each turn is trained in the text that has its own thinking and no
earlier one.  The trees are those that `data.turns: each` stores, and separate samples are packed as without trees, into
packs as long as the tree.

The table counts the tokens of the trace at this size, with padding to multiples of 64, and the calls of a flash kernel
in forward of a layer.  FLOPs and time are those of training steps with a trace whose messages are ten times shorter, on
a dense model of one layer.  In this model, attention has as many FLOPs as everything else at 3,456 tokens; in an 8B
model, at 53,248 tokens.  The dispatcher of torch counts the FLOPs.  Tree and separate samples train in turns, in one
process, and times are medians.  `saved` is the share of tokens that the tree saves / the share that arithmetic on
lengths without padding promises.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from sft.batch import Microbatch, Sample
from sft.data.chat.tree import TreeText, grow
from sft.data.packing.pack import Collator
from sft.data.packing.plan import plan_epoch
from sft.mcore import device as devices
from sft.mcore import process_groups
from sft.mcore.engine import Engine
from sft.parallel.alignment import aligned, pack_multiple
from sft.parallel.layout import Layout
from sft.parallel.rectangles import rectangles
from sft.parallel.shapes import longest
from tools.bench.clock import medians, wall
from tools.bench.harness import Bar, Column, Option, Row, Subject
from tools.bench.recompute import counted
from tools.bench.steps.case import StepCase
from tools.bench.steps.trainer import engine_of

TREE, SEPARATE = "tree", "separate"
MODEL = [
    *("model.num_layers=1", "model.hidden_size=128", "model.ffn_hidden_size=1024", "model.num_attention_heads=2"),
    *("model.num_query_groups=1", "model.head_dim=64"),
]
VOCAB = 512
SHORTER = 10  # lengths of messages at full size / those of the trace that is trained
WHOLE_MULTIPLE, MULTIPLE = 64, 8
JUDGED_TIME = "30"
TOKENS, ATTENTION, TIME = 0.95, 0.9, 0.2


class Trace(NamedTuple):
    """The lengths of the messages of a trace."""

    turns: int
    system: int = 3000
    thinking: int = 600
    action: int = 200
    observation: int = 600

    def shorter(self, factor: int) -> "Trace":
        return Trace(self.turns, *(length // factor for length in self[1:]))

    def texts(self) -> list[TreeText]:
        """The text of each turn, whose thinking and action are supervised.

        Tokens are random.  Thinking and actions begin with different tokens, so that they are different branches.
        """
        rng, half = np.random.default_rng(self.turns), VOCAB // 2
        before, texts = rng.integers(0, VOCAB, self.system), list[TreeText]()
        for _ in range(self.turns):
            thinking, action = rng.integers(half, VOCAB, self.thinking), rng.integers(0, half, self.action)
            tokens = np.concatenate([before, thinking, action]).astype(np.int32)
            texts.append(TreeText(tokens, (np.arange(len(tokens)) >= len(before)).astype(np.float32)))
            before = np.concatenate([before, action, rng.integers(0, VOCAB, self.observation)])
        return texts

    def promised(self) -> dict[str, dict[str, int]]:
        """The number of tokens, and of pairs of a token and an earlier token, in a tree and in separate samples."""
        kept, own = self.action + self.observation, self.thinking + self.action
        depths = [self.system + turn * kept for turn in range(self.turns)]
        squares = [(depth + own) ** 2 for depth in depths]
        return {
            TREE: {
                "tokens": depths[-1] + self.turns * own,
                "pairs": (squares[-1] + sum(s - d * d for s, d in zip(squares[:-1], depths))) // 2,
            },
            SEPARATE: {"tokens": sum(depths) + self.turns * own, "pairs": sum(squares) // 2},
        }


def packs_of(trace: Trace, multiple: int) -> dict[str, list[list[Sample]]]:
    """The samples of each pack, of the tree and of separate samples."""
    texts = trace.texts()
    grown = grow(texts)
    tree = Sample(sample_id=0, tokens=grown.tokens, weights=grown.weights, tree=grown.tree)
    alone = [Sample(sample_id=number, tokens=text.tokens, weights=text.weights) for number, text in enumerate(texts)]
    lengths = np.array([len(sample.tokens) for sample in alone])
    capacity = int(aligned(np.diff(grown.tree.starts), multiple).sum())
    assert capacity >= longest(lengths)
    plan = plan_epoch(lengths, capacity=capacity, doc_multiple=multiple, seed=0, epoch=0, shuffle=False)
    return {TREE: [[tree]], SEPARATE: [[alone[i] for i in plan.pack(k)] for k in range(len(plan))]}


def counts(trace: Trace) -> dict[str, Row]:
    """Tokens without and with padding, and the calls of a flash kernel, of packs at full size."""
    rows = {}
    for way, packs in packs_of(trace, WHOLE_MULTIPLE).items():
        made = [Collator(doc_multiple=WHOLE_MULTIPLE, pad_id=0).pack(samples) for samples in packs]
        calls = [1 + (0 if pack.branches is None else len(rectangles(pack.branches))) for pack in made]
        rows[way] = {
            "tokens": sum(int(pack.lengths.sum()) for pack in made),
            "padded": sum(len(pack.tokens) for pack in made),
            "packs": len(made),
            "calls": sum(calls),
        }
    return rows


def measure(turns: int, options: argparse.Namespace) -> Iterator[Row]:
    whole = Trace(turns).shorter(options.whole)
    trace = whole.shorter(SHORTER)
    step = StepCase(shape="tiny", length=4096, mix="one", recompute="none")
    config = step.config("cpu", multiple=MULTIPLE, also=[*MODEL, *options.set])
    layout = Layout.resolve(config, 1)
    groups = process_groups.start(layout, devices.start("cpu"), seed=config.run.seed, timeout_s=300)
    engine = engine_of(step, config, layout, groups)
    collator = Collator(doc_multiple=MULTIPLE, pad_id=0, pack_multiple=pack_multiple(config, 1))
    steps = {way: list(map(collator.microbatch, packs)) for way, packs in packs_of(trace, MULTIPLE).items()}
    rows = counts(whole)
    for way, microbatches in steps.items():
        total, attention = counted(engine, microbatches)
        rows[way] |= {"attention": attention, "others": total - attention}
    rows = {way: rows[way] | row for way, row in timed(engine, steps, options.repeats).items()}
    process_groups.stop()
    of_tokens, of_pairs = whole.promised(), trace.promised()
    for way, row in rows.items():
        yield {
            "way": way,
            **row,
            "tokens_saved": share_saved(row["padded"], rows[SEPARATE]["padded"], of_tokens, "tokens"),
            "attention_saved": share_saved(row["attention"], rows[SEPARATE]["attention"], of_pairs, "pairs"),
        }


def timed(engine: Engine, steps: dict[str, list[Microbatch]], repeats: int) -> dict[str, Row]:
    """Median seconds of a step of each way, and the ratio to separate samples."""
    seconds = medians(
        {way: partial(engine.train_step, microbatches) for way, microbatches in steps.items()},
        repeats=repeats,
        clock=wall,
    )
    return {way: {"seconds": taken, "ratio": taken / seconds[SEPARATE]} for way, taken in seconds.items()}


def share_saved(amount: float, separate: float, promised: dict[str, dict[str, int]], key: str) -> float:
    """The share that a way saves / the share that a tree promises to save."""
    return (1 - amount / separate) / (1 - promised[TREE][key] / promised[SEPARATE][key])


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    trees = {row["case"]: row for row in rows if row.get("way") == TREE}
    for case, row in trees.items():
        for key, bound in ("tokens_saved", TOKENS), ("attention_saved", ATTENTION):
            name = f"{case} turns, {key.replace('_', ' ')} / promised"
            yield Bar(name=name, value=row[key], bound=bound, relation="at least")
    time = trees.get(JUDGED_TIME, {}).get("ratio")
    yield Bar(name=f"{JUDGED_TIME} turns, time of a step / separate samples", value=time, bound=TIME)


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("tokens", "tokens", ","),
        Column("padded", "padded", ","),
        Column("packs", "packs"),
        Column("calls", "calls"),
        Column("others", "GFLOPs", ",.1f", 1e9),
        Column("attention", "attention", ",.1f", 1e9),
        Column("seconds", "s/step", ".2f"),
        Column("ratio", "ratio", ".3f"),
        Column("tokens_saved", "saved", ".1%"),
        Column("attention_saved", "attention saved", ".1%"),
    ],
    cases=["10", "30", "60"],
    tiny_cases=["4"],
    read=int,
    options={
        "set": Option([], help="KEY=VALUE of the recipe"),
        "repeats": Option(5, 1, "timed repetitions"),
        "whole": Option(1, 4, "messages are this many times shorter than described"),
    },
    bars=bars,
)
