"""Fixtures for every test: pools of ranks that live as long as the session."""

from collections.abc import Callable, Iterator

import pytest

from tests.ranks.pool import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="full grids too, where a covering set stands for them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    left_out = [item for item in items if item.get_closest_marker("grid")]
    items[:] = [item for item in items if not item.get_closest_marker("grid")]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)`: a running pool of n processes."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        if world_size not in pools or not pools[world_size].alive:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()
