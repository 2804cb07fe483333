"""The sizes of a recurrence's states, and the bytes that it sends over cp, for all recurrences.

A token reads a state to which all earlier tokens have contributed, so its cost does not grow with the length.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sft.config import Config
from sft.layers.mixer import Mixer, MixerBytes
from sft.layers.traffic import Passes, Traffic, halo_tokens

if TYPE_CHECKING:
    import numpy as np

    from sft.parallel.branches import Branches

STATE_INTERVAL = 512  # chunked_kernel.py saves a state after this many tokens: schedule.CHUNK * schedule.INTERVAL
# The number of elements of a block of short_convolution.py, which has BLOCKS fp32 copies of a block in memory at the
# same time.  The gated norm and the recurrence need no more memory.  On a CPU a block fits the cache: 8,192 tokens of
# 2,048 channels took half the time that they took in blocks 16 times as large.  On CUDA a block has 64 MiB.
BLOCK_NUMBERS = {"cpu": 2**20, "cuda": 2**24}
BLOCKS = 6
FLA_CHUNK = 64  # tokens of a chunk in FLA's kernels
PLAIN_CHUNK = 64  # schedule.CHUNK, tokens of a chunk in plain torch
# (forward, backward): bytes per element, in bf16, that the short convolution reads and writes.  Plain torch computes in
# fp32, and tests/unit/mcore/linear_attention/test_moved_bytes.py counts its bytes.
PLAIN_CONVOLUTION, FUSED_CONVOLUTION = (68, 206), (4, 12)


def uses_fla(config: Config) -> bool:
    """Whether FLA computes recurrences and their elementwise operations in this recipe, if FLA is installed."""
    runs_on = config.run.device != "cpu" and config.run.precision == "bf16" and not config.run.deterministic
    return config.attention.delta_rule != "torch" and runs_on


@dataclass(frozen=True, kw_only=True)
class RecurrentSizes(ABC):
    """Sizes of the heads that a tensor-parallel rank holds.

    width  bytes of an element of an activation; decays, states and maps are in fp32
    """

    width: int = 2

    @property
    @abstractmethod
    def num_heads(self) -> int:
        """Heads with a state."""

    @property
    @abstractmethod
    def channels(self) -> int:
        """Channels of the convolution."""

    @property
    @abstractmethod
    def token_bytes(self) -> int:
        """Bytes per token that travel to another rank (the kernel's inputs) and back (its output)."""

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of the states of all heads."""

    @property
    @abstractmethod
    def factor_bytes(self) -> int:
        """Bytes of A of a fragment's map, of all heads."""

    @property
    def map_bytes(self) -> int:
        """Bytes that travel for a fragment: its map (A and B of each head), and the state that comes back."""
        return self.factor_bytes + 2 * self.state_bytes

    def max_short(self, cp_size: int) -> int:
        """Length of the longest document for which sending tokens takes fewer bytes than sending maps.

        The document has L tokens and 2 cp fragments.  Either (cp - 1) / cp of the tokens travel, or (cp - 1) / cp of
        the fragments' maps.  So tokens take fewer bytes if L < 2 cp * map_bytes / token_bytes.

            delta rule, 16 key heads, 48 value heads, K = V = 128, bf16: 1,141 tokens at cp 2, 2,283 at cp 4
        """
        return 0 if cp_size == 1 else (2 * cp_size * self.map_bytes - 1) // self.token_bytes


@dataclass(frozen=True, kw_only=True)
class RecurrentBytes(MixerBytes):
    """Bytes of a recurrence, for a pack of one document and of the trees of an average pack.

    `saved` is exact (tests/ranks/test_saved_tensors.py counts these bytes) except for the states of plain torch: a
    fragment saves one state for each whole interval, and `saved` does not round to whole intervals.  With cp, it counts
    the map and the state of each fragment of a tree, also those that are not saved (`state_passing.ReadRows`).

    heads          sizes of this rank's heads
    tokens         number of tokens of the pack on this rank
    block_numbers  BLOCK_NUMBERS of the device
    is_fla         whether FLA's kernels compute the layer; False: plain torch
    """

    is_recomputed = True
    heads: RecurrentSizes
    tokens: float
    block_numbers: int
    is_fla: bool = False

    @property
    def _fragments(self) -> float:
        """Number of linked fragments on the rank."""
        if self.rank.trees:
            return self.rank.trees.fragments(self.heads.max_short(self.rank.cp), self.rank.cp)
        return 0.0 if self.rank.cp == 1 else 2.0

    @property
    def _saved_maps(self) -> dict[str, float]:
        """Bytes per token of A of each linked fragment and of the state before it; nothing without such fragments.

        With cp 1, a tree saves both for each place where branches begin; all trees share the state zero.
        """
        maps = states = self._fragments
        if not maps:
            return {}
        if self.rank.cp == 1:
            maps, states = self.rank.trees.forks, self.rank.trees.forks + 1
        return {"maps": (maps * self.heads.factor_bytes + states * self.heads.state_bytes) / self.tokens}

    @property
    def _passing(self) -> float:
        """Bytes of maps and states of linked fragments while ranks pass states.

        There are three copies: the computed, the sent and the received ones.  Without cp, there are also three.
        """
        return 3 * self._fragments * self.heads.map_bytes


@dataclass(frozen=True, kw_only=True)
class StateTraffic(Traffic):
    """Bytes of maps and states of long documents and of trees, of tokens of short documents, and of the convolution's
    halos.

    A long document has 2 cp fragments, and one more for each fork inside of a chunk.  A short document of a tree has
    one linked fragment, and one more for each fork inside of the document.  (cp - 1) / cp of the maps travel.  This
    share is not exact if cp does not divide the heads, and some ranks have more fragments than others.

    passes  passes of a layer in a microbatch.  All passes send tokens and halos; passes that compute the recurrence
            (`of_attention`) also send maps and states
    """

    heads: RecurrentSizes
    conv_kernel: int
    passes: Passes

    def others(self, padded: "np.ndarray", cp_size: int, branches: "Branches | None" = None) -> "np.ndarray":
        heads = self.heads
        is_short = padded <= heads.max_short(cp_size)
        tokens = padded * (cp_size - 1) // cp_size * heads.token_bytes
        halo = halo_tokens(padded, self.conv_kernel, cp_size, branches) * heads.channels * heads.width
        fragments = ~is_short * 2 * cp_size
        if branches is not None:
            of_short, of_long = (branches.cuts(padded, chunks) for chunks in (1, 2 * cp_size))
            fragments = fragments + is_short * branches.in_tree * (1 + of_short) + ~is_short * of_long
        maps = fragments * (cp_size - 1) * heads.map_bytes // cp_size
        return self.passes.num * (is_short * tokens + halo) + self.passes.of_attention * maps


@dataclass(frozen=True)
class RecurrentMixer(Mixer):
    """A kind of layer with a recurrence, and a convolution before it."""

    has_positions = False

    @property
    @abstractmethod
    def conv_kernel(self) -> int:
        """The number of tokens that an output of the convolution depends on."""

    @abstractmethod
    def head_sizes(self, tp: int, width: int) -> RecurrentSizes:
        """The sizes on a tensor-parallel rank.  tp: must divide the heads; width: bytes of an element"""

    def num_states(self, tp: int) -> int:
        return self.head_sizes(tp, 2).num_heads

    def traffic(self, config: Config, passes: Passes) -> StateTraffic:
        heads = self.head_sizes(config.parallel.tp, passes.width)
        return StateTraffic(heads=heads, conv_kernel=self.conv_kernel, passes=passes)
