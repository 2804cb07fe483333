"""Softmax attention: full attention, and the parts that attention over a window (`window.py`) shares with it.

Both save the same tensors.  The bytes depend on the backend: portable gathers keys and values, te sends them in a ring.
"""

from dataclasses import dataclass

from sft.config import Config, ModelConfig
from sft.config.full_attention import FullAttentionConfig
from sft.layers.mixer import Mixer, MixerBytes
from sft.layers.rank_share import FP32, RankShare
from sft.layers.weight import LayerWeight, has_input_norms

MAX_FLASH_HEAD = 256  # width of the widest heads that torch's flash kernel has
MAX_HEAD_GROUPS = 4  # more groups would make kernels and messages too small
GATED = "gate, gated output"
SCORE_TILE = 256 * 512  # scores of a head that torch_kernel.py computes at a time


def num_head_groups(num_key_heads: int) -> int:
    """Number of head groups that packed_attention.py gathers one after the other.  No key head is split.

    8 -> 4        6 -> 3        5 -> 1
    """
    return max(n for n in range(1, MAX_HEAD_GROUPS + 1) if num_key_heads % n == 0)


_A = "self_attention"


def _norms_heads(model: ModelConfig) -> bool:
    return model.qk_norm and not model.qk_norm_across_heads


_WEIGHTS = (
    LayerWeight(f"{_A}.linear_qkv.layer_norm_weight", "h", "norm", step=0, has=has_input_norms),
    LayerWeight(f"{_A}.linear_qkv.weight", "P h", "matrix", "rows", "attention", 1),
    LayerWeight(f"{_A}.linear_qkv.bias", "P", "bias", "rows", step=1, has="qkv_bias"),
    LayerWeight(f"{_A}.q_layernorm.weight", "d", "norm", step=2, has=_norms_heads),
    LayerWeight(f"{_A}.k_layernorm.weight", "d", "norm", step=2, has=_norms_heads),
    LayerWeight(f"{_A}.q_layernorm.weight", "q", "norm", step=2, has="qk_norm_across_heads"),
    LayerWeight(f"{_A}.k_layernorm.weight", "k", "norm", step=2, has="qk_norm_across_heads"),
    LayerWeight(f"{_A}.core_attention.softmax_offset", "a", "kernel", "rows", step=2, has="attention_sinks"),
    LayerWeight(f"{_A}.linear_proj.weight", "h q", "matrix", "columns", "attention", 3),
    LayerWeight(f"{_A}.linear_proj.bias", "h", "bias", step=3, has="attention_output_bias"),
)


@dataclass(frozen=True, kw_only=True)
class SoftmaxBytes(MixerBytes):
    """The bytes that both backends have in common."""

    @property
    def num_saved_outputs(self) -> int:
        """Number of saved copies of attention's output."""
        return 1

    @property
    def saved(self) -> dict[str, float]:
        queries, pairs = (self.rank.width * numbers for numbers in (self.queries, self.pairs))
        projected = pairs * self.model.full_attention.num_kv_projections / 2
        # On a GPU the product with the gate is compiled, and its backward computes the fp32 gate again.
        gate = (self.rank.width if self.rank.is_fused else FP32) * self.queries
        return {
            "queries, keys, values": queries + projected,
            "attention's output": queries * self.num_saved_outputs,
            "log-sum-exp": FP32 * self.model.num_attention_heads / self.rank.tp,
            **({GATED: gate + queries} if self.model.attention_output_gate else {}),
        }

    @property
    def norm_outputs(self) -> dict[str, float]:
        normed = {
            "normed queries and keys": (self.queries + self.pairs / 2) * self.model.qk_norm,
            "normed values": self.pairs / 2 * self.model.value_norm,
        }
        return {name: self.rank.width * numbers for name, numbers in normed.items() if numbers}

    @property
    def norm_scales(self) -> float:
        groups = self.model.resolved_query_groups / self.rank.tp
        rows = 2 if self.model.qk_norm_across_heads else self.model.num_attention_heads / self.rank.tp + groups
        return FP32 * (self.model.qk_norm * rows + self.model.value_norm * groups)

    def local(self, tokens: float) -> float:
        """Bytes while backward computes attention for all heads at once: rotated queries and keys, and the gradients of
        output, queries (also in fp32), keys and values."""
        queries = (self.rank.width + FP32) * self.queries
        pairs = self.rank.width * (self.pairs + self.unsummed)
        return tokens * (self.rotated + queries + pairs)

    @property
    def freed(self) -> tuple[str, ...]:
        return (GATED,)

    @property
    def queries(self) -> float:
        """Numbers per token in queries."""
        return self.model.num_attention_heads * self.model.resolved_head_dim / self.rank.tp

    @property
    def pairs(self) -> float:
        """Numbers per token in keys and values."""
        return 2 * self.model.resolved_query_groups * self.model.resolved_head_dim / self.rank.tp

    @property
    def unsummed(self) -> float:
        """Numbers per token in the gradients of keys and values per query head, which the kernel then sums per key
        head; 0 if each query head has its own key head."""
        return 2 * self.queries if self.model.num_attention_heads > self.model.resolved_query_groups else 0.0

    @property
    def rotated(self) -> float:
        """Bytes per token of rotated queries and keys, and of the gradients of output and queries."""
        return self.rank.width * (3 * self.queries + self.pairs / 2)


@dataclass(frozen=True, kw_only=True)
class PortableBytes(SoftmaxBytes):
    """Bytes of the portable backend.  `saved` is exact: tests/ranks/test_saved_tensors.py counts these bytes."""

    def rotary(self, pack: float) -> float:
        """Bytes of cosine and sine of this rank's tokens, for one or two bases."""
        return (
            (2.0 if self.model.rope.window_base is None else 4.0)
            * self.rank.width
            * (pack / self.rank.cp)
            * self.model.rotary_dim
        )

    def local(self, tokens: float) -> float:
        return self._working(tokens * self.rank.cp)[0]

    def gathered(self, pack: float) -> float:
        return self._working(pack)[1]

    def _working(self, pack: float) -> tuple[float, float]:
        """`local` and `gathered` of the kind of layer, full or window, for which their sum is larger."""
        model = self.model
        kinds = {model.kind_of(number + 1) for number in range(model.num_layers + model.has_mtp)}
        full, window = "full attention" in kinds, "window attention" in kinds
        return max([self._full_layer(pack)] * full + [self._window_layer(pack)] * window, key=sum)

    def _full_layer(self, pack: float) -> tuple[float, float]:
        """`local` and `gathered` of a layer with full attention, which gathers one head group after the other.

        Gathered are a group's keys and values in the kernel's order, and the gradients that the kernel computes.  In
        transfer are the next group, and the fp32 sums of the previous group's gradients.
        """
        tokens, groups = pack / self.rank.cp, num_head_groups(self.model.resolved_query_groups // self.rank.tp)
        if self.rank.cp == 1:
            return self._kernel(tokens, tokens, 1), 0.0
        in_transfer = self.rank.width * (groups > 2) + FP32 * (groups > 1)
        before = FP32 * self.pairs * (groups - 1) / groups  # local gradients of keys and values of other groups
        # For the flash kernel, both chunks of a rank need a copy of the early keys of a document.
        num_keys = pack * (1 + 1 / (2 * self.rank.cp) if self._has_flash else 1)
        gathered = self._keys(num_keys, pack * (groups == 1)) + in_transfer * self.pairs * pack
        return self._kernel(tokens, 0.0, groups) + before * tokens, gathered / groups

    def _window_layer(self, pack: float) -> tuple[float, float]:
        """`local` and `gathered` of a layer with a window: the halo of one document, for all heads at once."""
        tokens = pack / self.rank.cp
        if self.rank.cp == 1:
            return self._full_layer(pack)
        num_keys = min(pack, tokens + 2 * (self.model.sliding_window or 0))
        return self._kernel(tokens, 0.0, 1), self._keys(num_keys, num_keys)

    def _kernel(self, tokens: float, num_keys: float, groups: int) -> float:
        """Bytes of queries, of all gradients that the kernel computes, and of its working memory.

        The flash kernel has the gradient of one group's queries also in fp32, and with several groups copies of the
        group's output and of its gradient.  The plain kernel holds three tiles of scores for the heads of a group: the
        weights, their gradient, and the weights of the previous tile.
        """
        width, copied = self.rank.width, 2 * (groups > 1)
        group = (1 + copied) * width + FP32 if self._has_flash else width
        heads = self.model.num_attention_heads / self.rank.tp / groups
        tiles = 0.0 if self._has_flash else 3 * FP32 * heads * SCORE_TILE
        return tokens * (self.rotated + group * self.queries / groups) + self._gradients(num_keys) + tiles

    def _keys(self, num_keys: float, num_sums: float) -> float:
        """Peak bytes of keys and values of all heads: with their gradients during the kernel; after it only the
        gradients, one of them also in fp32, and the fp32 sums of num_sums tokens."""
        width = self.rank.width
        summed = num_keys * (width + FP32 / 2 if self._has_flash else FP32) + num_sums * FP32
        return max(width * self.pairs * num_keys + self._gradients(num_keys), self.pairs * summed)

    def _gradients(self, num_keys: float) -> float:
        """Bytes of the gradients of keys and values that the kernel computes."""
        if self._has_flash:
            return num_keys * self.rank.width * (self.pairs + self.unsummed)
        return num_keys * FP32 * self.pairs

    @property
    def _has_flash(self) -> bool:
        return has_flash(self.model) and self.rank.is_fused


@dataclass(frozen=True, kw_only=True)
class TransformerEngineBytes(SoftmaxBytes):
    """Bytes of the te backend, from its source; torch's allocator measured the total (docs/numbers/performance.md)."""

    cp_comm: str = "p2p"
    norm_outputs_are_saved = True

    @property
    def num_saved_outputs(self) -> int:
        """2 with a2a (the kernel's output and the output after the all-to-all), otherwise 1."""
        return 2 if self.rank.cp > 1 and self.cp_comm.startswith("a2a") else 1

    def rotary(self, pack: float) -> float:
        """Bytes of the fp32 angles of the longest document, which may be the whole pack."""
        return float(FP32) * pack * self.model.rotary_dim

    def gathered(self, pack: float) -> float:
        """Bytes of gathered keys and values.

        p2p holds the parts of two ranks.  a2a holds the pack for the heads of the rank.  all_gather holds several
        copies of the pack (measured: 6.5 copies at cp 2, 7.8 at cp 4, no more at cp 8).
        """
        if self.rank.cp == 1:
            return 0.0
        return self.rank.width * self.pairs * (8.0 if self.cp_comm == "all_gather" else 4 / self.rank.cp) * pack


def heads(model: ModelConfig) -> dict[str, int]:
    """The numbers of heads of a model, by key of the recipe."""
    numbers = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.resolved_query_groups,
    }
    groups = model.full_attention.num_query_groups
    return numbers | ({"model.full_attention.num_query_groups": groups} if groups else {})


def pair_width(model: ModelConfig) -> float:
    """heads x (key width + value width) / 2: forward takes 4 x this many FLOPs for each query and key that it sees."""
    return model.num_attention_heads * (model.resolved_head_dim + model.value_head_dim) / 2


def has_flash(model: ModelConfig) -> bool:
    """Whether torch's flash kernel has heads of this width; it has no softcap."""
    return model.attention_softcap is None and model.resolved_head_dim <= MAX_FLASH_HEAD


@dataclass(frozen=True)
class SoftmaxAttention(Mixer):
    """The methods that layers with and without a window have in common."""

    weights = _WEIGHTS

    def bytes(self, config: Config, rank: RankShare, pack: float) -> SoftmaxBytes:
        """Bytes of activations.  auto counts as portable, the only backend that runs everywhere."""
        if config.attention.backend == "te":
            return TransformerEngineBytes(model=self.model, rank=rank, cp_comm=config.parallel.cp_comm)
        return PortableBytes(model=self.model, rank=rank)

    @staticmethod
    def divided_by_tp(model: ModelConfig) -> dict[str, int]:
        return heads(model)

    def te_widths(self, tp: int) -> dict[str, int]:
        num_heads, groups, width = (
            self.model.num_attention_heads,
            self.model.resolved_query_groups,
            self.model.resolved_head_dim,
        )
        return {
            "num_attention_heads x head_dim / tp": num_heads * width // tp,
            "(num_attention_heads + 2 x num_query_groups) x head_dim / tp": (num_heads + 2 * groups) * width // tp,
        }

    @property
    def has_flash(self) -> bool:
        return has_flash(self.model)

    @property
    def pair_width(self) -> float:
        return pair_width(self.model)

    def sent(self, config: Config) -> int:
        """Numbers per token that a rank sends.  Llama 8B on tp 2: 4 key heads x 2 x 128 -> 1024"""
        widths = self.model.resolved_head_dim + self.model.value_head_dim
        return self.model.resolved_query_groups // config.parallel.tp * widths


@dataclass(frozen=True)
class FullAttention(SoftmaxAttention):
    kind = "full attention"

    @staticmethod
    def narrowed(model: ModelConfig) -> ModelConfig:
        full = model.full_attention
        if not full.is_used:
            return model
        return model.model_copy(
            update={
                "sliding_window_layers": None,
                "sliding_window": None,
                "head_dim": full.head_dim or model.head_dim,
                "num_query_groups": full.num_query_groups or model.num_query_groups,
                "full_attention": FullAttentionConfig(keys_as_values=full.keys_as_values),
                "rope": model.rope.model_copy(update={"window_base": None}),
            }
        )

    @classmethod
    def described(cls, model: ModelConfig) -> str:
        if not model.full_attention.is_used:
            return cls.kind
        own = cls.narrowed(model)
        values = ", which are also values" if own.full_attention.keys_as_values else ""
        return f"{cls.kind} of {own.resolved_query_groups} keys of {own.resolved_head_dim}{values}"

    def first_share(self, tp: int) -> float:
        """The share of the first head group.  The other groups travel while attention computes."""
        return 1 / num_head_groups(self.model.resolved_query_groups // tp)
