"""Totals, results and records whose numbers can be checked by eye, and a validator for records."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from sft.config import Config
from sft.metrics.long import LongScores, QuestionScore
from sft.metrics.records import eval_record, long_record, train_record
from sft.metrics.run_facts import RunFacts
from sft.metrics.totals import ExpertLoad, Peak, StepResult, Totals
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
run: {dir: unused, device: cpu}
model: {num_layers: 1, hidden_size: 4, ffn_hidden_size: 8, num_attention_heads: 2, init_from: random}
data: {train: unused, seq_length: 128}
train: {num_steps: 9, global_batch_size: 2}
optim: {lr: 1e-3}
"""


def config(*overrides: str) -> Config:
    return parse_recipe(RECIPE, "tests", list(overrides)).config


def totals(**changes: Any) -> Totals:
    values: dict[str, Any] = dict(
        objective=30.0, denominator=20.0, nll=25.0, entropy=50.0, num_tokens=20, num_rows=20, num_correct=5,
        num_real_tokens=100, num_aligned_tokens=128, num_padded_tokens=160, num_documents=4, attention_flops=72_000.0,
        num_sequences=3, sequence_nll=4.5, perplexity=15.0, perplexity_min=3.0, perplexity_max=7.0,
        nll_by_position={"0-4K": 25.0, "4K+": 0.0}, num_tokens_by_position={"0-4K": 20, "4K+": 0},
        nll_by_source={"chat": 5.0, "code": 20.0}, num_tokens_by_source={"chat": 10, "code": 10},
        data_wait_s=Peak(value=0.5, rank=1), passes_s=Peak(value=1.5, rank=1, median=1.25),
        memory_allocated=Peak(value=2.0**31, rank=3),
        memory_reserved=Peak(value=2.0**32, rank=2), work_imbalance=1.25, num_slots=2, num_packs_by_cp_size={},
        num_aligned_by_cp_size={}, mtp_nll=9.0, num_mtp_tokens=18, num_taught=0,
        divergence=0.0, num_agreeing=0, covered=0.0, num_taught_by_source={"chat": 0, "code": 0},
        divergence_by_source={"chat": 0.0, "code": 0.0}, cp_bytes=0.0, cp_bytes_fixed=0.0,
    )  # fmt: skip
    return Totals(**{**values, **changes})


def result(experts: ExpertLoad | None = None, **changes: Any) -> StepResult:
    return StepResult(**vars(totals(**changes)), grad_norm=0.5, learning_rate=1e-3, skipped=False, experts=experts)


def run_of(recipe: Config) -> RunFacts:
    """The facts of a run with two ranks and a vocabulary of ten tokens."""
    return RunFacts.of(recipe, Layout.resolve(recipe, 2), 10)


def train(*overrides: str, **changes: Any) -> dict[str, Any]:
    return train_record(3, result(**changes), run_of(config(*overrides)), seconds=2.0)


def evaluation(*overrides: str, **changes: Any) -> dict[str, Any]:
    return eval_record(3, totals(**changes), run_of(config(*overrides)), set_name="eval", seconds=2.0)


def questions() -> dict[str, Any]:
    """The record of two questions of 512 tokens, of which one answer is right."""
    fact = dict(task="needle", length=512, depth=0.5, token_depth=0.4, prompt=500, tokens=5)
    scores = [QuestionScore(**fact, number=i, right=i == 1, loss=2.0 - i) for i in range(2)]  # type: ignore[arg-type]
    return long_record(3, LongScores(digest="a1", questions=tuple(scores)), run_of(config()), seconds=2.0)


@cache
def validator() -> Any:
    """A validator of docs/reference/metrics.schema.json; stricter than the standard, which accepts 20.0 as an
    integer."""
    schema = json.loads((ROOT / "docs/reference/metrics.schema.json").read_text())
    standard = jsonschema.Draft202012Validator
    standard.check_schema(schema)
    types = standard.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    return jsonschema.validators.extend(standard, type_checker=types)(schema)


def check(record: dict[str, Any]) -> None:
    """Validates a record after a conversion to JSON and back."""
    validator().validate(json.loads(json.dumps(record, allow_nan=False)))


START: dict[str, Any] = {
    "schema": 10, "kind": "start", "step": 0, "time": 1795267288.03, "parameters": 252, "num-steps": 9,
    "layout": {"world_size": 2, "tp": 1, "cp": 1, "pp": 1, "dp": 2, "ep": 1, "etp": 1},
}  # fmt: skip


def page() -> Iterator[tuple[list[str], list[str]]]:
    """Names, and the cells after them, of each row of the first table of docs/reference/metrics.md.

    `a/b`, `/c` stands for a/b and a/c; `a`, `-b` for a and a-b.
    """
    for line in (ROOT / "docs/reference/metrics.md").read_text().splitlines():
        if re.match(r"\| `.*? \| (all|both|start|train|eval|long) \|", line):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            first, *others = re.findall(r"`([^`]+)`", cells[0])
            yield [first, *(_in_full(first, other) for other in others)], cells[1:]


def _in_full(first: str, other: str) -> str:
    if other.startswith("/"):
        return first.rpartition("/")[0] + other
    if other.startswith("-"):
        return first + other if first == "tokens-per-second" else first.rpartition("-")[0] + other
    return other


def by_layout() -> dict[str, set[str]]:
    """Metric names by the column `layout` of metrics.md; "rounding; same" applies to the first and the second name."""
    found: dict[str, set[str]] = {}
    for names, cells in page():
        told = cells[3].split("; ")
        for name, how in zip(names, told if len(told) > 1 else told * len(names), strict=True):
            found.setdefault(how, set()).add(name)
    return found
