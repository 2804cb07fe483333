"""Linear attention with the gated delta rule (Yang et al., 2024, arXiv:2412.06464).

A token reads a state to which all earlier tokens have contributed, so its cost does not grow with the length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sft.config import Config, ModelConfig
from sft.config.linear_attention import LinearAttentionConfig
from sft.layers.mixer import Mixer, MixerBytes, StateWork
from sft.layers.mixers.delta_work import state_work
from sft.layers.moved import Moved
from sft.layers.rank_share import FP32, RankShare
from sft.layers.traffic import Passes, Traffic, halo_tokens
from sft.layers.weight import LayerWeight, has_input_norms

if TYPE_CHECKING:
    import numpy as np

    from sft.parallel.branches import Branches

STATE_INTERVAL = 512  # torch_kernel.py saves a state after this many tokens: schedule.CHUNK * schedule.INTERVAL
# The size of a block of short_convolution.py, which has BLOCKS fp32 copies of a block in memory at a time.  The gated
# norm and the delta rule need no more.  On a CPU a block fits the cache: 8,192 tokens of 2,048 channels took half the
# time that they took in blocks 16 times as large.  On CUDA a block has 64 MiB.
BLOCK_NUMBERS = {"cpu": 2**20, "cuda": 2**24}
BLOCKS = 6
FLA_CHUNK = 64  # tokens of a chunk in FLA's kernels
# Bytes per element, in bf16, that the short convolution and the gated norm read and write, forward and backward: by
# plain torch in fp32, as tests/unit/mcore/linear_attention/test_moved_bytes.py counts them, and by a fused kernel.
PLAIN_CONVOLUTION, PLAIN_NORM = (68, 206), (72, 158)
FUSED_CONVOLUTION, FUSED_NORM = (4, 12), (10, 14)  # the norm also copies the gate, a view, in forward and backward
_A = "self_attention"
_WEIGHTS = (
    LayerWeight(f"{_A}.in_proj.layer_norm_weight", "h", "norm", step=0, has=has_input_norms),
    LayerWeight(f"{_A}.in_proj.weight", "K+K+V+V+m+m h", "matrix", "rows", "linear attention", 1),
    LayerWeight(f"{_A}.conv1d.weight", "K+K+V 1 c", "kernel", "rows", step=2),
    LayerWeight(f"{_A}.A_log", "m", "decay", "rows", step=2),
    LayerWeight(f"{_A}.dt_bias", "m", "ones", "rows", step=2),
    LayerWeight(f"{_A}.out_norm.weight", "u", "ones", step=2),
    LayerWeight(f"{_A}.out_proj.weight", "h V", "matrix", "columns", "linear attention", 3),
)


def uses_fla(config: Config) -> bool:
    """Whether FLA may compute linear attention with its elementwise operations, if it is installed."""
    runs_on = config.run.device != "cpu" and config.run.precision == "bf16" and not config.run.deterministic
    return config.attention.delta_rule != "torch" and runs_on


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """Sizes of the heads that a tensor-parallel rank holds.

    key_dim, value_dim  K and V: the width of a query or key, and of a value; the state of a value head is [K, V]
    width               bytes of an element of queries, keys, values, beta and outputs; g, states and maps are in fp32
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int = 2

    @staticmethod
    def of(linear: LinearAttentionConfig, tp: int, width: int) -> "HeadSizes":
        """The sizes on a tensor-parallel rank.  tp: must divide the key heads; width: bytes of an element"""
        assert linear.num_key_heads is not None and linear.num_value_heads is not None
        return HeadSizes(
            key_heads=linear.num_key_heads // tp,
            value_heads=linear.num_value_heads // tp,
            key_dim=linear.key_head_dim,
            value_dim=linear.value_head_dim,
            width=width,
        )

    @property
    def channels(self) -> int:
        """Channels of the convolution: elements per token of q, k and v together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def token_bytes(self) -> int:
        """Bytes per token that travel to another rank (q, k, v, g, beta) and back (output)."""
        numbers = 2 * self.key_heads * self.key_dim + self.value_heads * (2 * self.value_dim + 1)
        return self.width * numbers + FP32 * self.value_heads

    @property
    def map_bytes(self) -> int:
        """Bytes of a fragment's map, [K, K] and [K, V] per head, and of the state that returns, [K, V] per head."""
        return FP32 * self.value_heads * self.key_dim * (self.key_dim + 2 * self.value_dim)

    def max_short(self, cp_size: int) -> int:
        """Length of the longest document for which sending tokens takes fewer bytes than sending maps.

        The document has L tokens and 2 cp fragments.  Either (cp - 1) / cp of the tokens travel, or (cp - 1) / cp of
        the fragments' maps.  So tokens take fewer bytes if L < 2 cp * map_bytes / token_bytes.

            16 key heads, 48 value heads, K = V = 128, bf16: 1,141 tokens at cp 2, 2,283 at cp 4
        """
        return 0 if cp_size == 1 else (2 * cp_size * self.map_bytes - 1) // self.token_bytes


@dataclass(frozen=True, kw_only=True)
class DeltaBytes(MixerBytes):
    """Bytes of Gated DeltaNet, for a pack of one document.

    `saved` is exact (tests/ranks/test_saved_tensors.py counts these bytes) except for the states of plain torch: a
    fragment saves one state for each whole interval, and `saved` does not round to whole intervals.

    heads          sizes of this rank's heads
    tokens         number of tokens of the pack on this rank
    block_numbers  BLOCK_NUMBERS of the device
    is_fla         whether FLA's kernels compute the layer; False: plain torch
    """

    is_recomputed = True
    results = frozenset({"states", "delta rule's output", "maps"})
    heads: HeadSizes
    tokens: float
    block_numbers: int
    is_fla: bool = False

    @staticmethod
    def of(model: ModelConfig, rank: RankShare, pack: float, *, is_fla: bool = False) -> "DeltaBytes":
        """The bytes on one rank.  pack: tokens of a pack"""
        return DeltaBytes(
            model=model,
            rank=rank,
            heads=HeadSizes.of(model.linear_attention, rank.tp, rank.width),
            tokens=pack / rank.cp,
            block_numbers=BLOCK_NUMBERS["cuda" if rank.is_fused else "cpu"],
            is_fla=is_fla,
        )

    @property
    def saved(self) -> dict[str, float]:
        width, values, of_heads = self.rank.width, self._values, self.heads.value_heads
        unscaled = width * (self.model.linear_attention.beta_factor != 1.0)  # beta before its factor
        state = FP32 * values * self.heads.key_dim
        saved = {
            "projections": width * (self.heads.channels + values + 2 * of_heads),
            "queries, keys, values": width * self.heads.channels,
            # The decay's logarithm, and softplus with its input; FLA saves a copy of the decay's projection instead.
            "decays and beta": (FP32 + (width if self.is_fla else 2 * FP32) + width + unscaled) * of_heads,
            "states": 0.0 if self.is_fla else state / STATE_INTERVAL,
            "delta rule's output": width * values,
            "gated norm's scale": FP32 * of_heads,
        }
        if self.rank.cp > 1:  # the map [K, K] of each of the two fragments, and the state before it
            saved["maps"] = 2 * state * (1 + self.heads.key_dim / self.heads.value_dim) / self.tokens
        return saved

    @property
    def norm_outputs(self) -> dict[str, float]:
        return {"gated norm's output": self.rank.width * self._values}

    def local(self, tokens: float) -> float:
        """Bytes of gradients while backward computes the gated norm or the delta rule, and of fp32 blocks or of FLA's
        own tensors.

        The gated norm holds the gradients of its output, of its input and of the gate.  Then its output and input are
        freed.  The delta rule holds the gradients of its output and of the gate, and computes those of q, k and v.
        With cp, the maps and states of both fragments of a rank exist three times: as computed, sent and received.
        """
        gradients = max(3 * self._values, self._values + self.heads.channels)
        fragments = 0 if self.rank.cp == 1 else 3 * 2 * self.heads.map_bytes
        blocks = BLOCKS * FP32 * min(self.block_numbers, tokens * self.heads.channels)
        work = tokens * self.fla_work if self.is_fla else blocks
        return tokens * self.rank.width * gradients + work + fragments

    @property
    def fla_work(self) -> float:
        """Bytes per token of the tensors that FLA's kernels pass to each other, at the moment of backward with most.

        For each key head these are q and k, normalised, and the gradient of q, summed over value heads.  For each value
        head they are four tensors as wide as keys (w, and the gradients of q, k and w), four as wide as values (u, the
        new values, and their gradients from two steps), and for each chunk the solution of its system, the state
        before it, and the gradient of this state.  tests/unit/mcore/linear_attention/test_fla_triton.py counts the
        bytes.
        """
        heads, chunk = self.heads, FLA_CHUNK
        of_value_head = 4 * heads.key_dim + 4 * heads.value_dim + chunk + 2 * heads.key_dim * heads.value_dim / chunk
        return self.rank.width * (3 * heads.key_heads * heads.key_dim + heads.value_heads * of_value_head)

    @property
    def _values(self) -> int:
        return self.heads.value_heads * self.heads.value_dim


@dataclass(frozen=True, kw_only=True)
class StateTraffic(Traffic):
    """Bytes of maps and states of long documents and of trees, of tokens of short documents, and of the convolution's
    halos.

    A long document has 2 cp fragments, and one more for each place inside of a chunk where branches begin.  A short one
    of a tree has one, and one more for each such place inside of it.  (cp - 1) / cp of the maps travel.  If cp does not
    divide the heads, and some ranks have more fragments than others, it is not exactly this share.

    passes  passes of a layer in a microbatch.  Those of attention send maps and states, all send tokens and halos
    """

    heads: HeadSizes
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
class DeltaRule(Mixer):
    """The gated delta rule.

    Letters: K key heads * key width    V value heads * value width    n key heads    m value heads
    u value width    c kernel of the convolution
    """

    kind = "linear attention"
    weights = _WEIGHTS
    is_recomputed = DeltaBytes.is_recomputed
    has_positions = False

    @staticmethod
    def narrowed(model: ModelConfig) -> ModelConfig:
        placement = model.linear_attention.norm_placement
        return model if placement is None else model.model_copy(update={"norm_placement": placement})

    @staticmethod
    def sizes(model: ModelConfig) -> Mapping[str, int]:
        linear = model.linear_attention
        return {
            "K": linear.key_width,
            "V": linear.value_width,
            "n": linear.num_key_heads or 0,
            "m": linear.num_value_heads or 0,
            "u": linear.value_head_dim,
            "c": linear.conv_kernel,
        }

    @staticmethod
    def divided_by_tp(model: ModelConfig) -> dict[str, int]:
        heads = model.linear_attention.num_key_heads
        return {"model.linear_attention.num_key_heads": heads} if heads else {}

    def te_widths(self, tp: int) -> dict[str, int]:
        linear = self.model.linear_attention
        heads, values = linear.num_value_heads or 0, linear.value_width
        return {
            "2 x (keys + values + value heads) / tp of linear_attention": 2 * (linear.key_width + values + heads) // tp,
            "num_value_heads x value_head_dim / tp of linear_attention": values // tp,
        }

    def bytes(self, config: Config, rank: RankShare, pack: float) -> DeltaBytes:
        return DeltaBytes.of(self.model, rank, pack, is_fla=uses_fla(config))

    def traffic(self, config: Config, passes: Passes) -> StateTraffic:
        linear = self.model.linear_attention
        heads = HeadSizes.of(linear, config.parallel.tp, passes.width)
        return StateTraffic(heads=heads, conv_kernel=linear.conv_kernel, passes=passes)

    def moved(self, config: Config, rank: RankShare, *, is_portable: bool) -> Moved:
        """Bytes of the convolution (queries, keys, values), of the gated norm (output, gate), and of the copies of
        queries, keys and values and of the gradient of the projection's output."""
        linear, is_fused = self.model.linear_attention, uses_fla(config)
        channels, values = 2 * linear.key_width + linear.value_width, linear.value_width
        pairs = zip(FUSED_CONVOLUTION if is_fused else PLAIN_CONVOLUTION, FUSED_NORM if is_fused else PLAIN_NORM)
        forward, backward = (rank.width / 2 * (channels * conv + values * norm) / rank.tp for conv, norm in pairs)
        copied, joined = (rank.width * 2 * numbers / rank.tp for numbers in (channels, channels + values))
        return Moved(forward + copied, backward + joined, forward + copied)

    def state_work(self, config: Config, cp_size: int) -> StateWork:
        return state_work(self.model.linear_attention, is_fla=uses_fla(config), cp_size=cp_size)

    @property
    def state_products(self) -> int:
        """Multiplications per token with states: S^T k, k (v - S^T k)^T and S^T q for the state S of each head.

        Megatron-LM 0.19 counts one product more, and the convolution.
        """
        return 3 * self.model.linear_attention.value_width * self.model.linear_attention.key_head_dim
