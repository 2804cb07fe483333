"""Counts the thread blocks that torch's flash kernel starts on a pack, and prints them as a line of JSON.

    python -m tests.standin.grids RANK 128 65536 128 128      a rank of cp 8, and the lengths of documents

started  blocks of the calls that a run makes, forward and backward
work     blocks if each sequence had a call of its own: those of the same calls that have tokens
one      blocks if all sequences had one call
"""

import json
import sys
from collections.abc import Sequence
from unittest import mock

import numpy as np
import torch

from sft.mcore.attention import flash_kernel
from sft.mcore.attention.flash2 import FLASH2
from sft.mcore.attention.flash_kernel import FlashKernel
from tests.standin.calls import counted

CP, HEADS, GROUPS, WIDTH = 8, 4, 2, 128
WAYS = {
    "started": flash_kernel.length_classes,
    "work": lambda queries, keys: [np.array([number]) for number in range(len(queries))],
    "one": lambda queries, keys: [np.arange(len(queries))],
}


def blocks(lengths: Sequence[int], rank: int) -> int:
    """The blocks of a forward and a backward pass, and of nothing else: no other kernel's grid has a third axis."""
    boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    kernel = FlashKernel.of(boundaries, CP, rank, torch.device("cuda"), operators=FLASH2)
    tokens, num_keys = sum(lengths) // CP, len(kernel.key_source.key_order)  # type: ignore[attr-defined]
    query, grad = (torch.empty(tokens, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    keys, values = (torch.empty(num_keys, GROUPS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    before = counted().deep_blocks
    out, lse = kernel.forward(query, keys, values, 0.1)
    kernel.backward(grad, query, keys, values, out, lse, 0.1)
    return counted().deep_blocks - before


def main(rank: int, lengths: Sequence[int]) -> None:
    found = {}
    for name, classes in WAYS.items():
        with mock.patch.object(flash_kernel, "length_classes", classes):
            found[name] = blocks(lengths, rank)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(word) for word in sys.argv[2:]])
