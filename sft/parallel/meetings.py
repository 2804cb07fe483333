"""Decides which ranks wait for each other within a step, so that the slowest of them sets the time of a microbatch."""

from math import lcm

from sft.config import Config

ALL_RANKS = 1 << 30  # a number larger than any number of ranks; stands for all ranks of the dp x cp grid


def meeting_ranks(config: Config) -> int:
    """The number of consecutive ranks of the dp x cp grid that wait for each other in every microbatch.

    1 means that only the ranks that share a pack wait for each other.  A number above the size of the grid means that
    all its ranks wait for each other.

    cp 2, ep 8 -> 8        cp 2, weights sharded over dp x cp -> ALL_RANKS, rounded up        cp 4, pp 2 -> 4
    """
    parallel = config.parallel
    ranks = parallel.cp if parallel.pp > 1 else 1
    if parallel.ep * parallel.etp > 1:  # an expert group has consecutive ranks; tp of them are one rank of the grid
        groups = -(-parallel.ep * parallel.etp // parallel.tp)
        ranks = -(-max(ranks, groups) // parallel.cp) * parallel.cp
    if parallel.shards_gradients:  # the ranks of a shard group meet in each layer
        size = parallel.shard_size or ALL_RANKS
        if config.model.moe.num_experts is not None:  # the shard group of an expert has every (ep x etp)-th rank
            size = max(size, -(-size * parallel.ep * parallel.etp // parallel.tp))
        ranks = lcm(ranks, -(-size // parallel.cp) * parallel.cp)
    return ranks


def domain(meeting: int, num_ranks: int) -> int:
    """The number of consecutive ranks that wait for each other in a grid of `num_ranks`: `meeting`, or all ranks if it
    does not divide num_ranks.

    12 ranks, meeting 4 -> 4        12 ranks, meeting 8 -> 12
    """
    return meeting if num_ranks % meeting == 0 else num_ranks
