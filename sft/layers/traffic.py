"""The bytes that a layer receives from the other ranks that share a pack, by the lengths of its documents."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np  # only for types: mistakes in a recipe are reported before numpy is imported


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How often a layer runs in a microbatch.

    num    passes that receive numbers of `width` bytes: forward and backward, and recomputation
    width  bytes of a number; gradients of keys and values are summed in fp32
    """

    num: int
    width: int

    @property
    def of_key(self) -> int:
        """Bytes of a number of a key in all passes, and of its gradient in fp32.  bf16, forward and backward -> 8"""
        return self.num * self.width + 4


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of a layer in all passes of a microbatch.

    gathered  bytes of a token that arrive at each other rank: of its keys and values, and of their gradients
    """

    gathered: float = 0.0

    def others(self, padded: "np.ndarray", cp_size: int) -> "np.ndarray":
        """Bytes of other messages of each document, over all ranks of the group: float64 [n].

        padded: padded lengths
        """
        return padded * 0.0


@dataclass(frozen=True, kw_only=True)
class HaloTraffic(Traffic):
    """Bytes of the tokens before each chunk that a layer with a window reads.  token_bytes: of one of them"""

    token_bytes: float
    window: int

    def others(self, padded: "np.ndarray", cp_size: int) -> "np.ndarray":
        return self.token_bytes * halo_tokens(padded, self.window, cp_size)


def halo_tokens(padded: "np.ndarray", window: int, cp_size: int) -> "np.ndarray":
    """Tokens before their chunks that all ranks of a group together receive for each document: int64 [n].

    The sum of `halo.num_halo_tokens` over documents: 12 tokens, window 3, cp_size 3 -> 8
    """
    chunk, total = padded // (2 * cp_size), padded * 0
    for rank in range(cp_size):
        before_early, before_late = rank * chunk, (2 * cp_size - 2 - 2 * rank) * chunk  # not held by the rank itself
        total = total + before_early.clip(max=window - 1) + before_late.clip(max=window - 1)
    return total
