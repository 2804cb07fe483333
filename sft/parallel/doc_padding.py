"""How long a document is once padded: the one place that knows.

The over-long policy, the planner and the packer all count with this function.  A packer that measures real
lengths overfills its packs: 992 documents of 33 tokens are 32,736 real tokens, and 63,488 at doc_multiple 64.
"""

from typing import TypeVar

import numpy as np

Lengths = TypeVar("Lengths", int, np.ndarray)


def aligned(length: Lengths, doc_multiple: int) -> Lengths:
    """Length rounded up to a multiple of `doc_multiple`; for an int or an array.

    aligned(33, 32) -> 64        aligned(np.array([1, 32, 33]), 32) -> [32, 32, 64]
    """
    return -(-length // doc_multiple) * doc_multiple
