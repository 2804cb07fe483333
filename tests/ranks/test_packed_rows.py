"""Rows of tokens that other trainers packed or padded: the lm loss of a trained model equals that of their
documents."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import scenarios
from tests.ranks.hf_models import load, recipe_of
from tests.ranks.pool import Ranks
from tests.unit.corpora import corpus_of, write
from tests.unit.fixtures import hf

TOLERANCE = 1e-6  # of fp32 to float64
# Two documents of 40 and 24 tokens; the last half of each is supervised.
FIRST, SECOND = [7 * i % 250 for i in range(40)], [11 * i % 250 for i in range(24)]
MASK_1, MASK_2 = [0] * 20 + [1] * 20, [0] * 12 + [1] * 12
APART = [{"input_ids": FIRST, "loss_mask": MASK_1}, {"input_ids": SECOND, "loss_mask": MASK_2}]
TOGETHER = {"input_ids": FIRST + SECOND, "loss_mask": MASK_1 + MASK_2}
PAD = [0] * 9


def padded(key: str, values: list[int], left: list[int], right: list[int]) -> dict[str, list[int]]:
    """The two documents, with padding at the ends of the row."""
    row = {name: [0] * len(left) + numbers + [0] * len(right) for name, numbers in TOGETHER.items()}
    return {**row, key: left + values + right}


NUMBERS, POSITIONS = [1] * 40 + [2] * 24, [*range(40), *range(24)]
FORMS: dict[str, dict[str, Any]] = {
    "position_ids": {**TOGETHER, "position_ids": POSITIONS},
    "attention_mask": {**TOGETHER, "attention_mask": NUMBERS},
    "seq_start_id": {**TOGETHER, "seq_start_id": [0, 40]},
    "cu_seqlens": {**TOGETHER, "cu_seqlens": [0, 40, 64]},
    "seq_lengths": {**TOGETHER, "seq_lengths": [40, 24]},
    "seq_idx": {**TOGETHER, "seq_idx": [number - 1 for number in NUMBERS]},
    "padding on the left": padded("attention_mask", NUMBERS, PAD, []),
    "padding on the right": padded("attention_mask", NUMBERS, [], PAD),
    "padding at both ends": padded("attention_mask", NUMBERS, PAD, PAD),
    "positions and padding": padded("position_ids", POSITIONS, [], PAD),
    "cu_seqlens and padding": {**padded("cu_seqlens", [], [], PAD), "cu_seqlens": [0, 40, 64, -1, -1]},
}
# Losses of a float64 transformers model: of both documents, and of one document with all their tokens.
LOSS, LOSS_OF_ONE_DOCUMENT = 6.530844275, 6.340174723


def losses(overrides: list[str], folder: str, files: dict[str, str]) -> dict[str, tuple[int, int, float]]:
    """The number of documents, of supervised tokens, and the lm loss of the first step on each file."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        found = {}
        for name, path in files.items():
            loader = scenarios.loader_of(engine, corpus_of(path, seq_length=256))
            totals = engine.evaluate(loader.microbatches(0))
            found[name] = (totals.num_documents, totals.num_tokens, totals.nll / totals.num_tokens)
        return found


def test_the_loss_of_a_packed_row_is_that_of_its_documents(ranks: Ranks, tmp_path: Path) -> None:
    """The loss equals bit for bit that of one row per document, and differs from that of one document."""
    files = {"apart": write(tmp_path / "apart.jsonl", *APART), "one": write(tmp_path / "one.jsonl", TOGETHER)}
    files |= {form: write(tmp_path / f"{i}.jsonl", row) for i, (form, row) in enumerate(FORMS.items())}
    folder = hf.save(tmp_path / "model", "llama", seed=8)
    overrides = [*recipe_of(folder), "train.global_batch_size=1"]
    [found] = ranks(1).run(losses, overrides, str(folder), files)
    documents, tokens, loss = found["apart"]
    assert (documents, tokens) == (2, 32) and loss == pytest.approx(LOSS, rel=TOLERANCE)
    assert {form: found[form] for form in FORMS} == dict.fromkeys(FORMS, (2, 32, loss))
    assert found["one"] == (1, 32, pytest.approx(LOSS_OF_ONE_DOCUMENT, rel=TOLERANCE))
