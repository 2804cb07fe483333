"""How long rows are, and how many of them a seq_length holds: exact counts, from arrays of lengths alone.

Decides the buckets of the histogram, what a quantile is, and which values of seq_length are compared.  Lengths here
are those of whole rows, each once, whatever data.over_long makes of them.  Does not read tokens (`scan.py`).
"""

from dataclasses import dataclass

import numpy as np

from sft.parallel.alignment import aligned


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Rows of at_least <= length < below, and the tokens in them."""

    at_least: int
    below: int
    rows: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What fits whole into one seq_length: counts, and their shares of everything."""

    seq_length: int
    is_recipe: bool
    rows: int
    tokens: int
    supervised: int
    rows_share: float
    tokens_share: float
    supervised_share: float


def quantiles(lengths: np.ndarray) -> tuple[int, int, int]:
    """p50, p90, p99: each the smallest length that so large a share of the rows does not exceed.

    1 2 3 4 5 6 7 8 9 10 -> 5, 9, 10
    """
    middle, high, highest = np.quantile(lengths, [0.5, 0.9, 0.99], method="inverted_cdf")
    return int(middle), int(high), int(highest)


def histogram(lengths: np.ndarray) -> tuple[Bucket, ...]:
    """Powers of two from the shortest row's to the longest's, empty ones between them included.

    5 6 17 -> 4 to 8: 2 rows of 11 tokens, 8 to 16: none, 16 to 32: 1 of 17
    """
    powers = np.frexp(lengths)[1] - 1  # floor of log2, exact for every length below 2 ** 53
    return tuple(
        Bucket(
            at_least=1 << power,
            below=2 << power,
            rows=int(np.count_nonzero(powers == power)),
            tokens=int(lengths[powers == power].sum()),
        )
        for power in range(int(powers.min()), int(powers.max()) + 1)
    )


def retention(
    lengths: np.ndarray, supervised: np.ndarray, *, doc_multiple: int, seq_length: int
) -> tuple[Retention, ...]:
    """The share that fits whole, at the recipe's seq_length and at others: powers of two and half-way between them.

    lengths 30 40 90, each padded to a multiple of 32 -> 32 64 96
    seq_length 32: 1 of 3 rows, 30 of 160 tokens; 48: the same; 64: 2 rows, 70 tokens; 96: all
    """
    padded = aligned(lengths, doc_multiple)
    points = []
    for size in sorted({*_candidates(int(padded.min()), int(padded.max())), seq_length}):
        fits = padded <= size
        counts = int(fits.sum()), int(lengths[fits].sum()), int(supervised[fits].sum())
        wholes = len(lengths), int(lengths.sum()), int(supervised.sum())
        shares = [count / whole if whole else 0.0 for count, whole in zip(counts, wholes, strict=True)]
        points.append(
            Retention(
                seq_length=size,
                is_recipe=size == seq_length,
                rows=counts[0],
                tokens=counts[1],
                supervised=counts[2],
                rows_share=shares[0],
                tokens_share=shares[1],
                supervised_share=shares[2],
            )
        )
    return tuple(points)


def _candidates(shortest: int, longest: int) -> list[int]:
    """From the first that holds the shortest to the first that holds the longest.  30, 90 -> 32 48 64 96"""
    sizes = sorted(size for power in range(1, longest.bit_length() + 1) for size in (1 << power, 3 << (power - 1)))
    first, last = np.searchsorted(sizes, [shortest, longest])
    return sizes[first : last + 1]
