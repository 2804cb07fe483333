"""Decides which sequences of a microbatch one call of a flash kernel computes.

FlashAttention-2 starts ceil(longest / BLOCK) thread blocks for every sequence and head: by queries in forward, by keys
in backward.  Blocks behind the end of a shorter sequence return at once, but starting them takes time.  One document of
64K tokens beside 512 of 128 tokens starts 525,312 blocks a head in backward at cp 8, of which 1,568 have work.  So
sequences of similar lengths form a class, and each class is one call.

The sequences are sorted by the number of their blocks, and cut where the sum of started blocks, of CALL_BLOCKS per call
and of COPY_BLOCKS per token that must be copied is least.  They stay in one call if that is the least.
"""

import numpy as np

BLOCK = 128  # queries or keys of a thread block of FlashAttention-2; for some widths of heads it is 64
CALL_BLOCKS = 256  # started blocks, of one head, in the time of a further call; assumed
COPY_BLOCKS = 0.4  # started blocks, of one head, in the time of copying a token's rows to and from a class; assumed


def length_classes(num_queries: np.ndarray, num_keys: np.ndarray) -> list[np.ndarray]:
    """The sequences of each class, as ascending indices.  num_queries, num_keys: int64 [sequences], lengths

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
    """Whether classes without a block too many would pay.

    kinds: [kinds, 2], blocks of keys and of queries of a sequence; counts: sequences of each kind, also fractions
    tokens: queries of all sequences
    """
    return bool(_in_one_call(kinds, counts) - counts @ kinds.sum(1) > COPY_BLOCKS * tokens + CALL_BLOCKS)


def _in_one_call(kinds: np.ndarray, counts: np.ndarray) -> float:
    return float(counts.sum() * (kinds[:, 0].max() + kinds[:, 1].max()))


def _cuts(kinds: np.ndarray, counts: np.ndarray) -> tuple[list[int], float]:
    """The ends of the classes among `kinds`, and their started blocks with CALL_BLOCKS for each call but the first.

    kinds: int64 [kinds, 2], blocks of keys and of queries of a sequence, ascending; counts: sequences of each kind
    """
    least, first = np.zeros(len(kinds) + 1), np.zeros(len(kinds) + 1, dtype=int)
    before = np.concatenate([[0], np.cumsum(counts)])
    for end in range(1, len(kinds) + 1):
        widest = np.maximum.accumulate(kinds[:end, 1][::-1])[::-1] + kinds[end - 1, 0]  # of a class kinds[start:end]
        costs = least[:end] + (before[end] - before[:end]) * widest + CALL_BLOCKS
        first[end] = int(costs.argmin())
        least[end] = costs[first[end]]
    ends = [len(kinds)]
    while first[ends[0]]:
        ends.insert(0, int(first[ends[0]]))
    return ends, float(least[-1]) - CALL_BLOCKS
