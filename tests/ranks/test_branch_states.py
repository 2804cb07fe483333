"""Linear attention over trees on real ranks: each text as if it was alone, isolation, launches and bytes.

tests/ranks/test_state_passing.py has the reference: the recurrence, token by token, over the path of each document.
"""

import numpy as np
import pytest
import torch

from sft.parallel.branches import Branches
from tests.ranks.pool import Ranks
from tests.ranks.test_state_passing import SIZES, attend, compare, expected, padded

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
