"""The context-parallel (CP) groups of a run: which ranks share a pack.

With parallel.dynamic_cp, every pack has a CP size of its own.  The groups of each size are made once, at the start.
They nest, and the ranks of a group are consecutive:

    cp 8    size 8    0 1 2 3 4 5 6 7
            size 4    0 1 2 3|4 5 6 7
            size 2    0 1|2 3|4 5|6 7
            size 1    every rank has packs of its own
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist  # takes a second, which errors about recipes need not wait for


@dataclass(frozen=True)
class CpGroup:
    """The ranks that share a pack, and the rank of this process among them.

    members: the process group; None: this rank has the whole pack
    """

    size: int
    rank: int
    members: "dist.ProcessGroup | None"


def cp_sizes(cp: int) -> tuple[int, ...]:
    """The CP sizes that a pack may have with dynamic CP: the powers of two that divide cp, and cp itself.

    cp 8 -> 1, 2, 4, 8        cp 6 -> 1, 2, 6
    """
    powers = [1 << bit for bit in range(cp.bit_length()) if cp % (1 << bit) == 0]
    return tuple(sorted({*powers, cp}))
