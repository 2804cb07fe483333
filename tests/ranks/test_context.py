"""`sft eval --context` compares the end of each document with and without its first three quarters."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.launching import HF_RECIPE
from tests.ranks import hf_models
from tests.ranks.commands import scored, sft
from tests.ranks.layouts import PP, SP
from tests.ranks.pool import Ranks
from tests.unit.fixtures import hf

ONE = "parallel.cp=1"
LENGTHS = {"a.jsonl": (200, 64, 63, 130), "b.jsonl": (255, 256)}  # 63: too short
SUM_TOLERANCE = hf_models.TOKEN_LOSS_TOLERANCE * 32  # of at most 32 scored tokens


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with two held-out files of tokens, of which every third is supervised."""
    folder = tmp_path_factory.mktemp("context")
    hf.save(folder / "source", "qwen3", seed=4, max_position_embeddings=1024)
    for name, lengths in LENGTHS.items():
        rows = [
            {"tokens": document(length), "loss_mask": [int(i % 3 == 0) for i in range(length)]} for length in lengths
        ]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = HF_RECIPE.format(folder=folder)
    file = folder / "recipe.yaml"
    sets = f"{{one: {folder}/a.jsonl, two: [{folder}/a.jsonl, {folder}/b.jsonl]}}"
    file.write_text(text.replace("seq_length: 256", f"seq_length: 256, eval: {sets}"))
    return file


def document(length: int) -> list[int]:
    return np.random.default_rng(length).integers(1, 250, length).tolist()


@pytest.fixture(scope="module")
def alone(ranks: Ranks, recipe: Path) -> dict[str, Any]:
    return scored(ranks(2), recipe, ONE, "--context", alone=True)


def test_both_losses_are_those_of_transformers(alone: dict[str, Any], recipe: Path) -> None:
    documents = alone["context"]["documents"]
    expected = [("one", 200), ("one", 64), ("one", 130)]
    expected += [("two/a", 200), ("two/a", 64), ("two/a", 130), ("two/b", 255), ("two/b", 256)]
    assert [(found["source"], found["length"]) for found in documents] == expected
    model = hf.load(recipe.parent / "source")
    for found in documents:
        n = found["length"]
        tokens = document(n)
        scored_ids = [i for i in range(n - n // 8, n) if i % 3 == 0]
        assert found["tokens"] == len(scored_ids)
        for key, start in (("whole", 0), ("nearest", n - n // 4)):
            with torch.no_grad():
                losses = torch.nn.functional.cross_entropy(
                    model(input_ids=torch.tensor([tokens[start:]])).logits[0, :-1].double(),
                    torch.tensor(tokens[start + 1 :]),
                    reduction="none",
                )
            assert found[key] == pytest.approx(float(sum(losses[i - start - 1] for i in scored_ids)), abs=SUM_TOLERANCE)
        assert abs(found["whole"] - found["nearest"]) > hf_models.VISIBLE


@pytest.mark.parametrize(
    "layout", [[], [ONE, *SP], [ONE, *PP], [ONE, "parallel.dynamic_cp=false"]], ids=["cp 2", "tp 2", "pp 2", "dp 2"]
)
def test_other_layouts_differ_by_rounding(ranks: Ranks, recipe: Path, alone: dict[str, Any], layout: list[str]) -> None:
    found = scored(ranks(2), recipe, *layout, "train.global_batch_size=2", "--context")["context"]["documents"]
    for ours, theirs in zip(found, alone["context"]["documents"], strict=True):
        for key in ("whole", "nearest"):
            assert ours.pop(key) == pytest.approx(theirs[key], rel=1e-6)  # fp32 sums in another order
        assert ours == {key: value for key, value in theirs.items() if key not in ("whole", "nearest")}


def test_context_that_no_layer_reaches_gains_nothing(ranks: Ranks, recipe: Path) -> None:
    """With windows of 3 in two layers, a token sees 4 tokens before it, which both samples of a document have."""
    window = ["model.sliding_window=3", "model.sliding_window_layers=null"]
    documents = scored(ranks(2), recipe, ONE, *window, "--context", alone=True)["context"]["documents"]
    for found in documents:
        assert found["whole"] == pytest.approx(found["nearest"], abs=SUM_TOLERANCE)


def test_the_table_and_refusals(ranks: Ranks, recipe: Path) -> None:
    result = sft(ranks(2), "eval", str(recipe), ONE, "--context", alone=True)
    assert result.code == 0 and "one: 1 of 4 documents are left out" in result.err
    lines = result.out.splitlines()
    assert lines[0] == "far context after step 0"
    assert [line.split()[:4] for line in lines[2:5]] == [
        ["one", "to", "64", "1"],
        ["one", "to", "256", "2"],
        ["one", "all", "3", "17"],
    ]
    for words, message in {
        ("--context", "--long"): "give one of them",
        (f"data.eval={recipe.parent}/short.jsonl", "--context"): "a document must have at least 64 tokens",
    }.items():
        (recipe.parent / "short.jsonl").write_text(json.dumps({"tokens": document(63), "loss_mask": [1] * 63}) + "\n")
        refused = sft(ranks(2), "eval", str(recipe), ONE, *words, alone=True)
        assert refused.code == 2 and message in refused.err
