"""Bytes that attention keeps of a token, and holds while it computes, by backend.  Arithmetic only, no torch.

Symbols: A = heads x head_dim, K = key heads x head_dim, each divided by tp; b = bytes of a number.
"""

from dataclasses import dataclass
from typing import Protocol

from sft.config import Config, ModelConfig
from sft.mcore.activation_bytes import FP32, RankShare
from sft.parallel.layout import Layout

MAX_HEAD_GROUPS = 4  # with more, kernels and messages become small


def num_head_groups(num_key_heads: int) -> int:
    """How many head groups packed_attention.py gathers one after the other: whole key heads each.

    8 -> 4        6 -> 3        5 -> 1
    """
    return max(n for n in range(1, MAX_HEAD_GROUPS + 1) if num_key_heads % n == 0)


class AttentionBytes(Protocol):
    """What sft/estimate asks of a backend."""

    @property
    def norm_outputs_are_saved(self) -> bool:
        """Whether the output of a norm is saved even where train.recompute is selective."""

    def saved(self, model: ModelConfig, rank: RankShare) -> dict[str, float]:
        """Bytes of a token that one layer keeps for backward, by name."""

    def rotary(self, model: ModelConfig, rank: RankShare, pack: float) -> float:
        """Bytes of the rotary table or rotation for a pack of so many tokens."""

    def backward(self, model: ModelConfig, rank: RankShare, pack: float) -> tuple[float, float]:
        """Bytes held at most while backward computes attention: of local tokens, of keys and values of the pack."""


@dataclass(frozen=True, kw_only=True)
class TransformerEngineBytes:
    """Queries, keys and values keep what went into their norms (read in its sources; counted in all by torch's
    allocator, docs/performance.md)."""

    cp: int = 1
    cp_comm: str = "p2p"
    norm_outputs_are_saved: bool = True

    def saved(self, model: ModelConfig, rank: RankShare) -> dict[str, float]:
        """Over cp by a2a, the output is saved twice: as the kernel gave it, and as it came back."""
        exchanges_heads = self.cp > 1 and self.cp_comm.startswith("a2a")
        return _saved(model, rank, num_outputs=2 if exchanges_heads else 1)

    def rotary(self, model: ModelConfig, rank: RankShare, pack: float) -> float:
        """fp32 angles of the longest document, which may be the whole pack."""
        return float(FP32) * pack * model.resolved_head_dim

    def backward(self, model: ModelConfig, rank: RankShare, pack: float) -> tuple[float, float]:
        """Beside the local tokens: p2p has two ranks' parts in transfer; a2a has the whole pack's of its own heads;
        all_gather has those of the pack, as they came and in order, and their gradients, several times (counted: 6.5
        at cp 2, 7.8 at cp 4, no more at cp 8)."""
        local = _whole_backward(model, rank, pack / self.cp)
        if self.cp == 1:
            return local, 0.0
        copies = 8.0 if self.cp_comm == "all_gather" else 4 / self.cp
        return local, rank.width * _pairs(model, rank) * copies * pack


@dataclass(frozen=True, kw_only=True)
class PortableBytes:
    """Exact: tests/ranks/test_saved_tensors.py counts what is saved."""

    cp: int = 1
    norm_outputs_are_saved: bool = False

    def saved(self, model: ModelConfig, rank: RankShare) -> dict[str, float]:
        return _saved(model, rank, num_outputs=1)

    def rotary(self, model: ModelConfig, rank: RankShare, pack: float) -> float:
        """Cosine and sine of the local tokens."""
        return 2.0 * rank.width * (pack / self.cp) * model.resolved_head_dim

    def backward(self, model: ModelConfig, rank: RankShare, pack: float) -> tuple[float, float]:
        """Of the pack: the gathered keys and values of one head group, and of the next, in transfer; in the kernel's
        order: those, their gradients, and the gradients of the group before; the fp32 sums of that group in transfer to
        their ranks; and what the kernel sums over the query heads of a key head, or after that the same in fp32."""
        if self.cp == 1:
            return _whole_backward(model, rank, pack), 0.0
        queries, pairs = _queries(model, rank), _pairs(model, rank)
        num_groups = num_head_groups(model.resolved_query_groups // rank.tp)
        ordered = 1 + 1 / (2 * self.cp)  # a document's early keys are there for both of a rank's chunks
        of_group = (2 * rank.width + FP32) * pairs + ordered * (
            3 * rank.width * pairs + max(rank.width * _unsummed(model, rank), FP32 * pairs)
        )
        local = _rotated(model, rank) + (rank.width + FP32) * queries / num_groups + FP32 * pairs
        return pack / self.cp * local, pack * of_group / num_groups


def attention_bytes(config: Config, layout: Layout) -> AttentionBytes:
    """Of the backend that the recipe names; auto counts as portable, the only one that runs everywhere."""
    backends: dict[str, AttentionBytes] = {
        "te": TransformerEngineBytes(cp=layout.cp, cp_comm=config.parallel.cp_comm),
        "portable": PortableBytes(cp=layout.cp),
    }
    return backends.get(config.attention.backend, backends["portable"])


def normed_queries_and_keys(model: ModelConfig, rank: RankShare) -> float:
    """A token's outputs of the norms of queries and keys."""
    queries = rank.width * model.num_attention_heads * model.resolved_head_dim / rank.tp
    return queries + rank.width * model.resolved_query_groups * model.resolved_head_dim / rank.tp


def _saved(model: ModelConfig, rank: RankShare, *, num_outputs: int) -> dict[str, float]:
    queries = rank.width * model.num_attention_heads * model.resolved_head_dim / rank.tp
    keys = rank.width * model.resolved_query_groups * model.resolved_head_dim / rank.tp
    return {
        "queries, keys, values": queries + 2 * keys,
        "attention's output": queries * num_outputs,
        "log-sum-exp": FP32 * model.num_attention_heads / rank.tp,
    }


def _queries(model: ModelConfig, rank: RankShare) -> float:
    """A, numbers of a token."""
    return model.num_attention_heads * model.resolved_head_dim / rank.tp


def _pairs(model: ModelConfig, rank: RankShare) -> float:
    """2 K, numbers of a token: its keys and values."""
    return 2 * model.resolved_query_groups * model.resolved_head_dim / rank.tp


def _unsummed(model: ModelConfig, rank: RankShare) -> float:
    """Gradients of keys and values for every query head, which the kernel sums over those that share a key head."""
    return 2 * _queries(model, rank) if model.num_attention_heads > model.resolved_query_groups else 0.0


def _rotated(model: ModelConfig, rank: RankShare) -> float:
    """Bytes of a token: rotated queries and keys, gradients of output and queries."""
    return rank.width * (3 * _queries(model, rank) + _pairs(model, rank) / 2)


def _whole_backward(model: ModelConfig, rank: RankShare, tokens: float) -> float:
    """All heads at once: the gradient of queries in both precisions, and of keys and values."""
    of_queries = (rank.width + FP32) * _queries(model, rank)
    of_pairs = rank.width * (_pairs(model, rank) + _unsummed(model, rank))
    return tokens * (_rotated(model, rank) + of_queries + of_pairs)
