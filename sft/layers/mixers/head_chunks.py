"""Bytes of activations of softmax attention that is computed by chunks of heads (train.head_chunks).

A layer saves the normed input, the output and its log-sum-exp, and no queries, keys or values.  Backward holds the
gradients of the normed input and of the output for all heads, and everything else for one chunk.
`sft/mcore/model/head_chunks.py` computes the chunks.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from sft.config import ModelConfig
from sft.layers.mixers.softmax_bytes import PortableBytes


@dataclass(frozen=True, kw_only=True)
class ChunkedBytes(PortableBytes):
    """Bytes of the portable backend with chunks of heads.  num_chunks: train.head_chunks"""

    num_chunks: int

    @staticmethod
    def of(whole: PortableBytes, num_chunks: int) -> "ChunkedBytes":
        """The bytes with chunks of heads.  whole: the bytes of the same layer without chunks"""
        return ChunkedBytes(**_fields(whole), num_chunks=num_chunks)

    @property
    def saved(self) -> dict[str, float]:
        return {name: value for name, value in super().saved.items() if name in self.results}

    @property
    def norm_outputs(self) -> dict[str, float]:
        return {}

    @property
    def norm_scales(self) -> float:
        return 0.0

    def local(self, tokens: float) -> float:
        """Bytes while backward computes the last chunk.

        A chunk has queries, keys and values before rotation.  With qk_norm, the inputs of the norms are also saved.
        """
        chunk, width, hidden = self._chunk, self.rank.width, self.model.hidden_size
        own = width * (chunk.queries + chunk.pairs) + sum(chunk.norm_outputs.values()) + chunk.norm_scales
        whole = width * (self.queries - chunk.queries)  # the gradient of the output of other chunks
        inputs = width * hidden * (1 + (self.rank.sequence < 1))  # the gradient, and what tp ranks have gathered
        return chunk.local(tokens) + tokens * (own + whole + inputs)

    def gathered(self, pack: float) -> float:
        return self._chunk.gathered(pack)

    @cached_property
    def _chunk(self) -> PortableBytes:
        return PortableBytes(**{**_fields(self), "model": part_of(self.model, self.num_chunks), "is_view": True})


def _fields(whole: PortableBytes) -> dict[str, Any]:
    """The fields of a `PortableBytes`, without those that a subclass adds."""
    return {part.name: getattr(whole, part.name) for part in fields(PortableBytes)}


def part_of(model: ModelConfig, num_chunks: int) -> ModelConfig:
    """A model with the heads of one chunk.  32 heads and 8 key heads of 128, 4 chunks -> 8 heads and 2 key heads"""
    return model.model_copy(
        update={
            "head_dim": model.resolved_head_dim,
            "num_attention_heads": model.num_attention_heads // num_chunks,
            "num_query_groups": model.resolved_query_groups // num_chunks,
        }
    )
