"""`sft check` answers each key in the tables of docs/how-to/move.md as the row of the table says."""

import re
from collections.abc import Iterator

import pytest

from sft.config import keys
from sft.errors import ConfigError
from sft.recipe.load import parse_recipe
from tests.builders import RECIPE
from tests.docs.blocks import ROOT

PAGE = ROOT / "docs/how-to/move.md"
_ROW = re.compile(r"\| `([\w.]+)` \| (none|`[\w.]+`) \|(.*)\|$")
_NO_ADVICE = re.compile(r"\)\.  (Keys of |Did you mean)")


def rows() -> Iterator[tuple[str, str, str]]:
    """(trainer, key of this trainer, our key or none)"""
    trainer = ""
    for line in PAGE.read_text(encoding="utf-8").split("\n"):
        if line.startswith("## "):
            trainer = line.removeprefix("## ")
        elif line.startswith("| `"):
            row = _ROW.fullmatch(line)
            assert row, f"no row of three cells: {line}"
            yield trainer, row[1], row[2].strip("`")


ROWS = list(rows())


def answer(key: str) -> str:
    """The error message for a recipe with `key`; "" if `key` is one of our keys."""
    try:
        parse_recipe(RECIPE, "a.yaml", [f"{key}=1"])
    except ConfigError as error:
        return next(line for line in str(error).split("\n") if f"{key} " in line)
    return ""


@pytest.mark.parametrize(("trainer", "theirs", "ours"), ROWS, ids=lambda value: value)
def test_sft_check_answers_as_the_table_says(trainer: str, theirs: str, ours: str) -> None:
    if theirs == ours:
        assert ours in keys.leaves()
        return
    line = answer(theirs)
    assert line.startswith(f"unknown key {theirs} "), f"{trainer}: {theirs} is not refused: {line}"
    if ours == "none":
        assert not _NO_ADVICE.search(line) and "is called" not in line, line
    else:
        assert ours in (*keys.leaves(), *keys.sections())
        assert f"is called {ours} here" in line or f"Did you mean {ours}?" in line, line


def test_every_trainer_has_a_table_without_a_key_twice() -> None:
    pairs = [(trainer, theirs) for trainer, theirs, _ in ROWS]
    assert [*dict.fromkeys(trainer for trainer, _ in pairs)] == ["Megatron-Bridge", "axolotl", "TRL", "LLaMA-Factory"]
    assert len(pairs) == len(set(pairs))
