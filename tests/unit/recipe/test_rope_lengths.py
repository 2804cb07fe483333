"""`sft check` says which lengths are trained, extended and beyond."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft.cli import main
from sft.recipe.load import load_recipe
from sft.recipe.rope_lengths import rope_lengths
from tests.builders import QWEN3, RECIPE, parsed
from tools.plan_recipes import FOLDER, released_models


@pytest.fixture(scope="module", autouse=True)
def released() -> Iterator[None]:
    with released_models():
        yield


def lines(recipe: str, *overrides: str) -> list[str]:
    return rope_lengths(load_recipe(str(FOLDER.parent / f"{recipe}.yaml"), overrides))


def test_yarn_extends_the_trained_length() -> None:
    # base 1e6, heads of 128: pair i turns once in 2 pi 10^(6 i / 64) tokens, so pairs 0 to 39 turn in 32,768.
    assert lines("qwen3_8b_128k") == [
        "trained   to 32,768     40 of 64 pairs of a head turn around once or more, and have shown every angle",
        "extended  to 131,072    by model.rope.scaling = yarn with factor 4",
        "beyond    from 131,073  the other 24 pairs get angles that they have not shown: expect wrong answers",
        "packs hold documents of up to 131,072 tokens: extended",
    ]


def test_the_scaling_of_the_files_is_trained() -> None:
    seen = "the model has seen these positions"
    trained, beyond, packs = lines("llama31_8b_128k")
    assert trained.split(maxsplit=3)[:3] == ["trained", "to", "131,072"] and trained.endswith(seen)
    assert beyond.startswith("beyond    from 131,073") and packs.endswith(": trained")
    _, extended, *_ = lines("llama31_8b_128k", "model.rope.factor=32")
    assert extended.split(maxsplit=3)[:3] == ["extended", "to", "262,144"]  # 32 * 8,192, as long documents are refused


def test_a_larger_base_slows_the_slowest_pair() -> None:
    """Llama 3.1 with scaling 8 and base 5e5, trained on 131,072: 131,072 / 8 * (1.28e8 / 5e5) ** (126 / 128)."""
    own = ["model.rope.scaling=none", "model.rope.factor=1"]
    _, extended, beyond, packs = lines(
        "llama31_8b_128k", *own, "model.rope.base=1.28e8", "data.seq_length=524288", "parallel.cp=8"
    )
    assert extended.split(maxsplit=3)[:3] == ["extended", "to", "3,846,193"]
    assert "by model.rope.base = 128,000,000 (before: 500,000)" in extended and packs.endswith(": extended")
    _, beyond, packs = lines("llama31_8b_128k", *own, "model.rope.base=2e6", "data.seq_length=524288", "parallel.cp=8")
    assert beyond.startswith("beyond    from 131,073") and packs.endswith("524,288 tokens: beyond")


def test_without_files_the_original_length_is_trained() -> None:
    assert rope_lengths(parsed()) == []  # a new model: nothing is trained
    trained, extended, _, packs = rope_lengths(
        parsed("model.rope={scaling: yarn, factor: 8, original_max_position: 512}", "data.seq_length=4096")
    )
    assert (trained.split()[2], extended.split()[2]) == ("512", "4,096") and packs.endswith(": extended")


def test_check_prints_the_table(recipe_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recipe_folder / "m").mkdir()
    (recipe_folder / "m" / "config.json").write_text(json.dumps(QWEN3))
    (recipe_folder / "a.yaml").write_text(re.sub("(?s)model:.*data:", "model: {hf: m}\ndata:", RECIPE))
    assert main(["check", "a.yaml", "--no-data"]) == 0
    printed = capsys.readouterr().out
    assert "lengths trained   to 512" in printed and "documents of up to" in printed
