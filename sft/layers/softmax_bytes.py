"""Computes how many bytes attention saves per token and how many it holds temporarily, by backend, without torch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from sft.config import Config, ModelConfig
from sft.layers.model_bytes import FP32, RankShare
from sft.parallel.layout import Layout

MAX_FLASH_HEAD = 256  # width of the widest heads that torch's flash kernel has
MAX_HEAD_GROUPS = 4  # with more, kernels and messages become small
GATED = "gate, gated output"
SCORE_TILE = 256 * 512  # scores of a head that torch_kernel.py computes at a time


def num_head_groups(num_key_heads: int) -> int:
    """Number of head groups that packed_attention.py gathers one after the other.  No key head is split.

    8 -> 4        6 -> 3        5 -> 1
    """
    return max(n for n in range(1, MAX_HEAD_GROUPS + 1) if num_key_heads % n == 0)


@dataclass(frozen=True, kw_only=True)
class AttentionBytes(ABC):
    """Bytes of one backend, in one layer of this model on one rank."""

    model: ModelConfig
    rank: RankShare = RankShare()
    cp: int = 1
    norm_outputs_are_saved: ClassVar[bool]  # even if train.recompute is selective
    is_recomputed: ClassVar[bool] = False  # by selective

    @abstractmethod
    def rotary(self, pack: float) -> float:
        """Bytes of the rotary table or the rotation.  pack: number of tokens of a pack"""

    @abstractmethod
    def gathered(self, pack: float) -> float:
        """Peak bytes of gathered keys and values while backward computes attention; 0 with cp 1."""

    @property
    def num_saved_outputs(self) -> int:
        """Number of saved copies of attention's output."""
        return 1

    @property
    def saved(self) -> dict[str, float]:
        """Bytes that a layer saves per token for backward, by name."""
        queries, pairs = (self.rank.width * numbers for numbers in (self.queries, self.pairs))
        projected = pairs * self.model.full_attention.num_kv_projections / 2
        # On a GPU the gate's product is compiled, and computes the gate in fp32 again.
        gate = (self.rank.width if self.rank.is_fused else FP32) * self.queries
        return {
            "queries, keys, values": queries + projected,
            "attention's output": queries * self.num_saved_outputs,
            "log-sum-exp": FP32 * self.model.num_attention_heads / self.rank.tp,
            **({GATED: gate + queries} if self.model.attention_output_gate else {}),
        }

    @property
    def norm_outputs(self) -> dict[str, float]:
        """Bytes per token of the outputs of norms inside attention, if a layer saves them."""
        normed = {
            "normed queries and keys": (self.queries + self.pairs / 2) * self.model.qk_norm,
            "normed values": self.pairs / 2 * self.model.value_norm,
        }
        return {name: self.rank.width * numbers for name, numbers in normed.items() if numbers}

    def local(self, tokens: float) -> float:
        """Bytes of local tokens while backward computes attention for all heads at once: rotated queries and keys, the
        gradients of output and queries (the latter also in fp32), and the gradients of keys and values."""
        of_queries = (self.rank.width + FP32) * self.queries
        of_pairs = self.rank.width * (self.pairs + self.unsummed)
        return tokens * (self.rotated + of_queries + of_pairs)

    @property
    def queries(self) -> float:
        """Elements of a token's queries."""
        return self.model.num_attention_heads * self.model.resolved_head_dim / self.rank.tp

    @property
    def pairs(self) -> float:
        """Elements of a token's keys and values."""
        return 2 * self.model.resolved_query_groups * self.model.resolved_head_dim / self.rank.tp

    @property
    def unsummed(self) -> float:
        """Elements of the gradients of keys and values per query head, before the kernel sums them per key head; 0 if
        each query head has its own key head."""
        return 2 * self.queries if self.model.num_attention_heads > self.model.resolved_query_groups else 0.0

    @property
    def rotated(self) -> float:
        """Bytes per token of rotated queries and keys, and of the gradients of output and queries."""
        return self.rank.width * (3 * self.queries + self.pairs / 2)


@dataclass(frozen=True, kw_only=True)
class PortableBytes(AttentionBytes):
    """Bytes of the portable backend.  `saved` is exact: tests/ranks/test_saved_tensors.py counts these bytes."""

    norm_outputs_are_saved = False

    def rotary(self, pack: float) -> float:
        """Bytes of cosine and sine of the local tokens, for one or two bases."""
        return (
            (2.0 if self.model.rope.window_base is None else 4.0)
            * self.rank.width
            * (pack / self.cp)
            * self.model.rotary_dim
        )

    def local(self, tokens: float) -> float:
        return self._working(tokens * self.cp)[0]

    def gathered(self, pack: float) -> float:
        return self._working(pack)[1]

    def _working(self, pack: float) -> tuple[float, float]:
        """`local` and `gathered` in the kind of layer that needs most."""
        model = self.model
        full, window = model.num_window_layers < model.num_layers, model.num_window_layers > 0
        return max([self._full_layer(pack)] * full + [self._window_layer(pack)] * window, key=sum)

    def _full_layer(self, pack: float) -> tuple[float, float]:
        """Gathered: one head group in the kernel's order and what the kernel makes of it.  Also the next group, and the
        fp32 sums of the gradients of the previous group, which are in transfer."""
        tokens, groups = pack / self.cp, num_head_groups(self.model.resolved_query_groups // self.rank.tp)
        if self.cp == 1:
            return self._kernel(tokens, tokens, 1), 0.0
        in_transfer = self.rank.width * (groups > 2) + FP32 * (groups > 1)
        before = FP32 * self.pairs * (groups - 1) / groups  # local gradients of keys and values of other groups
        num_keys = pack * (1 + 1 / (2 * self.cp) if self._has_flash else 1)  # both chunks need a document's early keys
        gathered = self._keys(num_keys, pack * (groups == 1)) + in_transfer * self.pairs * pack
        return self._kernel(tokens, 0.0, groups) + before * tokens, gathered / groups

    def _window_layer(self, pack: float) -> tuple[float, float]:
        """The same with the halo of one document instead of gathered keys, for all heads at once."""
        tokens = pack / self.cp
        if self.cp == 1:
            return self._full_layer(pack)
        num_keys = min(pack, tokens + 2 * (self.model.sliding_window or 0))
        return self._kernel(tokens, 0.0, 1), self._keys(num_keys, num_keys)

    def _kernel(self, tokens: float, num_keys: float, groups: int) -> float:
        """Bytes of queries and of their gradients, also those of one group in fp32.  With several groups, the flash
        kernel copies the group's output and its gradient.  The plain kernel holds three tiles of scores for the heads
        of a group: weights, their gradient, and those of the tile before."""
        width, copied = self.rank.width, 2 * (groups > 1)
        of_group = (1 + copied) * width + FP32 if self._has_flash else width
        heads = self.model.num_attention_heads / self.rank.tp / groups
        tiles = 0.0 if self._has_flash else 3 * FP32 * heads * SCORE_TILE
        return tokens * (self.rotated + of_group * self.queries / groups) + self._gradients(num_keys) + tiles

    def _keys(self, num_keys: float, num_sums: float) -> float:
        """Bytes of keys and values for all heads, with their gradients; or of their gradients, one of them also in
        fp32, and of the fp32 sums of num_sums tokens."""
        width = self.rank.width
        summed = num_keys * (width + FP32 / 2 if self._has_flash else FP32) + num_sums * FP32
        return max(width * self.pairs * num_keys + self._gradients(num_keys), self.pairs * summed)

    def _gradients(self, num_keys: float) -> float:
        """Bytes of the gradients of keys and values, as the kernel makes them."""
        if self._has_flash:
            return num_keys * self.rank.width * (self.pairs + self.unsummed)
        return num_keys * FP32 * self.pairs

    @property
    def _has_flash(self) -> bool:
        fits = self.model.attention_softcap is None and self.model.resolved_head_dim <= MAX_FLASH_HEAD
        return fits and self.rank.is_fused


@dataclass(frozen=True, kw_only=True)
class TransformerEngineBytes(AttentionBytes):
    """Bytes of the te backend, from its source; torch's allocator measured the total (docs/numbers/performance.md)."""

    cp_comm: str = "p2p"
    norm_outputs_are_saved = True

    @property
    def num_saved_outputs(self) -> int:
        """2 with a2a (the kernel's output and the output after the all-to-all), otherwise 1."""
        return 2 if self.cp > 1 and self.cp_comm.startswith("a2a") else 1

    def rotary(self, pack: float) -> float:
        """Bytes of the fp32 angles of the longest document, which may be the whole pack."""
        return float(FP32) * pack * self.model.rotary_dim

    def gathered(self, pack: float) -> float:
        """Bytes of gathered keys and values.  p2p holds the parts of two ranks, a2a the pack for the rank's heads.

        all_gather holds several copies of the whole pack.  Measured: 6.5 copies at cp 2, 7.8 at cp 4, no more at cp 8.
        """
        if self.cp == 1:
            return 0.0
        return self.rank.width * self.pairs * (8.0 if self.cp_comm == "all_gather" else 4 / self.cp) * pack


def attention_bytes(config: Config, layout: Layout) -> AttentionBytes:
    """Bytes of the backend that the recipe names.  auto counts as portable, the only one that runs everywhere."""
    model, rank = config.model, RankShare.of(config, layout)
    portable = PortableBytes(model=model, rank=rank, cp=layout.cp)
    te = TransformerEngineBytes(model=model, rank=rank, cp=layout.cp, cp_comm=config.parallel.cp_comm)
    return {"te": te, "portable": portable, "auto": portable}[config.attention.backend]
