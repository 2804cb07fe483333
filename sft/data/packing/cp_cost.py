"""Predicts the time of a document on a group of context-parallel ranks, by the size of the group.

    time on each rank = (computation + communication that computation does not hide) / cp_size

`flops.py` counts the computation: padded tokens, and attention in layers with and without a window.  Keys and values of
other ranks arrive while full attention computes (sft/mcore/attention/packed_attention.py).  So their transfer counts
only as far as it takes longer than this attention.  Halos of windows and messages of linear attention count in full.

`parallel/cp_bytes.py` counts the bytes.  `dynamic_cp.py` uses the predictions.  Nothing is measured: bandwidths come
from the recipe, and the speed of computation is an assumed share of the peak.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sft.config import Config
from sft.layers.flops import ASSUMED_SHARE, ASSUMED_TFLOPS, AttentionCost, TrainFlops
from sft.parallel.alignment import aligned
from sft.parallel.cp_bytes import CpBytes
from sft.parallel.meetings import domain, meeting_ranks
from sft.parallel.shapes import SampleSizes, Shapes, attention_cost, padded

NS = 1e9
# Time in ns that each layer adds to a microbatch of any length, because kernels are launched, and weights and gradients
# are read.  A layer without a mixer or without an MLP adds half of it.  This is an assumption, not a measurement.
LAYER_NS = 5e5


@dataclass(frozen=True, kw_only=True)
class CpCost(CpBytes):
    """The speeds and sizes from which the time of a document on a rank of the dp x cp grid is computed.  A rank of this
    grid stands for all its tp ranks and pipeline stages.

    doc_multiple   documents are padded to a multiple of this number of tokens
    attention      cost of attention by length, in units of a token's computation outside attention
    token_ns       nanoseconds of a token's computation outside attention, if cp_size is 1
    microbatch_ns  nanoseconds that a microbatch takes in addition to its documents
    node_ranks     number of consecutive ranks of the grid in a node; a group whose size divides it lies within a node
    intra_gb_s     bandwidth of a rank within a node, in GB/s
    inter_gb_s     bandwidth of a rank between nodes, in GB/s
    wait_ranks     number of consecutive ranks of the grid that wait for each other after every microbatch; 1: only the
                   ranks of a group wait for each other
    """

    doc_multiple: int = 1
    attention: AttentionCost = AttentionCost()
    token_ns: float = 1000.0
    microbatch_ns: float = 0.0
    node_ranks: int = 8
    intra_gb_s: float = 300.0
    inter_gb_s: float = 40.0
    wait_ranks: int = 1

    @staticmethod
    def of(config: Config) -> "CpCost":
        """The costs of a recipe."""
        model, parallel = config.model, config.parallel
        tp, pp = parallel.tp, parallel.pp
        num_halves = len(model.halves.without_mixer) + len(model.halves.without_mlp)
        repeats = config.train.repeats_layers
        per_token = TrainFlops.of(model, 0).per_token * (4 / 3 if repeats else 1.0)
        flops = (config.log.peak_tflops or ASSUMED_TFLOPS) * 1e12 * ASSUMED_SHARE
        return CpCost(
            **vars(CpBytes.of(config)),
            doc_multiple=config.data.doc_multiple,
            attention=AttentionCost.of(model),
            token_ns=per_token * NS / (tp * pp * flops),
            microbatch_ns=LAYER_NS * (model.num_layers - num_halves / 2) / pp,
            node_ranks=max(1, parallel.gpus_per_node // tp),
            intra_gb_s=parallel.intra_node_gb_s,
            inter_gb_s=parallel.inter_node_gb_s,
            wait_ranks=meeting_ranks(config),
        )

    def domain(self, num_ranks: int) -> int:
        """The number of consecutive ranks that wait for each other in a grid of `num_ranks`."""
        return domain(self.wait_ranks, num_ranks)

    def times(self, lengths: SampleSizes, cp_size: int) -> np.ndarray:
        """Nanoseconds that each document takes on each rank of a group of cp_size ranks: int64 [n].

        Example: crossover 1000, token_ns 10, no bytes over cp.  Documents of 1,000 and 4,000 tokens cost as much as
        2,000 and 20,000 tokens without attention, so they take [10000, 100000] on 2 ranks.
        """
        return self.times_by_size(lengths, (cp_size,))[0]

    def times_by_size(self, lengths: SampleSizes, sizes: Sequence[int]) -> np.ndarray:
        """The result of `times` for each of the group sizes `sizes`: int64 [sizes, n]."""
        tokens = padded(lengths, self.doc_multiple)
        alone = (tokens + attention_cost(lengths, self.attention)) * self.token_ns
        hidden = attention_cost(lengths, AttentionCost(self.attention.crossover)) * self.token_ns
        times = np.empty((len(sizes), len(tokens)), dtype=np.int64)
        for k, size in enumerate(sizes):
            computed = alone
            if size > 1:
                gb_s = self.gb_s(size)
                of_keys = self.kv_bytes * tokens * (size - 1) / gb_s
                computed = computed + np.maximum(of_keys - hidden, 0.0) + self._others(lengths, size) / gb_s
            times[k] = np.rint(computed / size)
        return times

    def _others(self, samples: SampleSizes, cp_size: int) -> np.ndarray:
        """The bytes of each sample other than keys and values.  Each branch of a tree has halos and a state of its
        own."""
        if isinstance(samples, Shapes):
            of_documents = aligned(samples.lengths, self.doc_multiple)
            return samples.sums(self.other_than_keys(of_documents, cp_size, samples.branches))
        return self.other_than_keys(padded(samples, self.doc_multiple), cp_size)

    def gb_s(self, cp_size: int) -> float:
        """Bandwidth of a rank in a group of this size, in GB/s: that within a node if no such group spans two nodes."""
        return self.intra_gb_s if self.node_ranks % cp_size == 0 else self.inter_gb_s


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of a global batch, numbered in order of falling padded length.  A tree is one document.

    ids            int64 [n]: sample id of each document
    sizes          sizes of groups, rising
    units          int64 [n]: padded length of each document, in units of doc_multiple tokens
    limit          units that a rank may hold in a microbatch; a group of s ranks holds s times as many
    times          int64 [sizes, n]: nanoseconds of each document on each rank of a group, by size of the group
    least          int64 [n]: index in `sizes` of the smallest group that holds the document
    microbatch_ns  nanoseconds that a microbatch takes in addition to its documents
    """

    ids: np.ndarray
    sizes: tuple[int, ...]
    units: np.ndarray
    limit: int
    times: np.ndarray
    least: np.ndarray
    microbatch_ns: float

    @staticmethod
    def of(
        samples: Sequence[int] | np.ndarray,
        lengths: SampleSizes,
        sizes: tuple[int, ...],
        *,
        rank_tokens: int,
        cost: CpCost,
    ) -> "Documents":
        """The documents of these samples, longest first.

        samples      sample ids
        lengths      sizes of all samples of the corpus, by sample id
        sizes        sizes of groups, rising
        rank_tokens  padded tokens that a rank may hold in a microbatch

        lengths 40 and 90, rank_tokens 64, doc_multiple 8, sizes 1 2 -> longest first: units 12 5, least 1 0; limit 8
        """
        ids = np.asarray(samples, dtype=np.int64)
        exact = np.asarray(lengths[ids])
        longest_first = -padded(lengths[ids], cost.doc_multiple) * (int(exact.max(initial=0)) + 1) - exact
        ids = ids[np.argsort(longest_first, kind="stable")]
        real, limit = lengths[ids], rank_tokens // cost.doc_multiple
        units = padded(real, cost.doc_multiple) // cost.doc_multiple
        least = np.searchsorted(np.array(sizes) * limit, units)
        assert len(ids) == 0 or least[0] < len(sizes), "no group holds the longest document"
        times = cost.times_by_size(real, sizes)
        return Documents(
            ids=ids, sizes=sizes, units=units, limit=limit, times=times, least=least, microbatch_ns=cost.microbatch_ns
        )

    def work(self, index: np.ndarray) -> np.ndarray:
        """int64 [n]: nanoseconds of each document, summed over its ranks, if document i runs on sizes[index[i]]
        ranks."""
        return self.times[index, np.arange(len(index))] * np.array(self.sizes)[index]

    def bound_ns(self, num_ranks: int) -> int:
        """A lower bound of the time of a step in ns.

        It is the larger of two times, plus `microbatch_ns` for each microbatch that the tokens need at least.  The
        first time is the work of all documents on the smallest groups that hold them, shared evenly by all ranks.  The
        second is the time of the slowest document on the largest group.
        """
        if len(self.ids) == 0:
            return round(self.microbatch_ns)
        return max(self.even_ns(self.least, num_ranks), self._with_microbatches(int(self.times[-1].max()), num_ranks))

    def even_ns(self, index: np.ndarray, num_ranks: int) -> int:
        """Time of a step in ns if document i runs on sizes[index[i]] ranks, and all ranks share the work evenly."""
        return self._with_microbatches(-(-int(self.work(index).sum()) // num_ranks), num_ranks)

    def _with_microbatches(self, work: int, num_ranks: int) -> int:
        """The time `work`, in ns, plus `microbatch_ns` for each microbatch that the tokens need at least."""
        num_microbatches = -(-int(self.units.sum()) // (num_ranks * self.limit))
        return work + round(num_microbatches * self.microbatch_ns)
