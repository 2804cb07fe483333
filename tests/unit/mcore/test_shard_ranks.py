"""Process groups of shards, on four ranks of which this process is one."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from sft.mcore.sharding.ranks import ShardRanks


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(("size", "made"), [(2, [[2, 3], [1, 3]]), (4, []), (1, [])])
def test_only_groups_that_were_made_are_destroyed(world: dist.ProcessGroup, size: int, made: list[list[int]]) -> None:
    """Shards of two ranks: a group of this rank's shards, and one of its replicas.  Else the group exists already."""
    ranks = ShardRanks.of(world, size, timeout_s=10)
    assert [dist.get_process_group_ranks(group) for group in ranks.made] == made
    assert len(distributed_c10d._world.pg_names) == 1 + len(made)
    ranks.leave()
    assert list(distributed_c10d._world.pg_names) == [world]
