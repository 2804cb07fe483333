"""Faults that the check of a page must find, planted in pages of a few lines."""

from pathlib import Path

import pytest

from sft.errors import ConfigError
from tests.docs.blocks import blocks
from tests.docs.commands import check, commands
from tests.docs.test_pages import prepare, run


def page(language: str, text: str, mark: str = "") -> str:
    return f"# A page\n{mark}\n```{language}\n{text}\n```\n"


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("bash", "sft check recipe.yaml --wrold-size 8", "--world-size"),
        ("bash", "sft check recipe.yaml optim.rl=1", "optim.rl is no key of a recipe"),
        ("bash", "torchrun --nproc-per-node 8 -m sft trian recipe.yaml", "trian"),
        ("bash", "make demmo", "make demmo: there is no such target"),
        ("bash", "python -m tools.gone", "python -m tools.gone: there is no such module"),
        ("bash", "sft check recipes/gone.yaml", "recipes/gone.yaml does not exist"),
        ("bash", "launch/gone.sh", "launch/gone.sh does not exist"),
        ("bash", "nonsense", "unknown command nonsense"),
        ("bash", "if true", "syntax error"),
        ("bash", "make demo && make demmo", "make demmo"),
        ("yaml", "train: {num_step: 8}", "train.num_step is no key of a recipe"),
        ("yaml", "trian: {num_steps: 8}", "trian is no key of a recipe"),
        ("python", "f(", "never closed"),
    ],
)
def test_a_block_that_is_not_run_is_parsed(language: str, text: str, expected: str) -> None:
    (block,) = blocks(page(language, text, "<!-- not run: gpu -->"))
    assert block.reason == "gpu" and block.line == 4
    with pytest.raises((ValueError, ConfigError, SyntaxError)) as caught:
        check(block)
    assert expected in str(caught.value)


def test_a_good_block_that_is_not_run() -> None:
    script = (
        "A=1 sft check recipe.yaml optim.lr=1 # why\nsbatch --nodes 2 launch/slurm.sbatch x.yaml\nmake demo && git log"
    )
    (block,) = blocks(page("bash", script, "<!-- not run: cluster -->"))
    check(block)
    assert list(commands("X=$(a (b) c)/d e \\\n  f # g\n")) == [["e", "f"]]


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("bash", "false | true\nls gone"),
        ("bash", "sft check gone.yaml"),
        ("bash", "cat chats.jsonl"),  # of another page's folder
        ("python", "assert 1 == 2"),
        ("yaml", "train: {num_steps: many}"),
        ("yaml", "parallel: {cp: 0}"),
        ("json", "{]"),
    ],
)
def test_an_unmarked_block_that_cannot_run_fails(language: str, text: str, tmp_path: Path) -> None:
    prepare(tmp_path, None)
    (block,) = blocks(page(language, text))
    with pytest.raises((ValueError, ConfigError)):
        run(block, tmp_path)


def test_an_unmarked_block_that_runs(tmp_path: Path) -> None:
    prepare(tmp_path, None)
    for block in blocks(page("bash", "echo 1 > a.txt") + page("python", "assert open('a.txt').read() == '1\\n'")):
        run(block, tmp_path)
    assert (tmp_path / "a.txt").exists()


@pytest.mark.parametrize(
    "text",
    [page("bash", "ls", "<!-- not run: lazy -->"), page("", "ls"), page("sh", "ls"), "<!-- not run: gpu -->\n\ntext\n"],
)
def test_marks_and_languages_that_do_not_exist(text: str) -> None:
    with pytest.raises(ValueError, match="line "):
        blocks(text)
