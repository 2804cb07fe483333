"""Bytes of activations of softmax attention: the part that both backends share, and the portable backend.

Both backends save queries, keys, values, outputs and log-sum-exps, and without recomputation the outputs of norms.
With train.recompute = selective, te (te_bytes.py) also saves the outputs of norms, and the portable backend computes
them again.  The portable backend gathers keys and values over cp, and te sends them as parallel.cp_comm says.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from sft.config import ModelConfig
from sft.config.mixer_section import LayerKind
from sft.layers.mixer import MixerBytes
from sft.layers.mixers.kernel_memory import FFPA, FLASH2, FLASH4, PLAIN, KernelMemory
from sft.layers.mixers.parent_bytes import parent_keys
from sft.layers.rank_share import FP32, RankShare

MAX_FLASH_HEAD = 256  # width of the widest heads that torch's flash kernel has
MAX_HEAD_GROUPS = 4  # more groups would make kernels and messages too small
GATED = "gate, gated output"
SCORE_TILE = 256 * 512  # scores of a head that torch_kernel.py computes at a time
MULTIPROCESSORS = 148  # of a B200, which has the most
LARGE_SCORE_TILE = 1024 * 2048  # the same in bf16 on CUDA


def num_head_groups(num_key_heads: int) -> int:
    """Number of head groups that packed_attention.py gathers one after the other.  No key head is split.

    8 key heads -> 4 groups        6 -> 3        5 -> 1
    """
    return max(n for n in range(1, MAX_HEAD_GROUPS + 1) if num_key_heads % n == 0)


def query_sums(rank: RankShare, heads: float, tokens: float, *, width: float, is_deterministic: bool) -> float:
    """Bytes of the fp32 sums of the gradients of queries in a flash kernel.

    The kernel adds 128 rows for each sequence; the rows of one document are left out.  With run.deterministic,
    FlashAttention-2 has ceil(multiprocessors / (sequences x heads)) tensors of sums (flash_api.cpp, mha_varlen_bwd).

    heads: number of heads of the call; tokens: number of queries; width: elements of a head
    """
    copies = math.ceil(MULTIPROCESSORS / (rank.sequences * heads)) if is_deterministic else 1
    rows = tokens + 128 * (rank.sequences - rank.sequences / rank.documents)
    return copies * FP32 * heads * width * rows


def all_kinds(model: ModelConfig) -> frozenset[LayerKind]:
    """The kinds of all layers, including the layer of the block for multi-token prediction."""
    return frozenset(model.kind_of(number + 1) for number in range(model.num_layers + model.has_mtp))


def has_flash(model: ModelConfig) -> bool:
    """Whether torch's flash kernel can compute the attention: it has no softcap, and no heads wider than 256."""
    return model.attention_softcap is None and model.resolved_head_dim <= MAX_FLASH_HEAD


def head_elements(model: ModelConfig, rank: RankShare) -> tuple[float, float, float, float]:
    """Elements per token of the queries, keys, values and outputs on this rank."""
    heads, groups = model.num_attention_heads / rank.tp, model.resolved_query_groups / rank.tp
    keys, values = model.resolved_head_dim, model.resolved_value_head_dim
    return heads * keys, groups * keys, groups * values, heads * values


@dataclass(frozen=True, kw_only=True)
class SoftmaxBytes(MixerBytes):
    """The bytes that the portable and the te backend share."""

    @property
    def num_saved_outputs(self) -> int:
        """Number of saved copies of attention's output."""
        return 1

    @property
    def saved(self) -> dict[str, float]:
        queries, keys, values, outputs = (self.rank.width * x for x in self._elements)
        heads, by_head = self.model.num_attention_heads / self.rank.tp, self.model.attention_head_gate
        # On a GPU the product with the gate is compiled, and its backward computes the fp32 gate again.
        gate = (self.rank.width if self.rank.is_fused else FP32) * self.queries
        # A gate by head saves the gate in fp32 and the factor made of it.  They are one tensor if activations are fp32
        # and the factor is a sigmoid.
        if by_head:
            gate = heads * (FP32 + self.rank.width * (by_head == "softplus" or self.rank.width < FP32))
        return {
            "queries, keys, values": queries + keys + values * self.model.full_attention.projects_values,
            "attention's output": outputs * self.num_saved_outputs,
            "log-sum-exp": FP32 * heads,
            **({GATED: gate + outputs} if self.model.attention_output_gate or by_head else {}),
        }

    @property
    def norm_outputs(self) -> dict[str, float]:
        normed = {
            "normed queries and keys": (self.queries + self.keys) * self.model.qk_norm,
            "normed values": (self.pairs - self.keys) * self.model.value_norm,
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

    @cached_property
    def _elements(self) -> tuple[float, float, float, float]:
        return head_elements(self.model, self.rank)

    @property
    def queries(self) -> float:
        """Elements per token of the queries on this rank."""
        return self._elements[0]

    @property
    def keys(self) -> float:
        """Elements per token of the keys on this rank."""
        return self._elements[1]

    @cached_property
    def pairs(self) -> float:
        """Elements per token of the keys and values on this rank."""
        return sum(self._elements[1:3])

    @cached_property
    def unsummed(self) -> float:
        """Elements per token of the gradients of keys and values for each query head.  The kernel then sums them over
        the query heads of a key head.  0 if each query head has its own key head."""
        queries, _, _, outputs = self._elements
        return queries + outputs if self.model.num_attention_heads > self.model.resolved_query_groups else 0.0

    @cached_property
    def rotated(self) -> float:
        """Bytes per token of rotated queries and keys, and of the gradients of output and queries."""
        queries, keys, _, outputs = self._elements
        return self.rank.width * (2 * queries + outputs + keys)


@dataclass(frozen=True, kw_only=True)
class PortableBytes(SoftmaxBytes):
    """Bytes of the portable backend.  `saved` is exact: tests/ranks/test_saved_tensors.py counts these bytes.

    kernel    the attention kernel; None: the kernel that takes most memory among those that may run
    kinds     the kinds of the model's layers, if the caller knows them; None: computed here
    is_plain  whether attention.kernels allows only plain torch for this model
    is_deterministic  run.deterministic
    is_view   whether outputs and their gradients are views of tensors with more heads
    """

    kernel: KernelMemory | None = None
    kinds: frozenset[LayerKind] | None = None
    is_plain: bool = False
    is_deterministic: bool = False
    is_view: bool = False

    def rotary(self, pack: float) -> float:
        """Bytes of cosine and sine of this rank's tokens, for one or two bases."""
        tables = 2.0 if self.model.rope.window_base is None else 4.0
        return tables * self.rank.width * (pack / self.rank.cp) * self.model.rotary_dim

    def local(self, tokens: float) -> float:
        return self._working_of(tokens * self.rank.cp)[0]

    def gathered(self, pack: float) -> float:
        return self._working_of(pack)[1]

    @cached_property
    def _known(self) -> dict[float, tuple[float, float]]:
        """The results of `_working` by pack: the planner asks for them thousands of times."""
        return {}

    def _working_of(self, pack: float) -> tuple[float, float]:
        if pack not in self._known:
            self._known[pack] = self._working(pack)
        return self._known[pack]

    def _working(self, pack: float) -> tuple[float, float]:
        """`local` and `gathered` of the kernel and the kind of layer, full or window, for which their sum is larger."""
        model = self.model
        kinds = all_kinds(model) if self.kinds is None else self.kinds
        if self.kernel is None:
            kernels = (replace(self, kernel=kernel, kinds=kinds) for kernel in self._kernels)
            return max((own._working(pack) for own in kernels), key=sum)
        if self._kernel.pads_values and model.value_head_dim is not None and not model.latent_attention.is_used:
            padded = replace(self, model=model.model_copy(update={"value_head_dim": None}))
            local, gathered = padded._working(pack)  # as the code of the kernel suggests; not measured on a GPU
            return local + self.rank.width * 2 * self.queries * pack / self.rank.cp, gathered
        full, window = "full attention" in kinds, "window attention" in kinds
        return max([self._full_layer(pack)] * full + [self._window_layer(pack)] * window, key=sum)

    def _full_layer(self, pack: float) -> tuple[float, float]:
        """`local` and `gathered` of a layer with full attention, which gathers one head group after the other.

        `gathered` has a group's keys and values in the kernel's order, the gradients that the kernel computes, the next
        group in transfer, and the fp32 sums of the previous group's gradients in transfer.
        """
        tokens, groups = pack / self.rank.cp, num_head_groups(self.model.resolved_query_groups // self.rank.tp)
        if self.rank.cp == 1:
            return self._in_kernel(tokens, tokens, 1, self._parents(1)), 0.0
        in_transfer = self.rank.width * (groups > 2) + FP32 * (groups > 1)
        before = FP32 * self.pairs * (groups - 1) / groups  # local gradients of keys and values of other groups
        # For the flash kernel, both chunks of a rank need a copy of the early keys of a document.
        num_keys = pack * (1 + 1 / (2 * self.rank.cp)) + self.rank.trees.keys if self._kernel.is_flash else pack
        gathered = self._keys(num_keys, pack * (groups == 1)) + in_transfer * self.pairs * pack
        return self._in_kernel(tokens, 0.0, groups, self._parents(groups)) + before * tokens, gathered / groups

    def _window_layer(self, pack: float) -> tuple[float, float]:
        """`local` and `gathered` of a layer with a window, which gathers a document's halo for all heads at once.

        With trees, a flash kernel needs halos before branches with cp 1, too.
        """
        tokens, window = pack / self.rank.cp, self.model.sliding_window or 0
        halo = self.rank.trees.halo(window, self.rank.cp) * (self._kernel.is_flash or self.rank.cp > 1)
        if self.rank.cp == 1:
            keys = self._keys(tokens + halo, tokens) if halo else 0.0
            return self._in_kernel(tokens, 0.0 if halo else tokens, 1), keys
        num_keys = min(pack, tokens + 2 * window) + halo
        return self._in_kernel(tokens, 0.0, 1), self._keys(num_keys, num_keys)

    def _parents(self, groups: int) -> float:
        """Bytes of the calls of a flash kernel in which branches attend to their parents."""
        kernel, unsummed = self._kernel, self.unsummed / groups * self._kernel.is_unsummed
        pairs = self.pairs / groups
        return kernel.is_flash * parent_keys(self.rank, queries=self.queries / groups, pairs=pairs, unsummed=unsummed)

    def _in_kernel(self, tokens: float, num_keys: float, groups: int, parents: float = 0.0) -> float:
        """Bytes of queries, of all gradients that the kernel computes, and of its working memory.

        If the group's output and its gradient are views, a flash kernel has copies of them.  The plain kernel holds
        three tiles of scores for the heads of a group: the weights, their gradient, and the weights of the previous
        tile; with a soft cap, also the cap's derivatives for this tile and the previous one.  In bf16 on CUDA, it also
        holds one tile in bf16, as a factor of a product.  A call for a class of lengths has copies of its queries,
        outputs and their gradients, and its results in addition to those of all classes.

        num_keys: keys on the rank, for which gradients are computed
        parents: bytes of the calls to parents.  They run after the causal calls, whose working memory is then free
        """
        kernel, width = self._kernel, self.rank.width
        copied = 2 * kernel.is_flash * (groups > 1 or self.is_view) + kernel.copies_views * (groups > 1)
        group = (1 + copied + 4 * self._has_classes) * width
        heads = self.model.num_attention_heads / self.rank.tp / groups
        sums = kernel.sums_queries and query_sums(
            self.rank,
            heads,
            tokens,
            width=self.model.resolved_head_dim,
            is_deterministic=self.is_deterministic and kernel.is_unsummed,
        )
        keys = self._has_classes * width * self.pairs * num_keys  # copies of a class's keys and values
        is_large = self.rank.is_fused and width < FP32
        fp32 = FP32 * (3 if self.model.attention_softcap is None else 5)
        of_head = (fp32 + width) * LARGE_SCORE_TILE if is_large else fp32 * SCORE_TILE
        tiles = 0.0 if kernel.is_flash else heads * of_head
        own = tokens * (self.rotated + group * self.queries / groups) + max(sums + keys, parents)
        return own + self._gradients(num_keys) + tiles

    def _keys(self, num_keys: float, num_sums: float) -> float:
        """Peak bytes of gathered keys and values of all heads.

        During the kernel, there are num_keys keys and values with their gradients.  After the kernel, the gradients
        remain, those of keys or of values also in fp32, with the fp32 sums of num_sums tokens.
        """
        width, kernel = self.rank.width, self._kernel
        summed = num_keys * (width + FP32 / 2 if kernel.is_flash else FP32) + num_sums * FP32
        keys = (1 + kernel.copies_views) * width * self.pairs * num_keys
        return max(keys + self._gradients(num_keys), self.pairs * summed)

    def _gradients(self, num_keys: float) -> float:
        """Bytes of the gradients of keys and values that the kernel computes."""
        kernel, width = self._kernel, self.rank.width
        if not kernel.is_flash:
            return num_keys * FP32 * self.pairs
        pairs = self.pairs * (1 + self._has_classes)
        return num_keys * (width * (pairs + self.unsummed * kernel.is_unsummed) + FP32 * self.pairs * kernel.sums_pairs)

    @property
    def _has_classes(self) -> bool:
        """Whether the kernel may compute the pack in several calls.  At worst, one call has nearly all tokens."""
        return self._kernel.starts_all_blocks and self.rank.is_uneven

    @property
    def _kernel(self) -> KernelMemory:
        assert self.kernel is not None
        return self.kernel

    @property
    def _kernels(self) -> list[KernelMemory]:
        """The kernels that may run.

        If torch's flash kernel cannot compute the attention, a kernel of an optional package runs, or plain torch.
        """
        if not self.rank.is_fused or self.is_plain:
            return [PLAIN]
        if has_flash(self.model):
            return [FLASH2]
        return [PLAIN, FFPA if self.model.resolved_head_dim > MAX_FLASH_HEAD else FLASH4]
