"""Fixtures of the fault tests: prepared data, a process that forks ranks, an undisturbed run, and the table of
faults."""

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft.cli import main
from tests.builders import chats
from tests.faults.matrix import Matrix
from tests.faults.runs import RECIPE, STEP, Case, End, Hit, MakeCase, text_of
from tests.rank_server import RankServer, rank_server

MATRIX = pytest.StashKey[Matrix]()
HITS = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MATRIX] = Matrix()


@pytest.fixture
def hit(request: pytest.FixtureRequest) -> Hit:
    """`hit("S1", 3)` records that three faults of row S1 struck; they count as survived if the test passes.  Without a
    number, one fault of each named row."""
    hits = request.node.stash.setdefault(HITS, Counter())
    return lambda row, times=1: hits.update({row: times})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    rows = Counter(row for mark in item.iter_markers("row") for row in mark.args)
    hits = item.stash.get(HITS, rows)
    matrix = item.config.stash[MATRIX]
    if report.when == "call" and not report.skipped:
        matrix.struck.update(hits)
        if report.passed:
            matrix.survived.update(hits)
    if report.failed:
        for row in {*rows, *hits}:
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
def server() -> Iterator[RankServer]:
    before = _shared_memory()
    one = rank_server()
    yield one
    one.close()
    deadline = time.monotonic() + 10
    while (left := _shared_memory() - before - _mapped(_shared_memory())) and time.monotonic() < deadline:
        time.sleep(0.2)  # another program may have created it just now, and not mapped it yet
    assert not left


def _shared_memory() -> set[str]:
    """Files in /dev/shm, without semaphores of multiprocessing: training makes none, and other tests leave semaphores
    of killed processes behind."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")}


def _mapped(names: set[str]) -> set[str]:
    """The names that a living process has mapped."""
    maps = "".join(text_of(path) for path in Path("/proc").glob("[0-9]*/maps"))
    return {name for name in names if f"/dev/shm/{name}" in maps}


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of all runs, with prepared data."""
    folder = tmp_path_factory.mktemp("data")
    chats(folder, 55)
    chats(folder, 7, "held_out.jsonl")
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder))
    assert main(["data", "prepare", str(path)]) == 0
    return path


@pytest.fixture(scope="session")
def reference(server: RankServer, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> End:
    """The end of an undisturbed run of 12 steps, started as a user starts it."""
    undisturbed = Case(server, recipe, tmp_path_factory.mktemp("undisturbed"))
    undisturbed.torchrun().ends(0)
    return undisturbed.end()


@pytest.fixture
def case(server: RankServer, recipe: Path, reference: End, tmp_path: Path) -> Iterator[MakeCase]:
    """`case("checkpoint.async_save=true")`: a run with this override in a folder of its own."""
    made: list[Case] = []

    def make(*overrides: str) -> Case:
        made.append(Case(server, recipe, tmp_path / str(len(made)), overrides))
        made[-1].reference = reference
        return made[-1]

    yield make
    for start in [start for one in made for start in one.starts]:
        start.end()


@pytest.fixture(scope="session")
def cut_off(server: RankServer, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A run that was killed in step 7, with checkpoints of steps 1 to 6."""
    case = Case(server, recipe, tmp_path_factory.mktemp("cut_off"))
    start = case.start({"at": STEP, "call": 7, "do": "kill-all", "rank": 0}).ends(-9)
    assert case.steps() == [1, 2, 3, 4, 5, 6], start.told()
    return case


@pytest.fixture
def cut(cut_off: Case, case: MakeCase) -> MakeCase:
    """`cut(...)`: a copy of the run `cut_off`, to continue from."""

    def make(*overrides: str) -> Case:
        one = case(*overrides)
        shutil.copytree(cut_off.run, one.run)
        return one

    return make
