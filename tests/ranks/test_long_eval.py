"""`sft eval --long` scores questions as transformers does, equally on every layout."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.console import QUIET
from sft.data.cache.encoder import EncodedRows
from sft.data.cache.row_report import LINE
from sft.data.cache.store import write_store
from sft.data.chat.tokenizer import ByteTokenizer
from sft.data.long.suite import SuiteSettings, make_suites, open_suites, suite_folder
from tests.launching import HF_RECIPE
from tests.ranks import hf_models
from tests.ranks.commands import scored, sft
from tests.ranks.layouts import EP, PP, SP
from tests.ranks.pool import Ranks
from tests.unit.fixtures import hf

ONE = "parallel.cp=1"
ASKED = [
    *("data.long.tasks=[needle, counting, code]", "data.long.lengths=[2, 4]", "data.long.depths=2"),
    *("data.long.questions=1", "data.long.seed=3"),
]
SETTINGS = SuiteSettings(
    tasks=("needle", "counting", "code"), lengths=(512, 1024), depths=(0.0, 1.0), questions=1, seed=3
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with packs of 256 tokens, whose questions are longer; its data files do not exist."""
    folder = tmp_path_factory.mktemp("long")
    hf.save(folder / "source", "qwen3", seed=4, max_position_embeddings=1024)
    file = folder / "recipe.yaml"
    file.write_text(HF_RECIPE.format(folder=folder))
    return file


@pytest.fixture(scope="module")
def alone(ranks: Ranks, recipe: Path) -> dict[str, Any]:
    """The result of one process."""
    return scored(ranks(2), recipe, *ASKED, ONE, "--long", alone=True)


def test_the_scores_are_those_of_transformers(alone: dict[str, Any], recipe: Path) -> None:
    model = hf.load(recipe.parent / "source")
    suites = open_suites(SETTINGS, ByteTokenizer(), recipe.parent / "run/cache")
    questions = alone["long"]["questions"]
    asked = [(suite.length, fact, suite.corpus.sample(i)) for suite in suites for i, fact in enumerate(suite.facts)]
    assert len(questions) == len(asked) == 12 and {length for length, _, _ in asked} == {512, 1024}
    for question, (length, fact, sample) in zip(questions, asked, strict=True):
        ids = torch.tensor(sample.tokens.tolist())
        with torch.no_grad():
            scores = model(input_ids=ids[None]).logits[0, fact.start - 1 : -1].double()
        answer = ids[fact.start :]
        loss = torch.nn.functional.cross_entropy(scores, answer)
        assert question["loss"] == pytest.approx(float(loss), abs=hf_models.TOKEN_LOSS_TOLERANCE)
        assert question["right"] == bool((scores.argmax(-1) == answer).all())
        assert (question["task"], question["length"], question["depth"]) == (fact.task, length, fact.depth)
        assert (question["tokens"], question["prompt"]) == (len(answer), fact.start)


LAYOUTS = {
    "cp 4": (4, ["parallel.cp=4"]),
    "cp 2": (2, []),
    "dynamic cp 2": (2, ["parallel.dynamic_cp=true"]),
    "tp 2": (2, [ONE, *SP]),
    "pp 2": (2, [ONE, *PP]),
    "dp 2": (2, [ONE, "data.pad_to_seq_length=true"]),
}


@pytest.mark.parametrize(("size", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_other_layouts_differ_by_rounding(
    ranks: Ranks, recipe: Path, alone: dict[str, Any], size: int, layout: list[str]
) -> None:
    check_same(scored(ranks(size), recipe, *ASKED, *layout, "train.global_batch_size=2", "--long"), alone)


def test_expert_parallelism_differs_by_rounding(ranks: Ranks, recipe: Path) -> None:
    experts = hf.save(recipe.parent / "experts", "qwen3_moe", seed=4, max_position_embeddings=1024)
    words = [*ASKED, ONE, f"model.hf={experts}", "--long"]
    alone = scored(ranks(2), recipe, *words, alone=True)
    check_same(scored(ranks(2), recipe, *words, *EP, "train.global_batch_size=2"), alone)


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Checks that two results have the same questions and the same right answers, and losses equal up to rounding."""
    assert found["long"]["digest"] == expected["long"]["digest"]
    for ours, theirs in zip(found["long"]["questions"], expected["long"]["questions"], strict=True):
        assert ours.pop("loss") == pytest.approx(theirs["loss"], rel=1e-6)  # fp32 sums in another order
        assert ours == {key: value for key, value in theirs.items() if key != "loss"}


def test_what_transformers_generates_is_right(ranks: Ranks, recipe: Path) -> None:
    """Answers that transformers writes greedily are right; with another last token, they are wrong."""
    cache, generated = recipe.parent / "run/cache", replace(SETTINGS, seed=5)
    model, one, expected = hf.load(recipe.parent / "source"), np.array([0, 1], np.float32), []
    for suite in make_suites(SETTINGS, ByteTokenizer(), cache, QUIET, 1):
        samples = []
        for i, fact in enumerate(suite.facts):
            prompt = torch.tensor(suite.corpus.sample(i).tokens[: fact.start].tolist())[None]
            with torch.no_grad():
                tokens = model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)[0].numpy()
            tokens[-1] += (i % 2) * (1 if tokens[-1] < 200 else -1)
            mask = (np.arange(len(tokens)) >= fact.start).astype(np.uint8)
            line = (i, 1, 1, len(tokens), 4, len(tokens), len(tokens), 4)
            samples.append(EncodedRows(tokens.astype(np.int32), mask, one, np.array([line], dtype=LINE), ()))
            expected.append(i % 2 == 0)
        folder = suite_folder(generated, suite.length, ByteTokenizer(), cache)
        write_store(folder, samples, one)
        shutil.copy(next(iter(suite.corpus.files)) / "questions.jsonl", folder)
    words = [*ASKED, "data.long.seed=5", ONE, "--long"]
    questions = scored(ranks(2), recipe, *words, alone=True)["long"]["questions"]
    assert [question["right"] for question in questions] == expected and len(expected) == 12


def test_tables_a_comparison_and_a_picture(ranks: Ranks, recipe: Path, alone: dict[str, Any]) -> None:
    before, picture = recipe.parent / "before.json", recipe.parent / "long.svg"
    right = {"right": True}
    questions = [
        {**question, **(right if question["task"] == "code" else {})} for question in alone["long"]["questions"]
    ]
    before.write_text(json.dumps({"long": {**alone["long"], "questions": questions}}))
    words = ["--long", "--before", str(before), "--picture", str(picture)]
    result = sft(ranks(2), "eval", str(recipe), *ASKED, ONE, *words, alone=True)
    assert result.code == 0 and picture.exists()
    lines = result.out.splitlines()
    assert lines[0] == "long-context questions after step 0"
    assert lines[1].split() == ["right", "answers", "512", "1,024"]
    assert any(line.startswith("code") and "0.00 -1.00" in line for line in lines)


def test_refusals(ranks: Ranks, recipe: Path, alone: dict[str, Any]) -> None:
    def refused(*words: str) -> str:
        result = sft(ranks(2), "eval", str(recipe), *ASKED, ONE, *words, alone=True)
        assert (result.code, result.out) == (2, "")
        return result.err

    before = recipe.parent / "other.json"
    before.write_text(json.dumps({"long": alone["long"]}))
    assert "--picture a.png has an effect only with --long; add --long." in refused("--picture", "a.png")
    assert "--picture a.gif does not end in .png, .svg, .pdf." in refused("--long", "--picture", "a.gif")
    assert "--before has the scores of other questions than this recipe asks" in refused(
        "--long", "--before", str(before), "data.long.seed=4"
    )
    assert "has 1,024 positions" in refused("--long", "data.long.lengths=[8]")
