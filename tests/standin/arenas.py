"""Page-locks memory for tensors of these sizes, by torch's allocator or in an arena, and prints the bytes.

python -m tests.standin.arenas torch 50331648 25165824
"""

import json
import sys

import torch

from sft.mcore import device as devices
from sft.mcore.page_locked import Arena, aligned
from tests.standin import answers
from tests.standin.calls import counted


def main(way: str, sizes: list[int]) -> None:
    answers.give()
    device = devices.start("cuda")
    if way == "torch":
        tensors = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for num_bytes in sizes]
    else:
        arena = Arena(sum(map(aligned, sizes)), device)
        tensors = [arena.take((num_bytes,), torch.uint8) for num_bytes in sizes]
        del arena
    assert all(tensor.is_pinned() for tensor in tensors)
    locked = counted().most_host_bytes
    del tensors
    torch._C._host_emptyCache()
    print(json.dumps({"locked": locked, "after": counted().host_bytes}))


if __name__ == "__main__":
    main(sys.argv[1], [int(word) for word in sys.argv[2:]])
