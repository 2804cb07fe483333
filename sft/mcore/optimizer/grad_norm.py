"""The sum of squares of many gradients, in float64, without a wide copy of any of them.

Decides in what precision squares are added, and how much is read at once.  Which gradients count, over which ranks
they are added, and what the norm is used for, `build.py` decides.

torch's norm of an fp32 tensor on a CPU adds the squares one after another, in fp32.  Once the sum is large, what is
added to it is rounded away.  Of 151,936 x 128 values with a few large rows the norm came out 1.5e-4 too small, of
78,000,000 normal values 7.5e-3.

`torch._foreach_norm` with a dtype adds in float64.  On a CPU it makes a float64 copy of each tensor, and so is given
pieces of them.  On a GPU it makes none (torch's ForeachReduceOp.cu): a thread converts each number that it reads, 512
of them add 65,536, and a second kernel adds those sums.  In fp32 some 90 roundings would lie between one of 1e9
numbers and their sum, an error of at most 3e-6 of the norm; float64 has none to speak of, for one multiplication and
one addition for every 4 bytes that are read.  `torch.linalg.vector_norm` with a dtype would copy on a GPU, too.  No
GPU has run this yet.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

# Numbers that are read at once.  A CPU makes a float64 copy of them, 512 KiB, which fits the cache of a core.  A GPU
# makes none: its kernel converts each number it reads, adds 65,536 of them in a block, and keeps 8 bytes for a block.
# It keeps as many of those for each piece as the largest piece has blocks: here 2 KiB, 2 MiB for 8e9 parameters.
_PIECE = {"cpu": 1 << 16, "cuda": 1 << 24}


@torch.no_grad()
def sum_of_squares(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """A float64 scalar on `device`, without a host synchronisation; 0 without gradients.  Gradients are contiguous.

    [3, 4] and [[12]] -> 169.0
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for pieces in _by_device_and_dtype(gradients):
        norms = torch._foreach_norm(pieces, 2, dtype=torch.float64)
        total += torch.stack(norms).square_().sum().to(device)
    return total


def _by_device_and_dtype(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """All gradients in pieces, by device and dtype: a GPU has one kernel for such a list, and copies others."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if gradient.numel():
            groups[gradient.device, gradient.dtype].extend(gradient.view(-1).split(_PIECE[gradient.device.type]))
    yield from groups.values()
