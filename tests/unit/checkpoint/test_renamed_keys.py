"""A renamed recipe key: the old name works with one warning, in a file, on the command line and in a checkpoint."""

from pathlib import Path

import pytest

from sft.checkpoint.train_state import Changes, Conditions, changes
from sft.cli import main
from sft.config.keys import RENAMED, leaves, values
from sft.errors import ConfigError
from sft.recipe.load import parse_recipe
from sft.recipe.resolved import Recipe, dump
from tests.builders import RECIPE

OLD, NEW = "train.max_bad_steps", "train.max_nonfinite_steps"
IN_FILE = RECIPE.replace("global_batch_size: 4", "global_batch_size: 4, max_bad_steps: 5")
BY_FILE = f"{OLD} (a.yaml, line 11) is now called {NEW}; the old name still works"
BY_ARGUMENT = f"{OLD} (command line: {OLD}=7) is now called {NEW}; the old name still works"


def read(text: str, *overrides: str) -> Recipe:
    return parse_recipe(text, "a.yaml", overrides)


def test_every_new_name_is_a_key_and_no_old_one_is() -> None:
    assert set(RENAMED.values()) <= set(leaves())
    assert not set(RENAMED) & set(leaves())
    assert RENAMED == {OLD: NEW, "run.step_timeout_s": "run.progress_timeout_s"}


@pytest.mark.parametrize(
    ("text", "overrides", "value", "warnings"),
    [
        (RECIPE, [f"{NEW}=7"], 7, []),
        (IN_FILE, [], 5, [BY_FILE]),
        (RECIPE, [f"{OLD}=7"], 7, [BY_ARGUMENT]),
        (RECIPE, ["train={max_bad_steps: 7}"], 7, [BY_ARGUMENT.replace(f": {OLD}=7", ": train={max_bad_steps: 7}")]),
        (IN_FILE, [f"{OLD}=7"], 7, [BY_ARGUMENT]),
    ],
)
def test_an_old_name_works_with_one_warning(text: str, overrides: list[str], value: int, warnings: list[str]) -> None:
    recipe = read(text, *overrides)
    assert recipe.config.train.max_nonfinite_steps == value
    assert recipe.warnings == tuple(warnings)


def test_a_value_by_the_old_name_keeps_its_origin() -> None:
    assert "max_nonfinite_steps: 5  # a.yaml, line 11\n" in dump(read(IN_FILE))


def test_a_wrong_value_by_the_old_name() -> None:
    with pytest.raises(ConfigError) as refusal:
        read(IN_FILE.replace("steps: 5", "steps: -1"))
    shown = f"{OLD} (now called {NEW})"
    assert str(refusal.value) == f"{shown} = -1 (a.yaml, line 11); expected a whole number of at least 0."


@pytest.mark.parametrize(
    ("text", "overrides", "names"),
    [
        (IN_FILE, [f"{NEW}=7"], f"{OLD} (a.yaml, line 11) and {NEW} (command line: {NEW}=7)"),
        (RECIPE, [f"{NEW}=7", f"{OLD}=7"], f"{NEW} (command line: {NEW}=7) and {OLD} (command line: {OLD}=7)"),
    ],
)
def test_both_names_together_are_refused(text: str, overrides: list[str], names: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read(text, *overrides)
    assert str(refusal.value) == f"{names} are names of the same key, which is now called {NEW}.  Keep only {NEW}."


def test_one_rank_warns_once_and_the_old_name_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(IN_FILE, encoding="utf-8")
    assert main(["check", "a.yaml", "--explain", OLD]) == 0
    shown = capsys.readouterr()
    assert shown.err == f"WARNING: {BY_FILE}\n"
    assert shown.out.splitlines()[:3] == [f"{OLD} is now called {NEW}", f"{NEW} = 5", "    from     a.yaml, line 11"]
    monkeypatch.setenv("RANK", "1")
    assert main(["check", "a.yaml", "--explain", NEW]) == 0
    assert capsys.readouterr().err == ""


def test_a_checkpoint_of_before_differs_in_nothing() -> None:
    recipe = values(read(IN_FILE).config)
    old = {OLD if key == NEW else key: value for key, value in recipe.items()}
    before = {"plan": {}, "recipe": old, "layout": {}, "versions": {}}
    now = Conditions(plan={}, recipe=recipe, layout={}, versions={})
    assert changes(before, now, []) == Changes(reported=[], refused={})
    changed = Conditions(plan={}, recipe={**recipe, NEW: 6}, layout={}, versions={})
    assert changes(before, changed, []) == Changes(reported=[f"{NEW} was 5, is 6"], refused={})
