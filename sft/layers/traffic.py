"""The bytes that a layer receives from the other ranks that share a pack, by the lengths of its documents."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np  # only for types, because errors in a recipe are reported before numpy is imported

    from sft.parallel.branches import Branches


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The passes of a layer in a microbatch.

    num           number of passes that receive activations: forward, backward, and with recomputation one more
    of_attention  number of passes that compute attention; smaller than num if recomputation keeps its results
    width         bytes of an element of an activation.  Gradients of keys and values are in fp32 whatever width is
    """

    num: int
    of_attention: int
    width: int

    @property
    def key_bytes(self) -> int:
        """Bytes for one element of a key in all passes of attention, and for its fp32 gradient.

        bf16, forward and backward -> 8
        """
        return self.of_attention * self.width + 4


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a layer receives in all passes of a microbatch.

    gathered  bytes per token that each other rank receives: keys and values, and their gradients
    """

    gathered: float = 0.0

    def others(self, padded: "np.ndarray", cp_size: int, branches: "Branches | None" = None) -> "np.ndarray":
        """Bytes of messages other than `gathered`, per document, summed over the ranks of the group: float64 [n].

        padded: padded lengths of the documents, int64 [n]
        branches: how these documents continue each other; None: no document is a branch
        """
        return padded * 0.0


@dataclass(frozen=True, kw_only=True)
class HaloTraffic(Traffic):
    """Bytes of halos: the tokens before each chunk that a layer with a window reads.  token_bytes: bytes per token"""

    token_bytes: float
    window: int

    def others(self, padded: "np.ndarray", cp_size: int, branches: "Branches | None" = None) -> "np.ndarray":
        return self.token_bytes * halo_tokens(padded, self.window, cp_size, branches)


def halo_tokens(padded: "np.ndarray", window: int, cp_size: int, branches: "Branches | None" = None) -> "np.ndarray":
    """Number of halo tokens that all ranks of a group together receive for each document: int64 [n].

    With branches, this is an upper bound: a rank may hold the tokens before a branch already, and it receives tokens
    before several branches only once.

    12 tokens, window 3, cp_size 3 -> 8
    """
    chunk, total, depths = padded // (2 * cp_size), padded * 0, 0 if branches is None else branches.depths
    if cp_size == 1:
        return total
    for rank in range(cp_size):
        before_early, before_late = depths + rank * chunk, (2 * cp_size - 2 - 2 * rank) * chunk  # not on the rank
        total = total + before_early.clip(max=window - 1) + before_late.clip(max=window - 1)
    return total
