"""What the fault tests share: prepared data, a process that forks ranks, the undisturbed run, and the table."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import chats
from tests.faults.ends import End, end_of
from tests.faults.matrix import Matrix
from tests.faults.runs import RECIPE, Case, Nursery

MATRIX = pytest.StashKey[Matrix]()
HITS = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-faults", action="store_true", help="not only the fault tests that are marked quick")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MATRIX] = Matrix()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all-faults"):
        return
    here = Path(__file__).parent
    left_out = [item for item in items if here in item.path.parents and not item.get_closest_marker("quick")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture
def hit(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`hit("S1", 3)`: three faults of that row struck; survived if the test passes."""
    hits: dict[str, int] = request.node.stash.setdefault(HITS, {})

    def count(row: str, times: int = 1) -> None:
        hits[row] = hits.get(row, 0) + times

    return count


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    rows = [row for mark in item.iter_markers("row") for row in mark.args]
    hits = item.stash.setdefault(HITS, {})
    matrix = item.config.stash[MATRIX]
    if report.when == "call":
        for row, times in hits.items():
            matrix.struck[row] = matrix.struck.get(row, 0) + times
            matrix.survived[row] = matrix.survived.get(row, 0) + (times if report.passed else 0)
    if report.failed:
        for row in {*rows, *hits}:
            matrix.struck[row] = matrix.struck.get(row, 0) + (row not in hits)
            matrix.failed.setdefault(row, []).append(item.name)
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    matrix = config.stash[MATRIX]
    if matrix.struck or matrix.failed:
        terminalreporter.section("faults")
        for line in matrix.table(whole=config.getoption("--all-faults")):
            terminalreporter.write_line(line)


@pytest.fixture
def matrix(request: pytest.FixtureRequest) -> Matrix:
    return request.config.stash[MATRIX]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    there = {path.name for path in Path("/dev/shm").iterdir()}
    one = Nursery()
    yield one
    one.close()
    left = {path.name for path in Path("/dev/shm").iterdir()} - there
    mapped = "".join(_maps(path) for path in Path("/proc").glob("[0-9]*/maps"))  # of other programs, which live
    assert not [name for name in left if f"/dev/shm/{name}" not in mapped]


def _maps(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of all runs, its data prepared."""
    folder = tmp_path_factory.mktemp("data")
    chats(folder, 55)
    chats(folder, 7, "held_out.jsonl")
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder))
    subprocess.run([sys.executable, "-m", "sft", "data", "prepare", str(path)], check=True, capture_output=True)
    return path


@pytest.fixture(scope="session")
def undisturbed(nursery: Nursery, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A run of 12 steps, as a user starts it."""
    case = Case(nursery, recipe, tmp_path_factory.mktemp("undisturbed"))
    assert case.torchrun().wait(200) == [0], case.starts[-1].told()
    return case


@pytest.fixture(scope="session")
def reference(undisturbed: Case) -> End:
    return end_of(undisturbed)


@pytest.fixture
def case(nursery: Nursery, recipe: Path, tmp_path: Path) -> Iterator[Callable[..., Case]]:
    """`case("name", "checkpoint.async_save=true")`: a run in a folder of its own."""
    made: list[Case] = []

    def make(name: str, *overrides: str, recipe: Path = recipe) -> Case:
        made.append(Case(nursery, recipe, tmp_path / name, overrides))
        return made[-1]

    yield make
    for one in made:
        for start in one.starts:
            start.end()


@pytest.fixture(scope="session")
def cut_off(nursery: Nursery, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A run that was killed in step 7: with checkpoints of the steps 1 to 6."""
    case = Case(nursery, recipe, tmp_path_factory.mktemp("cut_off"))
    start = case.start({"at": "sft.mcore.engine:Engine.train_step", "call": 7, "do": "kill-all", "rank": 0})
    assert start.wait() == [-9, -9] and case.steps() == [1, 2, 3, 4, 5, 6], start.told()
    return case


@pytest.fixture
def cut(cut_off: Case, case: Callable[..., Case]) -> Callable[..., Case]:
    """`cut("name", ...)`: a copy of that run, to go on from."""

    def make(name: str, *overrides: str) -> Case:
        one = case(name, *overrides)
        shutil.copytree(cut_off.run, one.run)
        return one

    return make


def manifest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found
