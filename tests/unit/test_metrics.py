"""From totals to what is written: every name documented, JSON and TensorBoard read back."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sft.config import Config
from sft.layout import Layout
from sft.mcore.engine import StepResult
from sft.metrics import Console, Metrics, eval_record, flat, train_record
from sft.recipe import parse_recipe
from sft.tally import Peak, Ratio, Schema, Totals

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = Schema(position_edges=(4096,), sources=("chat", "code"))
RECIPE = """
run: {dir: unused, device: cpu}
model: {num_layers: 1, hidden_size: 4, ffn_hidden_size: 8, num_attention_heads: 2}
data: {train: unused, seq_length: 128}
train: {num_steps: 9, global_batch_size: 2}
optim: {lr: 1e-3}
"""


def config(*overrides: str) -> Config:
    return parse_recipe(RECIPE, "tests", list(overrides)).config


def totals(**changes: Any) -> Totals:
    values: dict[str, Any] = dict(
        loss=30.0, denominator=20.0, nll=25.0, entropy=50.0, num_tokens=20, num_real_tokens=100,
        num_aligned_tokens=128, num_padded_tokens=160, num_documents=4, sum_of_squares=3000,
        sequence_nll=Ratio(total=4.5, count=3), perplexity=Ratio(total=15.0, count=3),
        perplexity_min=3.0, perplexity_max=7.0,
        by_position=(Ratio(total=25.0, count=20), Ratio(total=0.0, count=0)),
        by_source=(Ratio(total=5.0, count=10), Ratio(total=20.0, count=10)),
        peaks={"data_wait_s": Peak(value=0.5, rank=1), "memory_allocated": Peak(value=2.0**31, rank=3),
               "memory_reserved": Peak(value=2.0**32, rank=2)},
        work_imbalance=1.25,
    )  # fmt: skip
    return Totals(**{**values, **changes})


def train(*overrides: str, **changes: Any) -> dict[str, Any]:
    recipe = config(*overrides)
    result = StepResult(totals=totals(**changes), grad_norm=0.5, learning_rate=1e-3, skipped=False)
    layout = Layout.resolve(recipe, 2)
    return train_record(3, result, layout, recipe, schema=SCHEMA, vocab_size=10, seconds=2.0)


def evaluation(*overrides: str, **changes: Any) -> dict[str, Any]:
    return eval_record(3, totals(**changes), config(*overrides), schema=SCHEMA, seconds=2.0)


EVERYTHING = ["loss.entropy=true", "loss.z_loss_coef=1e-4", "log.peak_tflops=989"]


def test_written_out() -> None:
    """Two ranks, two seconds.  FLOPs: 6 * 160 a token (qkv 48, proj 16, MLP 96), 6 * 40 a label, 6 * 4 a square."""
    found = dict(flat(train(*EVERYTHING)))
    assert found["lm loss"] == 1.5 and found["nll"] == 1.25 and found["entropy"] == 2.5
    assert found["perplexity/avg"] == 5.0 and (found["perplexity/min"], found["perplexity/max"]) == (3.0, 7.0)
    assert found["loss by position/0-4K/loss"] == 1.25 and found["loss by position/0-4K/tokens"] == 20
    assert found["loss by position/4K+/loss"] is None and found["loss by position/4K+/tokens"] == 0
    assert (found["loss by source/chat/loss"], found["loss by source/code/loss"]) == (0.5, 2.0)
    assert (found["padding/alignment"], found["padding/filler"], found["padding/tail"]) == (28, 32, 96)
    assert found["tokens/capacity"] == 256
    assert found["tokens-per-second"] == 50.0 and found["tokens-per-second-per-rank"] == 25.0
    assert found["tokens-per-second-supervised"] == 10.0 and found["data-wait-share"] == 0.25
    flops = 100 * 960 + 20 * 240 + 3000 * 24
    assert found["tflops-per-rank"] == pytest.approx(flops / 2 / 2 / 1e12)
    assert found["mfu"] == pytest.approx(flops / 2 / 2 / 1e12 / 989)
    assert (found["memory/allocated-gib"], found["memory/allocated-rank"]) == (2.0, 3)
    assert (found["memory/reserved-gib"], found["memory/reserved-rank"]) == (4.0, 2)
    assert dict(flat(evaluation()))["sample loss"] == 1.5


def test_what_nobody_asked_for_is_not_there() -> None:
    nothing = Peak(value=0.0, rank=0)
    found = train(peaks=dict.fromkeys(["data_wait_s", "memory_allocated", "memory_reserved"], nothing))
    assert not {"nll", "entropy", "mfu", "memory/allocated-gib"} & found.keys()


def test_nothing_supervised_is_null_and_not_a_number_too_large() -> None:
    empty = Ratio(total=0.0, count=0)
    found = train(
        num_tokens=0, denominator=0.0, loss=0.0, perplexity=empty, perplexity_min=float("inf"), perplexity_max=0.0
    )
    assert [found[name] for name in ("lm loss", "perplexity/avg", "perplexity/min", "perplexity/max")] == [None] * 4
    assert train(perplexity_max=float("inf"))["perplexity/max"] is None
    json.dumps(found, allow_nan=False)


def documented() -> set[str]:
    """Names in the table of docs/metrics.md: `a/b`, `/c` stands for a/b and a/c; `a`, `-b` for a and a-b."""
    names = set()
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        cell = re.match(r"\| (`.*?) \| (?:both|train|eval|) \|", line)
        if cell:
            first, *others = re.findall(r"`([^`]+)`", cell[1])
            names.add(first)
            for other in others:
                if other.startswith("/"):
                    names.add(first.rpartition("/")[0] + other)
                elif other.startswith("-"):
                    names.add(first + other if first == "tokens-per-second" else first.rpartition("-")[0] + other)
                else:
                    names.add(other)
    return names


def test_every_name_is_documented_and_every_documented_name_is_written() -> None:
    written = {name for record in (train(*EVERYTHING), evaluation(*EVERYTHING)) for name, _ in flat(record)}
    general = {re.sub(r"^(loss by \w+)/[^/]+/", r"\1/NAME/", name) for name in written}
    assert general - {"kind", "step"} == documented()


def test_what_is_written_can_be_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    console = Console(0, io.StringIO())
    metrics = Metrics(tmp_path, console, rank=0, step=0, num_steps=9, every=1, tensorboard=True)
    metrics.start({"parameters": 1})
    metrics.train(train())
    metrics.eval(evaluation())
    metrics.close()
    start, first, held_out = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (start["kind"], start["schema"], start["step"]) == ("start", 2, 0)
    assert first == train() and held_out == evaluation()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Scalars("lm loss")[0].value == 1.5 and events.Scalars("lm loss")[0].step == 3
    assert events.Scalars("loss by position/0-4K/loss")[0].value == 1.25
    assert events.Scalars("sample loss validation")[0].value == 1.5
