"""Linear attention over trees on real ranks: each text as if it was alone, isolation, launches and bytes.

tests/ranks/test_state_passing.py has the reference: the recurrence, token by token, over the path of each document.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sft.layers.mixers.recurrent import StateTraffic
from sft.layers.traffic import Passes, halo_tokens
from sft.parallel.branches import Branches
from sft.parallel.halo import Halo
from tests.ranks.pool import Ranks
from tests.ranks.test_state_passing import SIZES, TAPS, attend, compare, expected, padded

# Two trees between plain documents, and a filler document.  Document 1 has three branches after 130 tokens and one
# after 37, inside chunks of 64.  5 and 8 begin after the last real token of their parents; 8's parent has no padding.
# The convolution reads tokens of three documents before the first token of 12.
LENGTHS = [65, 300, 90, 5, 200, 30, 65, 24, 12, 25, 40, 50, 3, 0]
PARENTS = [-1, -1, 1, 2, 1, 4, 1, 1, 7, -1, -1, 10, 11, -1]
FORKS = [0, 0, 37, 1, 130, 200, 130, 130, 24, 0, 0, 2, 1, 0]
BRANCHES = Branches.of(PARENTS, FORKS)
DTYPES = {1: torch.float64, 2: torch.float64, 4: torch.float32}


@pytest.mark.parametrize("cp_size,max_short", [(1, 0), (2, 0), (2, 72), (4, 72), (4, 10**6)])
def test_each_text_is_as_if_it_was_alone(ranks: Ranks, cp_size: int, max_short: int) -> None:
    """Whether all documents are cut into chunks, some, or none."""
    dtype = DTYPES[cp_size]
    results = ranks(cp_size).run(attend, LENGTHS, max_short, SIZES, dtype, None, BRANCHES)
    compare(results, expected(tuple(LENGTHS), SIZES, BRANCHES), dtype)


def test_a_branch_does_not_know_its_siblings(ranks: Ranks) -> None:
    """Bitwise, on two ranks: document 4 changes outputs of itself and of 5, and gradients of 1 before the fork too."""
    cu_seqlens = padded(LENGTHS)
    before, after = (ranks(2).run(attend, LENGTHS, 72, SIZES, torch.float32, other, BRANCHES) for other in (None, 4))
    for ours, theirs in zip(before, after):
        document = np.searchsorted(cu_seqlens, ours["rows"].numpy(), side="right") - 1
        is_seen, is_parent = torch.from_numpy(np.isin(document, [4, 5])), torch.from_numpy(document == 1)
        assert torch.equal(ours["out"][~is_seen], theirs["out"][~is_seen])
        assert not torch.equal(ours["out"][document == 5], theirs["out"][document == 5])
        for index in (0, 2, 3):
            x, y = (result["gradients"][index] for result in (ours, theirs))
            assert torch.equal(x[~is_seen & ~is_parent], y[~is_seen & ~is_parent])


@pytest.mark.parametrize("cp_size, fragments", [(2, 62), (4, 82)])
def test_the_bytes_are_those_of_the_formula(ranks: Ranks, cp_size: int, fragments: int) -> None:
    """On two ranks, 14 documents of 4 chunks, and 6 forks inside of chunks: 37, 130, 1, 200, 2 and 1.  On four ranks,
    documents of 24 tokens are short: 9 documents of 8 chunks, the 6 forks, and 4 short documents of trees.
    """
    sizes = replace(SIZES, width=4)
    results = ranks(cp_size).run(attend, LENGTHS, sizes.max_short(cp_size), sizes, torch.float32, None, BRANCHES)
    cu_seqlens = padded(LENGTHS)
    lengths = np.diff(cu_seqlens)
    halos = [Halo.of(cu_seqlens, TAPS, cp_size, rank, BRANCHES) for rank in range(cp_size)]
    row = sizes.channels * sizes.width
    halo = sum(sum(x.num_received) for x in halos) * row
    short = int(lengths[lengths <= sizes.max_short(cp_size)].sum()) * (cp_size - 1) // cp_size * sizes.token_bytes
    num_bytes = fragments * (cp_size - 1) * sizes.map_bytes // cp_size + short + halo
    assert sum(result["forward"] for result in results) == num_bytes
    assert sum(result["backward"] for result in results) == num_bytes
    formula = StateTraffic(heads=sizes, conv_kernel=TAPS, passes=Passes(num=1, of_attention=1, width=4))
    most_halo = int(halo_tokens(lengths, TAPS, cp_size, BRANCHES).sum()) * row
    assert formula.others(lengths, cp_size, BRANCHES).sum() == num_bytes - halo + most_halo
    assert halo <= most_halo
