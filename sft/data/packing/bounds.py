"""How level a global batch can be at best, whatever the assignment.

Decides three limits of what `balance.py` can reach, 1 where nothing stands in the way:

    longest     no rank computes less than the longest sequence:  total / (dp * cost of that)
    full        nor less than its share of tokens, as the other ranks have no room for them
    microbatch  the same where ranks wait for each other after every microbatch

Longest 100 of a total of 400, dp 8 -> 400 / (8 * 100) = 0.5: only more context parallelism helps, which makes dp
smaller and has more ranks compute that sequence.
"""

from dataclasses import dataclass

import numpy as np

from sft.data.packing.balance import costs
from sft.parallel.alignment import aligned


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Efficiencies that no assignment exceeds."""

    longest: float
    full: float
    microbatch: float


def bounds(
    lengths: np.ndarray, *, dp: int, num_microbatches: int, seq_length: int, doc_multiple: int, crossover: float
) -> Bounds:
    """Of the sequences of one global batch on dp ranks of num_microbatches packs each."""
    sizes = aligned(lengths, doc_multiple)
    work = costs(lengths, doc_multiple=doc_multiple, crossover=crossover)
    total, longest = int(work.sum()), int(work.argmax())
    full = _rest_of_its_rank(sizes, work - sizes, longest, int(sizes.sum()) - (dp - 1) * num_microbatches * seq_length)
    rows = _rows(lengths, sizes, work, (num_microbatches, dp), seq_length, crossover)
    return Bounds(
        longest=min(1.0, total / (dp * int(work[longest]))),
        full=min(1.0, total / (dp * (int(work[longest]) + full))),
        microbatch=min(1.0, total / (dp * rows)),
    )


def _rest_of_its_rank(sizes: np.ndarray, squares: np.ndarray, longest: int, least: int) -> int:
    """What else the rank of the longest sequence computes, that must take at least `least` tokens in all: them, and
    the squares of those sequences that have least per token."""
    tokens = max(0, least - int(sizes[longest]))
    cheapest = np.argsort(squares / sizes, kind="stable")
    cheapest = cheapest[cheapest != longest]
    whole = np.cumsum(sizes[cheapest]) <= tokens
    return tokens + int(squares[cheapest][whole].sum())


def _rows(
    lengths: np.ndarray, sizes: np.ndarray, work: np.ndarray, shape: tuple[int, int], seq_length: int, crossover: float
) -> float:
    """Least sum, over the rows of `shape` packs, of a row's costliest.

    The k-th costliest pack costs at least what the k-th longest sequence does, if k of them are over half a pack;
    and at most what a pack can cost whose sequences are no longer than that one.
    """
    count = shape[0] * shape[1]
    order = np.argsort(-lengths, kind="stable")[:count]
    longest = lengths[order].astype(np.float64)
    floors, ceilings = np.zeros((2, count))
    floors[: len(order)] = np.where(sizes[order] > seq_length // 2, work[order], 0)
    whole = seq_length // longest
    squares = whole * longest**2 + (seq_length - whole * longest) ** 2
    ceilings[: len(order)] = seq_length + squares / crossover + len(lengths) / 2  # costs are rounded
    floors, ceilings = floors.reshape(shape), ceilings.reshape(shape)
    least = floors[:, :1]
    missing = work.sum() - np.minimum(least, ceilings).sum()
    return float(least.sum() + max(0.0, missing) / shape[1])
