"""Fixtures for every test: pools of ranks that live as long as the session."""

from collections.abc import Callable, Iterator

import pytest

from tests.ranks.pool import RankPool


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
