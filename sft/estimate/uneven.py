"""Predicts how much longer attention takes on the slowest rank, because packs differ in work.

The packs of a step are drawn at random from the distribution of lengths, with a fixed seed.  As in
sft/data/packing/level.py, they are sorted by the cost of their attention, the costliest first, and consecutive packs
form a row: the packs of ranks that wait for each other.  A row takes as long as its first pack.  If ranks wait for each
other only at the end of a step, all ranks count as having the same work, unless a pack is too costly for that: the rank
with the costliest pack has at least this pack and the cheapest packs of the step.

With dynamic CP, documents are drawn instead.  Each document takes the smallest group of ranks that holds it.  A long
document, which takes longer than a mean microbatch, is alone in its group.  Long documents form rows as packs do.  The
other documents fill the ranks of a row up to the time of the row, if the ranks can hold their tokens
(sft/data/packing/cp_rows.py).
"""

from functools import lru_cache

import numpy as np

from sft.config import Config
from sft.estimate.layer_work import cp_sizes
from sft.estimate.lengths import Lengths
from sft.layers.flops import AttentionCost
from sft.parallel.layout import Layout
from sft.parallel.meetings import domain, meeting_ranks

NUM_PACKS = 256  # packs that are drawn
MAX_DOCUMENTS = 32_768  # of all drawn packs.  Fewer packs are drawn if they have many documents and so differ little
OPEN_PACKS = 8  # packs that are filled at the same time
NUM_STEPS = 16  # steps that are made from the drawn packs
NUM_BATCHES = 4  # with dynamic CP, steps whose documents are drawn


def slowest(config: Config, layout: Layout, lengths: Lengths) -> float:
    """Time of attention in a step / the time if all packs had the same attention.  1: all packs have the same."""
    if len(lengths.tokens) == 1 or (layout.dp == 1 and not layout.cp_sizes):
        return 1.0
    if layout.cp_sizes:
        return _slowest_of_groups(config, layout, lengths)
    width = max(1, domain(meeting_ranks(config), layout.dp * layout.cp) // layout.cp)
    of_lengths = tuple(lengths.tokens.tolist()), tuple(lengths.shares.tolist()), config.data.seq_length
    return _slowest(*of_lengths, AttentionCost.of(config.model), layout.dp, layout.num_microbatches, width)


@lru_cache(maxsize=1024)
def _slowest(
    tokens: tuple[float, ...],
    shares: tuple[float, ...],
    seq_length: int,
    attention: AttentionCost,
    dp: int,
    num_microbatches: int,
    width: int,
) -> float:
    drawn = _packs(tokens, shares, seq_length, attention)
    chosen = np.random.RandomState(1).randint(len(drawn), size=(NUM_STEPS, dp * num_microbatches))
    return float(np.mean([of_step(packs, dp, width) for packs in drawn[chosen]]))


def _slowest_of_groups(config: Config, layout: Layout, lengths: Lengths) -> float:
    """The result of `slowest` with dynamic CP."""
    tokens, counts = lengths.of_pack(config.data.seq_length)
    return _of_groups(
        tuple(tokens.tolist()),
        tuple(lengths.shares.tolist()),
        max(1, round(float(counts.sum()) * layout.global_batch_size)),
        tuple(cp_sizes(layout, tokens, config)),
        AttentionCost.of(config.model),
        (layout.dp * layout.cp, domain(meeting_ranks(config), layout.dp * layout.cp)),
        config.data.seq_length // layout.cp,
    )


@lru_cache(maxsize=1024)
def _of_groups(
    tokens: tuple[float, ...],
    shares: tuple[float, ...],
    number: int,
    sizes: tuple[int, ...],
    cost: AttentionCost,
    ranks: tuple[int, int],
    rank_tokens: int,
) -> float:
    """The factor for a distribution of lengths.

    number: documents of a step; sizes: ranks of the group of a document with each length
    ranks: (number of all ranks, number of ranks that wait for each other); rank_tokens: tokens that a rank holds
    """
    own, of_group = np.array(tokens), np.array(sizes)
    attention = cost(own)
    drawn = np.random.RandomState(2).choice(len(own), size=(NUM_BATCHES, number), p=shares)
    extra = [of_groups(own[step], attention[step], of_group[step], *ranks, rank_tokens) for step in drawn]
    mean = float(attention[drawn].sum()) / NUM_BATCHES / ranks[0]
    return 1.0 + float(np.mean(extra)) / mean if mean else 1.0


def of_groups(
    tokens: np.ndarray, attention: np.ndarray, sizes: np.ndarray, ranks: int, meeting: int, rank_tokens: int
) -> float:
    """Time of one step beyond the mean work of a rank, in units of a token's computation.

    Arrays have an entry for each document.  sizes: ranks of its group; meeting: number of ranks that wait for each
    other in every microbatch; rank_tokens: tokens that a rank holds

    Documents that take 9 and 3 on a rank each, two ranks that wait, and room for all -> 9 - 6
    """
    times = (tokens + attention) / sizes
    work = times * sizes
    mean = float(work.sum()) / ranks
    longest = float(times.max())
    if meeting == 1:
        return max(longest, mean) - mean
    num_rows = -(-float(tokens.sum()) // (ranks * rank_tokens)) * ranks / meeting
    is_long = times > float(work.sum()) / meeting / num_rows
    rows: list[list[float]] = []  # [time, free ranks, further work that fits, further tokens that fit]
    for time, size, count in sorted(zip(times[is_long], sizes[is_long], tokens[is_long]), reverse=True):
        row = next((row for row in rows if row[1] >= size), None)
        if row is None:
            row = [time, meeting, time * meeting, rank_tokens * meeting]
            rows.append(row)
        row[1:] = row[1] - size, row[2] - time * size, row[3] - count
    left, others = float(work[~is_long].sum()), float(tokens[~is_long].sum())
    density = left / others if others else 0.0
    left -= min(left, sum(min(row[2], row[3] * density) for row in rows))
    step = (sum(row[0] for row in rows) + left / meeting) * meeting / ranks
    return max(step, longest, mean) - mean


def of_step(packs: np.ndarray, dp: int, width: int) -> float:
    """The factor of one step.  packs: attention of each pack; width: number of packs whose ranks wait for each other

    Packs of 9 5 4 2 on two ranks:  all wait -> (9 + 4) / 10        none waits -> (9 + 2) / 10
    """
    falling = -np.sort(-packs)
    mean = falling.sum() / dp
    if not mean:
        return 1.0
    others = len(packs) // dp - 1
    rows = falling[::width].sum() * width / dp
    alone = falling[0] + falling[len(packs) - others :].sum()
    return float(max(rows, alone, mean) / mean)


@lru_cache(maxsize=16)
def _packs(
    tokens: tuple[float, ...], shares: tuple[float, ...], seq_length: int, attention: AttentionCost
) -> np.ndarray:
    """The cost of attention of the drawn packs: float64 [packs], about NUM_PACKS or fewer.

    A document goes into the fullest open pack that has room for it.
    """
    limited = np.minimum(tokens, seq_length)
    in_pack = seq_length / (shares @ limited)
    number = int(max(min(NUM_PACKS * in_pack, MAX_DOCUMENTS), OPEN_PACKS * in_pack)) + 1
    drawn = np.random.RandomState(0).choice(len(limited), size=number, p=shares)
    sizes, costs = limited[drawn].tolist(), attention(limited)[drawn].tolist()
    packs: list[tuple[float, float]] = []
    opened: list[tuple[float, float]] = []  # (tokens that still fit, cost of attention)
    for size, cost in zip(sizes, costs):
        fitting = [pack for pack in opened if pack[0] >= size]
        if fitting:
            left, before = min(fitting)
            opened.remove((left, before))
        else:
            left, before = float(seq_length), 0.0
            if len(opened) == OPEN_PACKS:
                packs.append(min(opened))
                opened.remove(min(opened))
        opened.append((left - size, before + cost))
    return np.array([cost for _, cost in packs + opened])
