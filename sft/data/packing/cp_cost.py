"""Time and bytes of a document on a group of context-parallel ranks, by the size of the group, for `dynamic_cp`.

    time on each rank = (computation + communication that computation does not hide) / cp_size

Computation is that of `flops.py`: padded tokens, squares in layers with full attention, windows.  Keys and values of
other ranks arrive while attention computes (sft/mcore/attention/packed_attention.py), so of their transfer only the
part counts that takes longer than attention.  Halos of windows and states of linear attention hide behind nothing.

`parallel/cp_bytes.py` counts the bytes.  Nothing is measured: bandwidths come from the recipe, and the speed of
computation from an assumed share of the peak.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sft.config import Config
from sft.layers.flops import ASSUMED_SHARE, ASSUMED_TFLOPS, AttentionCost, TrainFlops
from sft.parallel.alignment import aligned
from sft.parallel.cp_bytes import CpBytes

NS = 1e9
# Time of a microbatch in each layer besides its tokens: its kernels are started, weights and gradients are read.  An
# assumption, as is the share of the peak.
LAYER_NS = 5e5


@dataclass(frozen=True, kw_only=True)
class CpCost(CpBytes):
    """Time and bytes of a document on one rank of the dp x cp grid, which is `tp` devices of each pipeline stage.

    doc_multiple  documents are padded to a multiple of this
    attention     attention's computation, in tokens of other computation
    token_ns      other computation of a token, and `microbatch_ns` of a microbatch, if cp_size is 1
    node_ranks    consecutive ranks of the grid in a node: groups of sizes that divide it send within the node
    wait_ranks    consecutive ranks of the grid that wait for each other after every microbatch; 1: only groups wait
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
        is_full = config.train.recompute == "full"
        per_token = TrainFlops.of(model, 0).per_token * (4 / 3 if is_full else 1.0)
        flops = (config.log.peak_tflops or ASSUMED_TFLOPS) * 1e12 * ASSUMED_SHARE
        waits = parallel.cp if pp > 1 else 1
        if parallel.ep * parallel.etp > 1:  # its ranks are consecutive, and tp of them are one rank of the grid
            groups = -(-parallel.ep * parallel.etp // tp)
            waits = -(-max(waits, groups) // parallel.cp) * parallel.cp
        return CpCost(
            **vars(CpBytes.of(config)),
            doc_multiple=config.data.doc_multiple,
            attention=AttentionCost.of(model),
            token_ns=per_token * NS / (tp * pp * flops),
            microbatch_ns=LAYER_NS * model.num_layers / pp,
            node_ranks=max(1, parallel.gpus_per_node // tp),
            intra_gb_s=parallel.intra_node_gb_s,
            inter_gb_s=parallel.inter_node_gb_s,
            wait_ranks=waits,
        )

    def domain(self, num_ranks: int) -> int:
        """Consecutive ranks of a grid of `num_ranks` that wait for each other: wait_ranks, if it divides the grid.

        12 ranks, wait_ranks 4 -> 4        12 ranks, wait_ranks 8 -> 12
        """
        return self.wait_ranks if num_ranks % self.wait_ranks == 0 else num_ranks

    def times(self, lengths: np.ndarray, cp_size: int) -> np.ndarray:
        """Nanoseconds of each document on each rank of a group: int64 [n].

        lengths [1000, 4000], doc_multiple 8, crossover 1000, token_ns 10, nothing over cp, cp_size 2
        -> [2000, 20000] x 10 / 2
        """
        real = np.asarray(lengths, dtype=np.int64)
        padded = aligned(real, self.doc_multiple)
        computed = (padded + self.attention(real)) * self.token_ns
        if cp_size > 1:
            gb_s = self.gb_s(cp_size)
            of_keys = self.kv_bytes * padded * (cp_size - 1) / gb_s
            hidden = AttentionCost(self.attention.crossover)(real) * self.token_ns
            computed = computed + np.maximum(of_keys - hidden, 0.0) + self.other_than_keys(padded, cp_size) / gb_s
        return np.rint(computed / cp_size).astype(np.int64)

    def gb_s(self, cp_size: int) -> float:
        """Bandwidth of a rank in a group: that within a node, if aligned groups of this size lie within nodes."""
        return self.intra_gb_s if self.node_ranks % cp_size == 0 else self.inter_gb_s


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of a global batch in order of falling length, and numbered in this order.

    ids            int64 [n]: their samples
    sizes          sizes of groups, rising
    units          int64 [n]: padded tokens, in units of doc_multiple
    limit          units that a rank may hold in a microbatch; a group of s ranks holds s times as many
    times          int64 [sizes, n]: nanoseconds on each rank of a group of each size
    least          int64 [n]: index in `sizes` of the smallest group that holds the document
    microbatch_ns  time of a microbatch besides its documents
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
        samples: Sequence[int], lengths: np.ndarray, sizes: tuple[int, ...], *, rank_tokens: int, cost: CpCost
    ) -> "Documents":
        """lengths 40 and 90, rank_tokens 64, doc_multiple 8, sizes 1 2 -> units 12 and 5, limit 8, least 1 and 0"""
        ids = np.asarray(samples, dtype=np.int64)
        ids = ids[np.argsort(-lengths[ids], kind="stable")]
        real, limit = lengths[ids], rank_tokens // cost.doc_multiple
        units = aligned(real, cost.doc_multiple) // cost.doc_multiple
        least = np.searchsorted(np.array(sizes) * limit, units)
        assert len(ids) == 0 or least[0] < len(sizes), "no group holds the longest document"
        times = np.stack([cost.times(real, size) for size in sizes])
        return Documents(
            ids=ids, sizes=sizes, units=units, limit=limit, times=times, least=least, microbatch_ns=cost.microbatch_ns
        )

    def work(self, index: np.ndarray) -> np.ndarray:
        """int64 [n]: nanoseconds of all ranks together, if document i runs on a group of sizes[index[i]] ranks."""
        return self.times[index, np.arange(len(index))] * np.array(self.sizes)[index]

    def bound_ns(self, num_ranks: int) -> int:
        """Nanoseconds of a step that no assignment goes below: the work of all documents, each on the smallest group
        that holds it, shared evenly by all ranks; or the longest document on the largest group.  Either runs at least
        one microbatch, and as many as the tokens need."""
        if len(self.ids) == 0:
            return round(self.microbatch_ns)
        num_microbatches = -(-int(self.units.sum()) // (num_ranks * self.limit))
        work = -(-int(self.work(self.least).sum()) // num_ranks)
        return max(work, int(self.times[-1].max())) + round(num_microbatches * self.microbatch_ns)
