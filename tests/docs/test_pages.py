"""Runs every command and block of the site, each page in a folder of its own, in another order of pages every day.

`make test` runs one slow page, another one every day, and those that the last commit touches; `make test-all` runs all
pages. The quick start is only parsed here: tests/ranks/test_quickstart.py runs it.
"""

import datetime
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft.errors import ConfigError
from sft.recipe.load import parse_recipe
from tests import builders, warm_commands
from tests.docs.blocks import LANGUAGES, ROOT, TINY, Block, blocks, check, commands
from tests.kernels import changed

TODAY = datetime.date.today().toordinal()
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md"))
random.Random(TODAY).shuffle(PAGES)
SLOW = [
    *("how-to/resume.md", "how-to/convert.md", "how-to/losses.md"),
    *("reference/checkpoint-format.md", "reference/python-api.md", "how-to/prepare.md"),
]  # these pages take 15 to 45 s each on two idle cores
RUN_ELSEWHERE = ("start/quickstart.md",)
RECIPE = """\
run: {dir: runs/a, device: cpu, precision: fp32}
model: {hf: models/tiny}
data: {train: chats.jsonl, seq_length: 512}
train: {num_steps: 4, global_batch_size: 2}
optim: {lr: 3e-3}
"""
TIMEOUT_S = 600  # time limit of a block; on an idle machine a block takes seconds


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a page with the mark TINY may use: a model, chats and a recipe."""
    folder = tmp_path_factory.mktemp("tiny")
    builders.chats(folder, 40, "chats.jsonl")
    (folder / "recipe.yaml").write_text(RECIPE)
    make = [sys.executable, "-m", "tools.make_tiny_model", str(folder / "models/tiny")]
    subprocess.run(make, cwd=ROOT, check=True, capture_output=True)
    return folder


def run(block: Block, folder: Path) -> None:
    """Runs or reads a block as a reader of the page would, in the folder of the page."""
    if block.language in ("yaml", "json") or block.reason:
        check(block)
    if block.reason or block.language == "json":
        return
    if block.language == "yaml":
        tree = yaml.safe_load(block.text)
        parse_recipe(yaml.safe_dump(_merged(yaml.safe_load(RECIPE), tree)), "page.yaml", ["model.hf=models/tiny"])
        return
    words = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
    own = {"PATH": f"{folder / '.bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*words, block.text], cwd=folder, env={**os.environ, **own, "HF_HUB_OFFLINE": "1"}, capture_output=True,
        text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    if done.returncode:
        raise ValueError(f"exit code {done.returncode} of:\n{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")


def _merged(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both recipes merged; keys of `other` win."""
    return {group: {**base.get(group, {}), **other.get(group, {})} for group in [*base, *other]}


def prepare(folder: Path, tiny: Path | None) -> None:
    """Fills the folder of a page: the commands of this environment, and the files of `tiny` if the page has the
    mark."""
    if tiny is not None:
        shutil.copytree(tiny, folder, dirs_exist_ok=True)
    warm_commands.commands(folder / ".bin")


def waiting(files: Collection[str], day: int) -> list[str]:
    """The slow pages that `make test` leaves out on a day, if these files were changed."""
    return [name for name in SLOW if name != SLOW[day % len(SLOW)] and f"docs/{name}" not in files]


def in_turn() -> Iterator[Any]:
    """The pages.  A slow page that waits has the mark `grid`."""
    wait = waiting(changed.files() or (), TODAY)
    for path in PAGES:
        name = str(path.relative_to(ROOT / "docs"))
        yield pytest.param(path, id=name, marks=[pytest.mark.grid] if name in wait else [])


@pytest.mark.parametrize("path", [*in_turn()])
def test_every_block_of_the_page(path: Path, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = path.read_text(encoding="utf-8")
    prepare(tmp_path, tiny if TINY in page else None)
    monkeypatch.chdir(tmp_path)
    faults = []
    for block in blocks(page):
        try:
            if str(path).endswith(RUN_ELSEWHERE):
                check(block)
            else:
                if block.language == "yaml" and not block.reason:
                    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
                run(block, tmp_path)
        except Exception as error:  # the test reports the faults of all blocks of a page together
            faults.append(f"{path.relative_to(ROOT)}:{block.line}: {error}")
    assert not faults, "\n".join(faults)


def test_slow_pages_take_turns() -> None:
    assert {*SLOW} <= {str(path.relative_to(ROOT / "docs")) for path in PAGES}
    taken = [{*SLOW} - {*waiting((), day)} for day in range(TODAY, TODAY + 6)]
    assert sorted(taken, key=str) == [{name} for name in sorted(SLOW)]
    assert waiting([f"docs/{name}" for name in SLOW[1:]], 0) == []
    assert {param.id for param in in_turn() if param.marks} <= {*waiting((), TODAY)}


def test_the_site_has_blocks_that_run() -> None:
    """Some blocks have no mark and are run: marks are exceptions."""
    every = [block for path in PAGES for block in blocks(path.read_text(encoding="utf-8"))]
    assert {block.language for block in every} <= set(LANGUAGES)
    assert sum(not block.reason for block in every) >= len(every) // 3


# --- faults that the check must find, in pages of a few lines --------------------------------------------------------


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
        ("bash", "cat chats.jsonl"),  # chats.jsonl is in the folder of another page
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
