"""Softmax attention: full attention, and the parts that attention over a window (`window.py`) shares with it."""

from dataclasses import dataclass
from functools import cached_property

from sft.config import Config, ModelConfig
from sft.config.full_attention import FullAttentionConfig
from sft.config.mixer_section import LayerKind
from sft.layers.mixer import Mixer
from sft.layers.mixers.head_chunks import ChunkedBytes
from sft.layers.mixers.softmax_bytes import (
    PortableBytes,
    SoftmaxBytes,
    all_kinds,
    has_flash,
    head_elements,
    num_head_groups,
)
from sft.layers.mixers.te_bytes import TransformerEngineBytes
from sft.layers.moved import Moved
from sft.layers.rank_share import FP32, RankShare
from sft.layers.weight import LayerWeight, has_input_norms

_A = "self_attention"


def _norms_heads(model: ModelConfig) -> bool:
    return model.qk_norm and model.qk_norm_weights and not model.qk_norm_across_heads


_WEIGHTS = (
    LayerWeight(f"{_A}.linear_qkv.layer_norm_weight", "h", "norm", step=0, has=has_input_norms),
    LayerWeight(f"{_A}.linear_qkv.weight", "P h", "matrix", "rows", "attention", 1),
    LayerWeight(f"{_A}.linear_qkv.bias", "P", "bias", "rows", step=1, has="qkv_bias"),
    LayerWeight(f"{_A}.q_layernorm.weight", "d", "norm", step=2, has=_norms_heads),
    LayerWeight(f"{_A}.k_layernorm.weight", "d", "norm", step=2, has=_norms_heads),
    LayerWeight(f"{_A}.q_layernorm.weight", "q", "norm", step=2, has="qk_norm_across_heads"),
    LayerWeight(f"{_A}.k_layernorm.weight", "k", "norm", step=2, has="qk_norm_across_heads"),
    LayerWeight(f"{_A}.core_attention.softmax_offset", "a", "kernel", "rows", step=2, has="attention_sinks"),
    LayerWeight(f"{_A}.linear_proj.weight", "h O", "matrix", "columns", "attention", 3),
    LayerWeight(f"{_A}.linear_proj.bias", "h", "bias", step=3, has="attention_output_bias"),
)


def heads(model: ModelConfig) -> dict[str, int]:
    """The numbers of heads of a model, by key of the recipe."""
    numbers = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.resolved_query_groups,
    }
    full = model.full_attention
    own = {"num_attention_heads": full.num_attention_heads, "num_query_groups": full.num_query_groups}
    return numbers | {f"model.full_attention.{name}": number for name, number in own.items() if number}


def qkv_rows(model: ModelConfig) -> int:
    """The number of rows of the projection to queries, gates, keys and values."""
    queries, keys = model.num_attention_heads * model.resolved_head_dim, model.resolved_query_groups
    gates = queries * model.attention_output_gate + model.num_attention_heads * bool(model.attention_head_gate)
    values = model.resolved_value_head_dim * model.full_attention.projects_values
    return queries + gates + keys * (model.resolved_head_dim + values)


def pair_width(model: ModelConfig) -> float:
    """heads x (key width + value width) / 2.  Forward takes 4 x this many FLOPs for each query and visible key."""
    return model.num_attention_heads * (model.resolved_head_dim + model.resolved_value_head_dim) / 2


@dataclass(frozen=True)
class SoftmaxAttention(Mixer):
    """The methods that full attention and window attention share."""

    weights = _WEIGHTS

    @cached_property
    def _kinds(self) -> frozenset[LayerKind]:
        return all_kinds(self.model)

    def bytes(self, config: Config, rank: RankShare, pack: float) -> SoftmaxBytes:
        """Bytes of activations.  attention.backend = auto counts as portable, the only backend that runs everywhere."""
        if config.attention.backend == "te":
            return TransformerEngineBytes(model=self.model, rank=rank, cp_comm=config.parallel.cp_comm)
        kernels = {*(config.attention.kernels or ())}
        is_plain = kernels == {"torch"} or (has_flash(self.model) and bool(kernels) and kernels <= {"torch", "ffpa"})
        is_deterministic = config.run.deterministic
        whole = PortableBytes(
            model=self.model, rank=rank, kinds=self._kinds, is_plain=is_plain, is_deterministic=is_deterministic
        )
        chunks = config.train.head_chunks
        return whole if chunks is None else ChunkedBytes.of(whole, chunks)

    @staticmethod
    def divided_by_tp(model: ModelConfig) -> dict[str, int]:
        return heads(model)

    def te_widths(self, tp: int) -> dict[str, int]:
        return {
            "num_attention_heads x head_dim / tp": self.model.num_attention_heads
            * self.model.resolved_value_head_dim
            // tp,
            "(num_attention_heads + 2 x num_query_groups) x head_dim / tp": qkv_rows(self.model) // tp,
        }

    @property
    def pair_width(self) -> float:
        return pair_width(self.model)

    def moved(self, config: Config, rank: RankShare, *, is_portable: bool) -> Moved:
        """Bytes of the mixer.

        Both backends copy queries, keys and values out of the projection's output, and copy their gradients into one
        tensor.  The gate of the output is one kernel, which runs after a copy of the gate.
        """
        model = self.model
        queries, keys, values, outputs = head_elements(model, rank)
        gate, bias = queries * model.attention_output_gate, rank.hidden(model) * model.attention_output_bias
        by_head = outputs * bool(model.attention_head_gate)  # plain torch: two passes in forward, six in backward
        copied, rotated = 2 * (queries + keys + values), 2 * (queries + keys)
        normed = (queries + keys) * model.qk_norm + values * model.value_norm
        own = self.passes_around_kernel(rank) if is_portable else Moved()
        in_chunks = config.train.head_chunks is not None  # backward then copies and norms heads again
        recomputed = in_chunks * (copied + 2 * normed)
        backward = recomputed + copied + 3 * normed + (2 if is_portable else 1) * rotated + 7 * gate + 6 * by_head
        return Moved(
            rank.width * (copied + 2 * normed + rotated + 5 * gate + 2 * by_head) + 2 * bias + own.forward,
            rank.width * backward + bias + own.backward,
            rank.width * 2 * normed * (is_portable and not in_chunks),  # Transformer Engine saves the norms' outputs
        )

    def passes_around_kernel(self, rank: RankShare) -> Moved:
        """Bytes that packed_attention.py moves around the kernel: copies of the output and of gradients, and the
        correction of the output for sinks and their gradient, in fp32."""
        model = self.model
        queries, keys, values, outputs = head_elements(model, rank)
        sinks = model.attention_sinks * outputs
        forward = rank.width * 2 * outputs + sinks * (2 * rank.width + 2 * FP32)
        backward = rank.width * 2 * (queries + keys + values) + sinks * (2 * rank.width + 6 * FP32)
        return Moved(forward, backward)

    def sent(self, config: Config) -> int:
        """Elements per token that a rank sends.  Llama 8B on tp 2: 4 key heads x 2 x 128 -> 1024"""
        widths = self.model.resolved_head_dim + self.model.resolved_value_head_dim
        return self.model.resolved_query_groups // config.parallel.tp * widths


@dataclass(frozen=True)
class FullAttention(SoftmaxAttention):
    kind = "full attention"

    @staticmethod
    def narrowed(model: ModelConfig) -> ModelConfig:
        full = model.full_attention
        if not model.has_own_windows:
            return model
        return model.model_copy(
            update={
                "sliding_window_layers": None,
                "sliding_window": None,
                "head_dim": full.head_dim or model.resolved_head_dim,
                "num_attention_heads": full.num_attention_heads or model.num_attention_heads,
                "num_query_groups": full.num_query_groups or model.resolved_query_groups,
                "attention_sinks": model.attention_sinks and full.sinks,
                "full_attention": FullAttentionConfig(keys_as_values=full.keys_as_values),
                "rope": model.rope.model_copy(update={"window_base": None, "window_fraction": None}),
            }
        )

    @classmethod
    def described(cls, model: ModelConfig) -> str:
        if not model.full_attention.is_used:
            return cls.kind
        own = cls.narrowed(model)
        values = ", which are also values" if own.full_attention.keys_as_values else ""
        queries = f"{own.num_attention_heads} heads, " if model.full_attention.num_attention_heads else ""
        return f"{cls.kind} of {queries}{own.resolved_query_groups} keys of {own.resolved_head_dim}{values}"

    def first_share(self, config: Config) -> float:
        """The first head group's share of the gathered bytes.  The other groups travel while attention computes.

        Each chunk of heads waits for its first group.
        """
        groups = self.model.resolved_query_groups // config.parallel.tp // (config.train.head_chunks or 1)
        return 1 / num_head_groups(groups)
