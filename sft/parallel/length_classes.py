"""Decides which sequences of a microbatch one call of a flash kernel computes.

FlashAttention-2 starts ceil(longest / BLOCK) thread blocks for every sequence and head: by queries in forward, by keys
in backward.  Blocks after the end of a shorter sequence return at once, but starting them takes time.  One document of
64K tokens and 512 documents of 128 tokens start 525,312 blocks per head in backward at cp 8, and only 1,568 of these
blocks compute something.  So sequences of similar lengths form a class, and each class is one call.

The sequences are sorted by the number of their blocks, and cut into classes so that the cost is least.  The cost is the
number of started blocks, plus CALL_BLOCKS per call, plus COPY_BLOCKS per token that must be copied.  If one call for
all sequences costs least, there is one class.
"""

import numpy as np

BLOCK = 128  # queries or keys of a thread block of FlashAttention-2; for some widths of heads it is 64
# Costs in started blocks of one head; assumed, not measured.
CALL_BLOCKS = 256  # of each call after the first
COPY_BLOCKS = 0.4  # of copying the rows of a token to its class and back


def length_classes(num_queries: np.ndarray, num_keys: np.ndarray) -> list[np.ndarray]:
    """The sequences of each class, as ascending indices.

    num_queries, num_keys: int64 [sequences], numbers of queries and keys of each sequence

    keys 65536, 128, 128, ..., 128 (1,024 times) -> [1, 2, ..., 1024], [0]
    """
    blocks = np.stack([-(-num_queries // BLOCK), -(-num_keys // BLOCK)], axis=1)
    order = np.lexsort((np.arange(len(blocks)), blocks[:, 0], blocks[:, 1]))
    kinds, counts = np.unique(blocks[order][:, ::-1], axis=0, return_counts=True)  # by keys, then by queries
    copies = COPY_BLOCKS * float(num_queries.sum())
    if not may_pay(kinds, counts, float(num_queries.sum())):
        return [np.arange(len(blocks))]
    ends, cost = _cuts(kinds, counts)
    if cost + copies >= _in_one_call(kinds, counts):
        return [np.arange(len(blocks))]
    stops = np.cumsum(counts)[np.array(ends) - 1]
    return [np.sort(part) for part in np.split(order, stops[:-1])]


def may_pay(kinds: np.ndarray, counts: np.ndarray, tokens: float) -> bool:
    """Whether classes may cost less than one call.  If not, even classes in which every block has work cost more.

    kinds: [kinds, 2], blocks of keys and of queries of a sequence; counts: sequences of each kind, also fractions
    tokens: queries of all sequences
    """
    return bool(_in_one_call(kinds, counts) - counts @ kinds.sum(1) > COPY_BLOCKS * tokens + CALL_BLOCKS)


def _in_one_call(kinds: np.ndarray, counts: np.ndarray) -> float:
    return float(counts.sum() * (kinds[:, 0].max() + kinds[:, 1].max()))


def _cuts(kinds: np.ndarray, counts: np.ndarray) -> tuple[list[int], float]:
    """Cut `kinds` into classes of the least cost.  Returns the end of each class (exclusive) and the cost.

    The cost is the number of started blocks, plus CALL_BLOCKS for each call but the first.

    kinds: int64 [kinds, 2], blocks of keys and of queries of a sequence, ascending; counts: sequences of each kind
    """
    least, first = np.zeros(len(kinds) + 1), np.zeros(len(kinds) + 1, dtype=int)
    before = np.concatenate([[0], np.cumsum(counts)])
    for end in range(1, len(kinds) + 1):
        # widest[start]: the blocks that each sequence of a class kinds[start:end] starts
        widest = np.maximum.accumulate(kinds[:end, 1][::-1])[::-1] + kinds[end - 1, 0]
        costs = least[:end] + (before[end] - before[:end]) * widest + CALL_BLOCKS
        first[end] = int(costs.argmin())
        least[end] = costs[first[end]]
    ends = [len(kinds)]
    while first[ends[0]]:
        ends.insert(0, int(first[ends[0]]))
    return ends, float(least[-1]) - CALL_BLOCKS
