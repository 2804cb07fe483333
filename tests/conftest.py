"""Makes pools of ranks that live as long as the pytest session, and deselects the tests that `make test` leaves out."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import cards
from tests.cards import measured  # noqa: F401 - a fixture of all tests
from tests.object_store import s3  # noqa: F401 - a fixture of all tests
from tests.ranks.pool import RankPool, Ranks

os.environ["HF_HUB_OFFLINE"] = "1"  # no test contacts the hub; tests/unit/fixtures/hub.py serves a hub on this machine
os.environ["SFT_CACHE"] = "/nonexistent"  # no test uses calibration constants that were measured on this machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="full grids too, where a covering set stands for them")
    parser.addoption("--cards", action="store_true", help="only the tests that fill cards, one of each line at least")
    parser.addoption("--all-faults", action="store_true", help="not only the fault tests that are marked quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = []
    for item in items:
        cards.note(item)
    if config.getoption("--cards"):
        left_out += cards.not_needed(items)
    elif not config.getoption("--all"):
        left_out += [item for item in items if item.get_closest_marker("grid")]
    if not config.getoption("--all-faults"):
        faults = [item for item in items if Path(__file__).parent / "faults" in item.path.parents]
        left_out += [item for item in faults if not item.get_closest_marker("quick")]
    chosen = {*items} - {*left_out}
    items[:] = [item for item in items if item in chosen]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(n)`: a running pool of n processes."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        if world_size not in pools or not pools[world_size].alive:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()
