"""Bytes that attention keeps of a token, and holds while it computes, by backend.  Arithmetic only, no torch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from sft.config import Config, ModelConfig
from sft.mcore.model_bytes import FP32, RankShare
from sft.parallel.layout import Layout

MAX_HEAD_GROUPS = 4  # with more, kernels and messages become small


def num_head_groups(num_key_heads: int) -> int:
    """How many head groups packed_attention.py gathers one after the other: whole key heads each.

    8 -> 4        6 -> 3        5 -> 1
    """
    return max(n for n in range(1, MAX_HEAD_GROUPS + 1) if num_key_heads % n == 0)


@dataclass(frozen=True, kw_only=True)
class AttentionBytes(ABC):
    """Of one backend, in one layer of this model on one rank."""

    model: ModelConfig
    rank: RankShare = RankShare()
    cp: int = 1
    norm_outputs_are_saved: ClassVar[bool]  # even where train.recompute is selective

    @abstractmethod
    def rotary(self, pack: float) -> float:
        """Of the rotary table or the rotation.  pack: tokens"""

    @abstractmethod
    def gathered(self, pack: float) -> float:
        """Of keys and values of the pack, with cp above 1, at most while backward computes attention."""

    @property
    def num_saved_outputs(self) -> int:
        """How often attention's output is saved."""
        return 1

    @property
    def saved(self) -> dict[str, float]:
        """Of a token, what a layer keeps for backward, by name."""
        queries, pairs = (self.rank.width * numbers for numbers in (self.queries, self.pairs))
        return {
            "queries, keys, values": queries + pairs,
            "attention's output": queries * self.num_saved_outputs,
            "log-sum-exp": FP32 * self.model.num_attention_heads / self.rank.tp,
        }

    def local(self, tokens: float) -> float:
        """Of local tokens, held while backward computes attention, all heads at once: rotated queries and keys, the
        gradients of output and queries (those once more in fp32), and the gradients of keys and values."""
        of_queries = (self.rank.width + FP32) * self.queries
        of_pairs = self.rank.width * (self.pairs + self.unsummed)
        return tokens * (self.rotated + of_queries + of_pairs)

    @property
    def queries(self) -> float:
        """Numbers of a token's queries."""
        return self.model.num_attention_heads * self.model.resolved_head_dim / self.rank.tp

    @property
    def pairs(self) -> float:
        """Numbers of a token's keys and values."""
        return 2 * self.model.resolved_query_groups * self.model.resolved_head_dim / self.rank.tp

    @property
    def unsummed(self) -> float:
        """Numbers of the gradients of keys and values for every query head, before the kernel sums those of a key head;
        0 where each query head has a key head of its own."""
        return 2 * self.queries if self.model.num_attention_heads > self.model.resolved_query_groups else 0.0

    @property
    def rotated(self) -> float:
        """Of a token: rotated queries and keys, gradients of output and queries."""
        return self.rank.width * (3 * self.queries + self.pairs / 2)


@dataclass(frozen=True, kw_only=True)
class PortableBytes(AttentionBytes):
    """`saved` is exact: tests/ranks/test_saved_tensors.py counts it."""

    norm_outputs_are_saved = False

    def rotary(self, pack: float) -> float:
        """Cosine and sine of the local tokens."""
        return 2.0 * self.rank.width * (pack / self.cp) * self.model.resolved_head_dim

    def local(self, tokens: float) -> float:
        if self.cp == 1:
            return super().local(tokens)
        of_group = (self.rank.width + FP32) * self.queries / self._num_groups
        return tokens * (self.rotated + of_group + FP32 * self.pairs)

    def gathered(self, pack: float) -> float:
        """One head group as it was gathered, and the next in transfer; in the kernel's order: that group, its
        gradients, and those of the group before, whose fp32 sums are in transfer to their ranks; and what the kernel
        sums over the query heads of a key head, or after that the same in fp32."""
        if self.cp == 1:
            return 0.0
        width, ordered = self.rank.width, 1 + 1 / (2 * self.cp)  # a document's early keys: for both of a rank's chunks
        in_order = 3 * width * self.pairs + max(width * self.unsummed, FP32 * self.pairs)
        return pack * ((2 * width + FP32) * self.pairs + ordered * in_order) / self._num_groups

    @property
    def _num_groups(self) -> int:
        return num_head_groups(self.model.resolved_query_groups // self.rank.tp)


@dataclass(frozen=True, kw_only=True)
class TransformerEngineBytes(AttentionBytes):
    """Read in its sources; counted in all by torch's allocator (docs/performance.md)."""

    cp_comm: str = "p2p"
    norm_outputs_are_saved = True

    @property
    def num_saved_outputs(self) -> int:
        """Twice with a2a: as the kernel gave it, and as it came back."""
        return 2 if self.cp > 1 and self.cp_comm.startswith("a2a") else 1

    def rotary(self, pack: float) -> float:
        """fp32 angles of the longest document, which may be the whole pack."""
        return float(FP32) * pack * self.model.resolved_head_dim

    def gathered(self, pack: float) -> float:
        """p2p has two ranks' parts in transfer, a2a the whole pack's of its own heads; all_gather has those of the
        pack, as they came and in order, and their gradients, several times (counted: 6.5 at cp 2, 7.8 at cp 4, no more
        at cp 8)."""
        if self.cp == 1:
            return 0.0
        return self.rank.width * self.pairs * (8.0 if self.cp_comm == "all_gather" else 4 / self.cp) * pack


def attention_bytes(config: Config, layout: Layout) -> AttentionBytes:
    """Of the backend that the recipe names; auto counts as portable, the only one that runs everywhere."""
    model, rank = config.model, RankShare.of(config, layout)
    portable = PortableBytes(model=model, rank=rank, cp=layout.cp)
    te = TransformerEngineBytes(model=model, rank=rank, cp=layout.cp, cp_comm=config.parallel.cp_comm)
    return {"te": te, "portable": portable, "auto": portable}[config.attention.backend]
