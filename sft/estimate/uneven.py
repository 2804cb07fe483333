"""Predicts how much longer attention takes on the slowest rank, because packs differ in work.

The packs of a step are sorted by attention and put into rows of ranks that wait for each other, as
sft/data/packing/level.py does; a row takes as long as its first pack.  If ranks wait for each other only at the end of
a step, the work counts as even, with one exception: one rank has the costliest pack, and its other packs are at least
as costly as the cheapest packs of the step.  Packs are drawn at random from the distribution of lengths, with a fixed
seed.  With dynamic CP, ranks count as evenly loaded.
"""

from functools import lru_cache

import numpy as np

from sft.config import Config
from sft.estimate.lengths import Lengths
from sft.layers.flops import AttentionCost
from sft.parallel.layout import Layout
from sft.parallel.meetings import domain, meeting_ranks

NUM_PACKS, NUM_STEPS, OPEN_PACKS = 256, 16, 8  # packs that are drawn and filled at once, and steps that use them
MAX_DOCUMENTS = 32_768  # of the drawn packs, which are fewer if they have many documents and so differ little


def slowest(config: Config, layout: Layout, lengths: Lengths) -> float:
    """Time of attention in a step / the time if all packs had the same attention; 1: all have."""
    if layout.dp == 1 or layout.cp_sizes or len(lengths.tokens) == 1:
        return 1.0
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
    """float64 [about NUM_PACKS, or fewer]: attention of packs.

    A document goes into the fullest open pack that holds it.
    """
    limited = np.minimum(tokens, seq_length)
    in_pack = seq_length / (shares @ limited)
    number = int(max(min(NUM_PACKS * in_pack, MAX_DOCUMENTS), OPEN_PACKS * in_pack)) + 1
    drawn = np.random.RandomState(0).choice(len(limited), size=number, p=shares)
    sizes, costs = limited[drawn].tolist(), attention(limited)[drawn].tolist()
    packs: list[tuple[float, float]] = []
    opened: list[tuple[float, float]] = []  # tokens that still fit, and attention
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
