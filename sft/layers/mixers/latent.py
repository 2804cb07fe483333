"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values are projections of a latent.

The portable backend saves and sends latents, if these are no larger than a rank's keys and values.  The te backend
saves and sends the keys and values.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sft.config import Config, ModelConfig
from sft.layers.mixer import Mixer, MixerBytes
from sft.layers.mixers.parent_bytes import parent_keys
from sft.layers.mixers.softmax import heads, pair_width
from sft.layers.mixers.softmax_bytes import num_head_groups, query_sums
from sft.layers.mixers.te_bytes import TransformerEngineBytes
from sft.layers.moved import Moved
from sft.layers.rank_share import FP32, RankShare
from sft.layers.weight import LayerWeight, has_input_norms

# `LayerWeight.part` of two groups of products: those that every tensor-parallel rank computes, and the expansion of
# latents to keys and values.
DUPLICATED, EXPANDED = "latent attention, duplicated", "latent attention, keys and values"
_BACKWARD = 4.2  # bytes of backward / bytes of forward, counted
_A, _QUERY_LATENT = "self_attention", "latent_attention.q_lora_rank"
_WEIGHTS = (
    LayerWeight("input_layernorm.weight", "h", "norm", step=0, has=has_input_norms),
    LayerWeight(
        f"{_A}.linear_q_proj.weight", "q h", "matrix", "rows", "attention", 1, "latent_attention.projects_queries"
    ),
    LayerWeight(f"{_A}.linear_q_down_proj.weight", "Q h", "matrix", "", DUPLICATED, 1, _QUERY_LATENT),
    LayerWeight(f"{_A}.linear_q_up_proj.layer_norm_weight", "Q", "norm", step=2, has=_QUERY_LATENT),
    LayerWeight(f"{_A}.linear_q_up_proj.weight", "q Q", "matrix", "rows", "attention", 2, _QUERY_LATENT),
    LayerWeight(f"{_A}.linear_kv_down_proj.weight", "C h", "matrix", "", DUPLICATED, 1),
    LayerWeight(f"{_A}.linear_kv_up_proj.layer_norm_weight", "L", "norm", step=2),
    LayerWeight(f"{_A}.linear_kv_up_proj.weight", "B L", "matrix", "rows", EXPANDED, 2),
    LayerWeight(f"{_A}.linear_gate_proj.weight", "a h", "matrix", "rows", "attention", 2, "latent_attention.head_gate"),
    LayerWeight(f"{_A}.linear_proj.weight", "h O", "matrix", "columns", "attention", 3),
)


def _gate(of: MixerBytes) -> dict[str, float]:
    """Bytes per token that gates of heads save: the sigmoid in fp32 and in the output's dtype, and the gated output."""
    heads = of.model.num_attention_heads / of.rank.tp
    if not of.model.latent_attention.head_gate:
        return {}
    return {"gates of heads": heads * (FP32 + of.rank.width * (1 + of.model.resolved_value_head_dim))}


def _rotary(of: MixerBytes, pack: float) -> float:
    """Bytes of the cosines and sines of this rank's tokens."""
    return 2.0 * of.rank.width * (pack / of.rank.cp) * of.model.rotary_dim


@dataclass(frozen=True, kw_only=True)
class LatentBytes(MixerBytes):
    """Bytes of multi_latent_attention.py.  `saved` is exact: tests/ranks/test_saved_tensors.py counts these bytes."""

    is_deterministic: bool = False  # run.deterministic

    @property
    def saved(self) -> dict[str, float]:
        width, sequence, latent = self.rank.width, self.rank.sequence, self.model.latent_attention
        latents = [size for size in (latent.q_lora_rank, latent.kv_lora_rank) if size]
        saved = {
            "queries": width * self.queries,
            "latent and rotary key": width * latent.compressed_width,
            "attention's output": width * self._heads * latent.v_head_dim,
            "log-sum-exp": FP32 * self._heads,
            "latents before their norms": sequence * sum(width * size + FP32 for size in latents),
            **_gate(self),
        }
        return saved if self._sends_latent else {**saved, "keys and values": width * self._key_and_value}

    @property
    def norm_outputs(self) -> dict[str, float]:
        latent = self.model.latent_attention
        return {"normed latent of queries": self.rank.width * self.rank.sequence * (latent.q_lora_rank or 0)}

    def rotary(self, pack: float) -> float:
        return _rotary(self, pack)

    def local(self, tokens: float) -> float:
        """Bytes of the gradients of output and queries, and of the copies that one head group needs.

        The copies are the group's queries, its output and the output's gradient; each counts as wide as the queries.
        The gradient of the group's queries is summed in fp32.  If the kernel is called several times, a call also has
        copies of its queries, outputs and gradients, and its results.  The calls in which branches attend to their
        parents come later (`parent_keys`).
        """
        width, heads = self.rank.width, self._heads / self._groups
        gradients = width * (self._heads * self.model.resolved_value_head_dim + self.queries)
        sums = query_sums(
            self.rank, heads, tokens, width=self.model.resolved_head_dim, is_deterministic=self.is_deterministic
        )
        copies, of_group = (3 + 4 * self.rank.is_uneven) * width, self.queries / self._groups
        parents = parent_keys(self.rank, queries=of_group, pairs=2 * of_group)
        return tokens * (gradients + copies * of_group) + max(sums, parents)

    def gathered(self, pack: float) -> float:
        """Peak bytes of gathered latents, and of the keys and values of one head group.

        For each key, there are two copies of the latent and its fp32 gradient.  With cp, there is also an fp32 gradient
        for each token of the pack.  While the kernel runs, the head group holds the expanded latents, keys, values, and
        the gradients of keys and of values; the last four count as wide as keys.  After the kernel, it holds the
        expanded latents and their gradients, and the gradients of keys and of values.
        """
        # Both chunks of a rank need the early keys of a document, and branches those of parents.
        num_keys = pack + (pack / (2 * self.rank.cp) + self.rank.trees.keys) * (self.rank.cp > 1)
        width, latent = self.rank.width, self.model.latent_attention
        expanded = self._heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        in_kernel = 4 + 2 * self.rank.is_uneven  # with several calls, a call has gradients of its own
        group = width * max(expanded + in_kernel * self.queries, 2 * (expanded + self.queries)) / self._groups
        latents = (2 * width + FP32) * latent.compressed_width
        return num_keys * (group + latents) + FP32 * latent.compressed_width * pack * (self.rank.cp > 1)

    @property
    def queries(self) -> float:
        """Elements per token of the queries on this rank."""
        return self.model.num_attention_heads * self.model.resolved_head_dim / self.rank.tp

    @property
    def _heads(self) -> int:
        return self.model.num_attention_heads // self.rank.tp

    @property
    def _groups(self) -> int:
        return num_head_groups(self._heads)

    @property
    def _sends_latent(self) -> bool:
        return self.model.latent_attention.sends_latent(self._heads)

    @property
    def _key_and_value(self) -> int:
        return self._heads * (self.model.resolved_head_dim + self.model.resolved_value_head_dim)


@dataclass(frozen=True, kw_only=True)
class ExpandedBytes(TransformerEngineBytes):
    """Bytes of latent attention on the te backend, which saves the expanded keys and values of all heads."""

    @property
    def saved(self) -> dict[str, float]:
        width, latent = self.rank.width, self.model.latent_attention
        latents = [size for size in (latent.q_lora_rank, latent.kv_lora_rank) if size]
        return {
            "queries": width * self.queries,
            "keys and values": width * self.pairs,
            "attention's output": width * self._outputs * self.num_saved_outputs,
            "log-sum-exp": FP32 * self.model.num_attention_heads / self.rank.tp,
            "latents before their norms": self.rank.sequence * sum(width * size + FP32 for size in latents),
            **_gate(self),
        }

    @property
    def norm_outputs(self) -> dict[str, float]:
        latent = self.model.latent_attention
        width = (latent.q_lora_rank or 0) + (latent.kv_lora_rank or 0)
        return {"normed latents": self.rank.width * self.rank.sequence * width}

    @property
    def pairs(self) -> float:
        model = self.model
        return model.num_attention_heads * (model.resolved_head_dim + model.resolved_value_head_dim) / self.rank.tp

    def rotary(self, pack: float) -> float:
        return _rotary(self, pack)

    def local(self, tokens: float) -> float:
        """Bytes of the gradients of output, queries (also in fp32), keys and values."""
        width = self.rank.width
        return tokens * (width * (self._outputs + self.pairs) + (width + FP32) * self.queries)

    @property
    def _outputs(self) -> float:
        return self.model.num_attention_heads * self.model.resolved_value_head_dim / self.rank.tp


@dataclass(frozen=True)
class LatentAttention(Mixer):
    """Multi-head latent attention.

    Letters: Q width of the latent of queries    L width of the latent of keys and values
    C L + width of the rotary key    B heads * (width of a key without its rotary part + value width)
    O heads * value width
    """

    kind = "latent attention"
    weights = _WEIGHTS

    @staticmethod
    def sizes(model: ModelConfig) -> Mapping[str, int]:
        latent, heads = model.latent_attention, model.num_attention_heads
        return {
            "Q": latent.q_lora_rank or 0,
            "L": latent.kv_lora_rank or 0,
            "C": latent.compressed_width,
            "B": heads * (latent.qk_nope_head_dim + latent.v_head_dim),
        }

    @classmethod
    def described(cls, model: ModelConfig) -> str:
        is_mixed = any(section.named for section in model.mixer_sections.values())
        return cls.kind if is_mixed else "full attention"

    def bytes(self, config: Config, rank: RankShare, pack: float) -> MixerBytes:
        if config.attention.may_be_portable:
            return LatentBytes(model=self.model, rank=rank, is_deterministic=config.run.deterministic)
        return ExpandedBytes(model=self.model, rank=rank, cp_comm=config.parallel.cp_comm)

    @staticmethod
    def divided_by_tp(model: ModelConfig) -> dict[str, int]:
        return heads(model)

    def te_widths(self, tp: int) -> dict[str, int]:
        """Sizes of weights in modules of Transformer Engine.  The down projections are other modules and left out."""
        latent, num_heads = self.model.latent_attention, self.model.num_attention_heads
        queries, keys = latent.qk_head_dim, latent.qk_nope_head_dim + latent.v_head_dim
        widths = {
            "kv_lora_rank": latent.kv_lora_rank,
            "q_lora_rank": latent.q_lora_rank,
            "num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim) / tp": num_heads * queries // tp,
            "num_attention_heads x (qk_nope_head_dim + v_head_dim) / tp": num_heads * keys // tp,
            "num_attention_heads x v_head_dim / tp": num_heads * latent.v_head_dim // tp,
            "num_attention_heads / tp with latent_attention.head_gate": num_heads // tp if latent.head_gate else None,
        }
        return {name: number for name, number in widths.items() if number is not None}

    @property
    def pair_width(self) -> float:
        return pair_width(self.model)

    def moved(self, config: Config, rank: RankShare, *, is_portable: bool) -> Moved:
        """Bytes of norms of latents, of rotation, and of the copies that join the parts of queries, keys and latents.

        Backward also expands latents again, and adds the gradients of keys and values in fp32.  _BACKWARD is the ratio
        of backward to forward that was counted for the portable backend with small models on a CPU.  It is assumed that
        te has the same ratio.
        """
        model, latent = self.model, self.model.latent_attention
        num_heads, rotary = model.num_attention_heads / rank.tp, latent.qk_rope_head_dim
        latents = ((latent.q_lora_rank or 0) + (latent.kv_lora_rank or 0)) * rank.sequence
        joined = num_heads * (2 * model.resolved_head_dim + model.resolved_value_head_dim) + 2 * latent.compressed_width
        forward = rank.width * 2 * (latents + joined + 2 * num_heads * rotary + rotary)
        return Moved(forward, _BACKWARD * forward, rank.width * 2 * latents * is_portable)

    def sent(self, config: Config) -> int:
        """Elements per token that a rank sends.  DeepSeek-V3 on the portable backend: 576"""
        if config.shares_latents:
            return self.model.latent_attention.compressed_width
        widths = self.model.resolved_head_dim + self.model.resolved_value_head_dim
        return self.model.num_attention_heads // config.parallel.tp * widths
