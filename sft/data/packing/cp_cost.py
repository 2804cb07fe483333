"""Time and bytes of a document on a group of context-parallel ranks, by the size of the group.

    time on each rank = (computation + communication that computation does not hide) / cp_size

Computation is that of `flops.py`: padded tokens, squares in layers with full attention, windows.  Keys and values of
other ranks arrive while attention computes (sft/mcore/attention/packed_attention.py), so of their transfer only the
part counts that takes longer than attention.  Halos of windows and states of linear attention hide behind nothing.

`parallel/cp_bytes.py` counts the bytes.  Nothing is measured: bandwidths come from the recipe, and the speed of
computation from an assumed share of the peak.
"""

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

    attention     attention's computation, in tokens of other computation
    token_ns      other computation of a token, and `microbatch_ns` of a microbatch, if cp_size is 1
    node_ranks    consecutive ranks of the grid in a node: groups of sizes that divide it send within the node
    wait_ranks    consecutive ranks of the grid that wait for each other after every microbatch; 1: only groups wait
    """

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

    def times(self, lengths: np.ndarray, doc_multiple: int, cp_size: int) -> np.ndarray:
        """Nanoseconds of each document on each rank of a group: int64 [n].

        lengths [1000, 4000], doc_multiple 8, crossover 1000, token_ns 10, nothing over cp, cp_size 2
        -> [2000, 20000] x 10 / 2
        """
        real, padded = np.asarray(lengths, dtype=np.int64), aligned(np.asarray(lengths, dtype=np.int64), doc_multiple)
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
