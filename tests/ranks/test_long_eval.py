"""`sft eval --long` scores questions as transformers does, equally on every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.data.chat.tokenizer import ByteTokenizer
from sft.data.long.suite import SuiteSettings, open_suites
from tests.launching import HF_RECIPE
from tests.ranks import hf_models
from tests.ranks.commands import scored, sft
from tests.ranks.layouts import PP, SP
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
    "cp 2": [],
    "dynamic cp 2": ["parallel.dynamic_cp=true"],
    "tp 2": [ONE, *SP],
    "pp 2": [ONE, *PP],
    "dp 2": [ONE, "data.pad_to_seq_length=true"],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_other_layouts_differ_by_rounding(ranks: Ranks, recipe: Path, alone: dict[str, Any], layout: list[str]) -> None:
    found = scored(ranks(2), recipe, *ASKED, *layout, "train.global_batch_size=2", "--long")["long"]
    assert found["digest"] == alone["long"]["digest"]
    for ours, theirs in zip(found["questions"], alone["long"]["questions"], strict=True):
        assert ours.pop("loss") == pytest.approx(theirs["loss"], rel=1e-6)  # fp32 sums in another order
        assert ours == {key: value for key, value in theirs.items() if key != "loss"}


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
