"""Linear attention with the gated delta rule (Yang et al., 2024, arXiv:2412.06464), and Kimi Delta Attention
(arXiv:2510.26692), whose decay has a value for each channel of a key."""

from collections.abc import Mapping
from dataclasses import dataclass

from sft.config import Config, ModelConfig
from sft.config.linear_attention import LinearAttentionConfig
from sft.layers.mixer import StateWork
from sft.layers.mixers.delta_work import state_work
from sft.layers.mixers.recurrent import (
    BLOCK_NUMBERS,
    BLOCKS,
    FLA_CHUNK,
    FUSED_CONVOLUTION,
    PLAIN_CONVOLUTION,
    STATE_INTERVAL,
    RecurrentBytes,
    RecurrentMixer,
    RecurrentSizes,
    uses_fla,
)
from sft.layers.moved import Moved
from sft.layers.rank_share import FP32, RankShare
from sft.layers.weight import LayerWeight, has_input_norms

# (forward, backward): bytes per element, in bf16, that the gated norm reads and writes, counted as recurrent.py
# describes.  The fused norm also copies the gate, a view, in forward and in backward.
PLAIN_NORM, FUSED_NORM = (72, 158), (10, 14)
# The same for the decay, if each channel has its own.  If all channels of a head share one, its bytes are too few.
PLAIN_DECAY, FUSED_DECAY = (30, 46), (6, 8)
# Blocks of the delta rule with decays of channels in plain torch, in fp32, as large as those of the convolution.
CHANNEL_BLOCKS = 3
DUPLICATED = "linear attention, duplicated"  # `LayerWeight.part` of products that every tensor-parallel rank computes
_A, _LOW_RANK = "self_attention", "linear_attention.low_rank"
_WEIGHTS = (
    LayerWeight(f"{_A}.in_proj.layer_norm_weight", "h", "norm", step=0, has=has_input_norms),
    LayerWeight(f"{_A}.in_proj.weight", "K+K+V+Z+m+Y h", "matrix", "rows", "linear attention", 1),
    LayerWeight(f"{_A}.gate_down.weight", "r h", "matrix", "", DUPLICATED, 1, _LOW_RANK),
    LayerWeight(f"{_A}.decay_down.weight", "r h", "matrix", "", DUPLICATED, 1, _LOW_RANK),
    LayerWeight(f"{_A}.decay_up.weight", "D r", "matrix", "rows", "linear attention", 2, _LOW_RANK),
    LayerWeight(f"{_A}.conv1d.weight", "K+K+V 1 c", "kernel", "rows", step=2),
    LayerWeight(f"{_A}.A_log", "m", "decay", "rows", step=2),
    LayerWeight(f"{_A}.dt_bias", "D", "ones", "rows", step=2),
    LayerWeight(f"{_A}.gate_up.weight", "V r", "matrix", "rows", "linear attention", 2, _LOW_RANK),
    LayerWeight(f"{_A}.out_norm.weight", "u", "ones", step=2),
    LayerWeight(f"{_A}.out_proj.weight", "h V", "matrix", "columns", "linear attention", 3),
)


@dataclass(frozen=True, kw_only=True)
class HeadSizes(RecurrentSizes):
    """Sizes of the heads that a tensor-parallel rank holds.

    key_dim, value_dim  K and V: the width of a query or key, and of a value; the state of a value head is [K, V]
    decays              decays of a value head for each token: 1, or one for each channel of a key
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    decays: int = 1

    @staticmethod
    def of(linear: LinearAttentionConfig, tp: int, width: int) -> "HeadSizes":
        """The sizes on a tensor-parallel rank.  tp: must divide the key heads; width: bytes of an element"""
        assert linear.num_key_heads is not None and linear.num_value_heads is not None
        return HeadSizes(
            key_heads=linear.num_key_heads // tp,
            value_heads=linear.num_value_heads // tp,
            key_dim=linear.key_head_dim,
            value_dim=linear.value_head_dim,
            decays=linear.key_head_dim if linear.has_channel_decay else 1,
            width=width,
        )

    @property
    def num_heads(self) -> int:
        return self.value_heads

    @property
    def channels(self) -> int:
        """Channels of the convolution: elements per token of q, k and v together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def token_bytes(self) -> int:
        """Bytes per token that travel to another rank (q, k, v, g, beta) and back (output)."""
        numbers = 2 * self.key_heads * self.key_dim + self.value_heads * (2 * self.value_dim + 1)
        return self.width * numbers + FP32 * self.value_heads * self.decays

    @property
    def state_bytes(self) -> int:
        return FP32 * self.value_heads * self.key_dim * self.value_dim

    @property
    def factor_bytes(self) -> int:
        """Bytes of A of a fragment's map, [K, K] per head."""
        return FP32 * self.value_heads * self.key_dim * self.key_dim


@dataclass(frozen=True, kw_only=True)
class DeltaBytes(RecurrentBytes):
    """Bytes of Gated DeltaNet and of Kimi Delta Attention."""

    results = frozenset({"states", "delta rule's output", "maps"})
    heads: HeadSizes

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
        decays = of_heads * self.heads.decays
        low_rank = self.model.linear_attention.low_rank
        # Without low_rank, the projection of decays is part of a tensor that is saved.  With low_rank, a rank has the
        # inner values of both products for its tokens under sequence parallelism.
        own = decays if low_rank is None else 2 * low_rank * self.rank.sequence
        unscaled = width * (self.model.linear_attention.beta_factor != 1.0)  # beta before its factor
        return {
            "projections": width * (self.heads.channels + values + of_heads + own),
            "queries, keys, values": width * self.heads.channels,
            # The decay's logarithm, and softplus with its input; FLA saves a copy of the decay's projection instead.
            "decays and beta": (FP32 + (width if self.is_fla else 2 * FP32)) * decays + (width + unscaled) * of_heads,
            "states": 0.0 if self.is_fla else self.heads.state_bytes / STATE_INTERVAL,
            "delta rule's output": width * values,
            "gated norm's scale": FP32 * of_heads,
            **self._saved_maps,
        }

    @property
    def norm_outputs(self) -> dict[str, float]:
        return {"gated norm's output": self.rank.width * self._values}

    def local(self, tokens: float) -> float:
        """Bytes of gradients while backward computes the gated norm or the delta rule, and of fp32 blocks or of FLA's
        own tensors.

        The gated norm holds the gradients of its output, of its input and of the gate; its output is free.  The delta
        rule holds the gradients of its output and of the gate, and computes those of q, k, v and of the decays of
        channels, in fp32; the output and the input of the norm, which are as wide as the first two, are free.  The
        gradients of decays of heads are too few to count.
        """
        width, heads = self.rank.width, self.heads
        of_decays = FP32 * heads.value_heads * heads.decays if heads.decays > 1 else 0
        gradients = max(2 * width * self._values, width * heads.channels + of_decays)
        count = BLOCKS if heads.decays == 1 else CHANNEL_BLOCKS
        blocks = count * FP32 * min(self.block_numbers, tokens * heads.channels)
        work = tokens * self.fla_work if self.is_fla else blocks
        return tokens * gradients + work + self._passing

    @property
    def fla_work(self) -> float:
        """Bytes per token of the tensors that FLA's kernels pass to each other, when they are largest in backward.

        For each key head these are q and k, normalised, and the gradient of q, summed over value heads.  For each value
        head they are four tensors as wide as keys (w, and the gradients of q, k and w), four as wide as values (u, the
        new values, and their gradients from two steps), and for each chunk the solution of its system, the state
        before it, and the gradient of this state.  tests/unit/mcore/linear_attention/test_fla_triton.py counts the
        bytes.
        """
        heads, chunk = self.heads, FLA_CHUNK
        if heads.decays > 1:
            return heads.value_heads * self._channel_work
        of_value_head = 4 * heads.key_dim + 4 * heads.value_dim + chunk + 2 * heads.key_dim * heads.value_dim / chunk
        return self.rank.width * (3 * heads.key_heads * heads.key_dim + heads.value_heads * of_value_head)

    @property
    def _channel_work(self) -> float:
        """Bytes of `fla_work` for a head with decays of channels, which has a key head of its own.

        These tensors are in memory all the time: five tensors as wide as keys (q and k, normalised and with their
        decays, and w), four as wide as values (u, and gradients of values from three steps), the weights of pairs and
        the solution, sums of decays in fp32, and fp32 gradients of q, k, decays, weights and the solution.  The last
        kernel but one also reads the states of chunks, their gradients and the new values.  The last kernel writes the
        gradients of q, k and decays to new tensors.
        """
        heads, width, chunk = self.heads, self.rank.width, FLA_CHUNK
        wide, pairs = width * (5 * heads.key_dim + 4 * heads.value_dim), 2 * (width + FP32) * chunk
        states = width * (heads.value_dim + 2 * heads.key_dim * heads.value_dim / chunk)
        gradients = 3 * FP32 * heads.key_dim
        return wide + pairs + FP32 * heads.key_dim + gradients + max(states, gradients)

    @property
    def _values(self) -> int:
        return self.heads.value_heads * self.heads.value_dim


@dataclass(frozen=True)
class DeltaRule(RecurrentMixer):
    """Linear attention with the gated delta rule, or with Kimi Delta Attention.

    Letters of `LayerWeight.shape`:
    K key heads * key width    V value heads * value width    n key heads    m value heads
    u value width    c kernel of the convolution    D decays    r width of low_rank
    Z, Y rows of in_proj for the gate and for the decay: V and D, or 0 with low_rank
    """

    kind = "linear attention"
    weights = _WEIGHTS
    is_recomputed = DeltaBytes.is_recomputed

    @staticmethod
    def narrowed(model: ModelConfig) -> ModelConfig:
        placement = model.linear_attention.norm_placement
        return model if placement is None else model.model_copy(update={"norm_placement": placement})

    @staticmethod
    def sizes(model: ModelConfig) -> Mapping[str, int]:
        linear = model.linear_attention
        return {
            "D": linear.num_decays,
            "r": linear.low_rank or 0,
            "Z": 0 if linear.low_rank else linear.value_width,
            "Y": 0 if linear.low_rank else linear.num_decays,
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
        linear, sizes = self.model.linear_attention, self.sizes(self.model)
        rows = 2 * sizes["K"] + sizes["V"] + sizes["Z"] + sizes["m"] + sizes["Y"]
        widths = {
            "rows of in_proj / tp of linear_attention": rows // tp,
            "num_value_heads x value_head_dim / tp of linear_attention": linear.value_width // tp,
        }
        if linear.low_rank is not None:  # only decay_up and gate_up are modules of Transformer Engine
            widths["linear_attention.low_rank"] = linear.low_rank
            widths["decays / tp of linear_attention"] = linear.num_decays // tp
        return widths

    def bytes(self, config: Config, rank: RankShare, pack: float) -> DeltaBytes:
        return DeltaBytes.of(self.model, rank, pack, is_fla=uses_fla(config))

    @property
    def conv_kernel(self) -> int:
        return self.model.linear_attention.conv_kernel

    def head_sizes(self, tp: int, width: int) -> HeadSizes:
        return HeadSizes.of(self.model.linear_attention, tp, width)

    def moved(self, config: Config, rank: RankShare, *, is_portable: bool) -> Moved:
        """Bytes of the convolution (queries, keys, values), of the gated norm (output, gate), and of the copies of
        queries, keys and values and of the gradient of the projection's output."""
        linear, is_fused = self.model.linear_attention, uses_fla(config)
        channels, values = 2 * linear.key_width + linear.value_width, linear.value_width
        decays = linear.num_decays if linear.has_channel_decay else 0
        passes = zip(
            FUSED_CONVOLUTION if is_fused else PLAIN_CONVOLUTION,
            FUSED_NORM if is_fused else PLAIN_NORM,
            FUSED_DECAY if is_fused else PLAIN_DECAY,
        )
        forward, backward = (
            rank.width / 2 * (channels * conv + values * norm + decays * decay) / rank.tp
            for conv, norm, decay in passes
        )
        in_one = 0 if linear.low_rank else values + decays  # elements of the projection's output beside the channels
        copied, joined = (rank.width * 2 * numbers / rank.tp for numbers in (channels, channels + in_one))
        return Moved(forward + copied, backward + joined, forward + copied)

    def state_work(self, config: Config, cp_size: int) -> StateWork:
        return state_work(self.model.linear_attention, is_fla=uses_fla(config), cp_size=cp_size)

    @property
    def state_products(self) -> int:
        """Multiplications per token with states: S^T k, k (v - S^T k)^T and S^T q for the state S of each head.

        Megatron-LM 0.19 counts one product more, and the convolution.
        """
        return 3 * self.model.linear_attention.value_width * self.model.linear_attention.key_head_dim
