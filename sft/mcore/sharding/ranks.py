"""The ranks over which weights and gradients are sharded, and the ranks that hold copies of this rank's shard."""

import datetime
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ShardRanks:
    """The ranks that together hold one copy of the weights, in the order of their shards.

    size      number of these ranks
    rank      number of this rank among them, and of its shard
    members   their process group; None: this rank holds everything
    replica   number of this copy of the weights
    replicas  the process group of the ranks that hold copies of this rank's shard; None: no other rank has a copy
    made      those of these two process groups that `of` made
    """

    size: int
    rank: int
    members: dist.ProcessGroup | None
    replica: int = 0
    replicas: dist.ProcessGroup | None = None
    made: tuple[dist.ProcessGroup, ...] = ()

    @classmethod
    def of(cls, group: dist.ProcessGroup, size: int, *, timeout_s: int) -> "ShardRanks":
        """Divide `group`, the ranks that hold the same weights, into groups of `size` neighbours.  Collective.

        8 ranks, size 4 -> [0 1 2 3] and [4 5 6 7] hold one copy each; ranks 1 and 5 hold the same shard
        """
        ranks, own = dist.get_process_group_ranks(group), group.rank()
        replica, rank = divmod(own, size)

        def joined(members: list[int], name: str) -> dist.ProcessGroup | None:
            if len(members) in (1, len(ranks)):
                return group if len(members) > 1 else None
            timeout = datetime.timedelta(seconds=timeout_s)
            return dist.new_group(members, timeout=timeout, use_local_synchronization=True, group_desc=name)

        members = joined(ranks[replica * size :][:size], f"shards, replica {replica}")
        replicas = joined(ranks[rank::size], f"replicas of shard {rank}")
        made = tuple(other for other in (members, replicas) if other not in (None, group))
        return cls(size, rank, members, replica, replicas, made)

    def leave(self) -> None:
        """Destroy the groups that `of` made.  Collective on a GPU."""
        for group in self.made:
            dist.destroy_process_group(group)
