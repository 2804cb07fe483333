"""Computes how many bytes a layer with latent attention saves and how many it holds temporarily, without torch.

By backend: `portable` saves latents, te the keys and values that it makes of them.
"""

from dataclasses import dataclass

from sft.config import Config
from sft.layers.model_bytes import FP32, RankShare
from sft.layers.softmax_bytes import (
    AttentionBytes,
    TransformerEngineBytes,
    attention_bytes,
    num_head_groups,
)
from sft.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True)
class LatentBytes(AttentionBytes):
    """Bytes of multi_latent_attention.py.  `saved` is exact: tests/ranks/test_saved_tensors.py counts these bytes."""

    norm_outputs_are_saved = False

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
        }
        return saved if self._sends_latent else {**saved, "keys and values": width * self._key_and_value}

    @property
    def norm_outputs(self) -> dict[str, float]:
        latent = self.model.latent_attention
        return {"normed latent of queries": self.rank.width * self.rank.sequence * (latent.q_lora_rank or 0)}

    def rotary(self, pack: float) -> float:
        """Bytes of cosine and sine of the local tokens."""
        return 2.0 * self.rank.width * (pack / self.cp) * self.model.rotary_dim

    def local(self, tokens: float) -> float:
        """The gradients of the output and of queries.  Of one head group also copies of its queries, output and
        gradient, as wide as keys, and the gradient of queries in fp32."""
        width = self.rank.width
        gradients = width * (self._heads * self.model.value_head_dim + self.queries)
        return tokens * (gradients + (3 * width + FP32) * self.queries / self._groups)

    def gathered(self, pack: float) -> float:
        """Latents and their gradient, in fp32 by key and by token.  Of one head group what the latents expand to, and
        while the kernel runs keys, values and their gradients, all as wide as keys; after it the gradients, and those
        of what was expanded."""
        num_keys = pack * (1 + 1 / (2 * self.cp) if self.cp > 1 else 1)  # both chunks need a document's early keys
        width, latent = self.rank.width, self.model.latent_attention
        expanded = self._heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        of_group = width * max(expanded + 4 * self.queries, 2 * (expanded + self.queries)) / self._groups
        of_latents = (2 * width + FP32) * latent.compressed_width
        return num_keys * (of_group + of_latents) + FP32 * latent.compressed_width * pack * (self.cp > 1)

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
        return self._heads * (self.model.resolved_head_dim + self.model.value_head_dim)


@dataclass(frozen=True, kw_only=True)
class ExpandedBytes(TransformerEngineBytes):
    """Bytes of the te backend with latents: keys and values of all heads are saved, as wide as they are."""

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
        }

    @property
    def norm_outputs(self) -> dict[str, float]:
        latent = self.model.latent_attention
        width = (latent.q_lora_rank or 0) + (latent.kv_lora_rank or 0)
        return {"normed latents": self.rank.width * self.rank.sequence * width}

    @property
    def pairs(self) -> float:
        return (
            self.model.num_attention_heads * (self.model.resolved_head_dim + self.model.value_head_dim) / self.rank.tp
        )

    def rotary(self, pack: float) -> float:
        """Bytes of cosine and sine of the local tokens."""
        return 2.0 * self.rank.width * (pack / self.cp) * self.model.rotary_dim

    def local(self, tokens: float) -> float:
        """The gradients of output, queries (also in fp32), keys and values."""
        width = self.rank.width
        return tokens * (width * (self._outputs + self.pairs) + (width + FP32) * self.queries)

    @property
    def _outputs(self) -> float:
        return self.model.num_attention_heads * self.model.value_head_dim / self.rank.tp


def softmax_attention_bytes(config: Config, layout: Layout) -> AttentionBytes:
    """Bytes of layers with a softmax: those of latent attention, or those of the backend that the recipe names."""
    if config.model.latent_attention.is_used:
        model, rank = config.model, RankShare.of(config, layout)
        if config.attention.may_share_latents:
            return LatentBytes(model=model, rank=rank, cp=layout.cp)
        return ExpandedBytes(model=model, rank=rank, cp=layout.cp, cp_comm=config.parallel.cp_comm)
    return attention_bytes(config, layout)
