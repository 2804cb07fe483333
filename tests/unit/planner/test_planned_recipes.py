"""The recipes that the planner wrote are complete, fit their hardware, and equal what it would write today."""

import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft.estimate import memory
from sft.estimate.communicators import nccl_bytes
from sft.estimate.gpus import GIB, gpu, usable_memory
from sft.parallel.layout import Layout
from sft.recipe.load import load_recipe
from sft.recipe.resolved import Recipe
from sft.weights.trained import trained_weights
from tests.kernels import changed
from tools import plan_recipes
from tools.recipes_docs import header, page

FOLDER = Path(__file__).resolve().parents[3] / "recipes" / "planned"
RECIPES = sorted(path.name for path in FOLDER.glob("*.yaml"))
MOST_LINES = 25
DECIDES = tuple(f"sft/{room}/" for room in ("planner", "estimate", "layers", "parallel", "config", "hf", "recipe"))
DECIDES += ("tools/plan_recipes.py", "recipes/planned/", "tests/unit/planner/")


def world_size(name: str) -> int:
    """The number of processes in the command of the header."""
    command = header(FOLDER / name)["Launch"]
    nodes = re.search(r"--nnodes (\d+)", command)
    assert "--nproc-per-node 8 " in command or command.endswith(" --processes 8")
    return 8 * (int(nodes[1]) if nodes else 1)


@pytest.mark.usefixtures("released_models")
def test_they_cover_models_lengths_and_nodes() -> None:
    recipes = {name: load_recipe(str(FOLDER / name)).config for name in RECIPES}
    assert len(recipes) >= 24
    assert {config.data.seq_length for config in recipes.values()} >= {2**15, 2**17, 2**18, 2**19, 2**20}
    assert {world_size(name) for name in recipes} >= {8, 16, 32, 64, 128, 256}
    assert len({config.model.hf for config in recipes.values()}) == 13
    assert {config.lora.is_used for config in recipes.values()} == {True, False}


@pytest.mark.usefixtures("released_models")
@pytest.mark.parametrize("name", RECIPES)
def test_each_is_complete_and_fits(name: str) -> None:
    lines = header(FOLDER / name)
    assert list(lines) == ["Purpose", "Launch", "Hardware", "Expected", "Sibling"]
    assert f"sft train recipes/planned/{name}" in lines["Launch"]
    assert lines["Expected"].startswith("predicted, not measured: ") and "assumed" in lines["Expected"]
    assert lines["Sibling"].partition(",")[0] in set(RECIPES) - {name}
    assert len((FOLDER / name).read_text().splitlines()) <= MOST_LINES
    recipe = load_recipe(str(FOLDER / name))
    layout = Layout.resolve(recipe.config, world_size(name))
    assert f"{layout.world_size} GPUs h100" in lines["Hardware"]
    needed = needed_bytes(recipe, layout)
    usable = usable_memory(gpu("h100"), nccl_bytes(recipe.config, layout)).bytes
    assert needed <= usable
    assert f"{needed / GIB:.0f} of {usable / GIB:.0f} usable GiB per GPU" in lines["Expected"]


def needed_bytes(recipe: Recipe, layout: Layout) -> float:
    vocab_size = recipe.config.model.vocab_size
    assert vocab_size is not None
    trained = trained_weights(recipe.config, vocab_size)
    return memory.estimate(recipe.config, layout, vocab_size, trained=trained).device


def in_turn() -> Iterator[Any]:
    """The recipes: all if the last commit touches what decides them, else a fourth of them, another one every day.  The
    others are marked `grid`."""
    files = changed.files()
    is_touched = files is None or any(file.startswith(DECIDES) for file in files)
    for number, case in enumerate(plan_recipes.cases()):
        is_in_turn = is_touched or number % 4 == datetime.date.today().toordinal() % 4
        yield pytest.param(case, id=case.file, marks=[] if is_in_turn else [pytest.mark.grid])


@pytest.mark.parametrize("case", [*in_turn()])
def test_each_is_what_the_planner_writes_today(case: plan_recipes.Case) -> None:
    """After a change of a prediction, run python -m tools.plan_recipes and python -m tools.pages, and review the
    differences."""
    with plan_recipes.released_models():
        assert plan_recipes.planned(case) == (FOLDER / case.file).read_text(encoding="utf-8")


def test_each_case_has_a_file() -> None:
    assert sorted(case.file for case in plan_recipes.cases()) == RECIPES


def test_a_stale_recipe_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {"Qwen/Qwen3-0.6B": ((2**17, 1, False),), "Qwen/Qwen3-8B": ((2**17, 1, False),)}
    monkeypatch.setattr(plan_recipes, "CASES", cases)
    assert plan_recipes.main([], folder=tmp_path) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["qwen3_0p6b_128k_1n.yaml", "qwen3_8b_128k_1n.yaml"]
    assert plan_recipes.main(["--check"], folder=tmp_path) == 0
    (tmp_path / "old.yaml").write_text("run: {}\n")
    assert plan_recipes.main(["--check"], folder=tmp_path) == 1
    assert capsys.readouterr().err == "recipes/planned/old.yaml is out of date; run: python -m tools.plan_recipes\n"
    assert plan_recipes.main([], folder=tmp_path) == 0
    assert not (tmp_path / "old.yaml").exists()


def test_the_page_has_every_recipe() -> None:
    text = page("")
    assert all(f"]: ../../recipes/planned/{name}\n" in text for name in RECIPES)
    assert "(../../recipes/qwen3_8b_64k.yaml)" in text
