"""What a document costs on a group of context-parallel ranks, by the size of the group: time and bytes.

    time on each rank = (computation + communication that computation does not hide) / cp_size

Computation is that of `flops.py`: padded tokens, squares in layers with full attention, windows.  Keys and values of
other ranks arrive while attention computes (sft/mcore/attention/packed_attention.py), so of their transfer only the
part counts that takes longer than attention.  Halos of windows and states of linear attention hide behind nothing.

    K/V of a layer          a rank receives (cp_size - 1) / cp_size of the document, in forward and in backward, and as
                            many gradients in fp32
    window                  tokens of `num_halo_tokens`, also three times
    linear attention        `fragments.bytes_over_cp`, in forward and in backward

Nothing is measured: bandwidths come from the recipe, and the speed of computation from an assumed share of the peak.
"""

from dataclasses import dataclass

import numpy as np

from sft.config import Config
from sft.flops import ASSUMED_SHARE, ASSUMED_TFLOPS, AttentionCost, TrainFlops
from sft.parallel.alignment import aligned
from sft.parallel.fragments import FP32, HeadSizes

NS = 1e9
# Time of a microbatch in each layer besides its tokens: its kernels are started, weights and gradients are read.  An
# assumption, as is the share of the peak.
LAYER_NS = 5e5


@dataclass(frozen=True, kw_only=True)
class CpCost:
    """Time and bytes of a document on one rank of the dp x cp grid, which is `tp` devices of each pipeline stage.

    attention     attention's computation, in tokens of other computation
    token_ns      other computation of a token, and `microbatch_ns` of a microbatch, if cp_size is 1
    kv_bytes      keys, values and gradients of a token that arrive at each other rank, in layers with full attention
    halo_bytes    the same in layers with a window of `AttentionCost.window` tokens
    linear        of `num_linear` layers with linear attention, which pass states `num_passes` times
    node_ranks    consecutive ranks of the grid in a node: groups of sizes that divide it send within the node
    wait_ranks    consecutive ranks of the grid that wait for each other after every microbatch; 1: only groups wait
    """

    attention: AttentionCost = AttentionCost()
    token_ns: float = 1000.0
    microbatch_ns: float = 0.0
    kv_bytes: float = 0.0
    halo_bytes: float = 0.0
    linear: HeadSizes | None = None
    num_linear: float = 0.0
    num_passes: int = 2
    conv_kernel: int = 1
    node_ranks: int = 8
    intra_gb_s: float = 300.0
    inter_gb_s: float = 40.0
    wait_ranks: int = 1

    @staticmethod
    def of(config: Config) -> "CpCost":
        """The costs of a recipe.

        Llama 8B in bf16 on tp 2: a token has 4 x 2 x 128 numbers of keys and values in each of 32 layers; they travel
        twice in bf16 and their gradients once in fp32 -> kv_bytes 262,144
        """
        model, parallel = config.model, config.parallel
        tp, pp = parallel.tp, parallel.pp
        width = FP32 if config.run.precision == "fp32" else FP32 // 2
        is_full = config.train.recompute == "full"
        num_passes = 3 if is_full else 2
        num_linear, num_window = len(model.linear_attention.layers), model.num_window_layers
        pairs = 2 * model.resolved_query_groups // tp * model.resolved_head_dim
        layer_bytes = pairs * (num_passes * width + FP32)
        num_full = model.num_layers - num_linear - num_window
        per_token = TrainFlops.of(model, 0).per_token * (4 / 3 if is_full else 1.0)
        flops = (config.log.peak_tflops or ASSUMED_TFLOPS) * 1e12 * ASSUMED_SHARE
        waits = parallel.cp if pp > 1 else 1
        if parallel.ep * parallel.etp > 1:  # its ranks are consecutive, and tp of them are one rank of the grid
            groups = -(-parallel.ep * parallel.etp // tp)
            waits = -(-max(waits, groups) // parallel.cp) * parallel.cp
        return CpCost(
            attention=AttentionCost.of(model),
            token_ns=per_token * NS / (tp * pp * flops),
            microbatch_ns=LAYER_NS * model.num_layers / pp,
            kv_bytes=layer_bytes * num_full / pp,
            halo_bytes=layer_bytes * num_window / pp,
            linear=HeadSizes.of(model.linear_attention, tp, width) if num_linear else None,
            num_linear=num_linear / pp,
            num_passes=num_passes,
            conv_kernel=model.linear_attention.conv_kernel,
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
            computed = computed + np.maximum(of_keys - hidden, 0.0) + self._other_bytes(padded, cp_size) / gb_s
        return np.rint(computed / cp_size).astype(np.int64)

    def num_bytes(self, lengths: np.ndarray, doc_multiple: int, cp_size: int) -> np.ndarray:
        """Bytes that all ranks of the group together receive for each document: int64 [n].

        lengths [1000], doc_multiple 8, kv_bytes 4, cp_size 4 -> 12,000
        """
        padded = aligned(np.asarray(lengths, dtype=np.int64), doc_multiple)
        if cp_size == 1:
            return np.zeros(len(padded), dtype=np.int64)
        total = self.kv_bytes * padded * (cp_size - 1) + self._other_bytes(padded, cp_size)
        return np.rint(total).astype(np.int64)

    def gb_s(self, cp_size: int) -> float:
        """Bandwidth of a rank in a group: that within a node, if aligned groups of this size lie within nodes."""
        return self.intra_gb_s if self.node_ranks % cp_size == 0 else self.inter_gb_s

    def _other_bytes(self, padded: np.ndarray, cp_size: int) -> np.ndarray:
        """Bytes of halos and of linear attention of each document, over all ranks of the group: float64 [n]."""
        total = np.zeros(len(padded))
        if self.halo_bytes and self.attention.window is not None:
            total += self.halo_bytes * halo_tokens(padded, self.attention.window, cp_size)
        if self.linear is None:
            return total
        sizes = self.linear
        is_short = padded <= sizes.max_short(cp_size)
        tokens = padded * (cp_size - 1) // cp_size * sizes.token_bytes
        channels = 2 * sizes.key_heads * sizes.key_dim + sizes.value_heads * sizes.value_dim
        halo = halo_tokens(padded, self.conv_kernel, cp_size) * channels * sizes.width
        of_layer = np.where(is_short, tokens, 2 * (cp_size - 1) * sizes.map_bytes) + halo
        return total + self.num_passes * self.num_linear * of_layer


def halo_tokens(padded: np.ndarray, window: int, cp_size: int) -> np.ndarray:
    """Tokens before their chunks that all ranks of a group together receive for each document: int64 [n].

    The sum of `halo.num_halo_tokens` over documents: 12 tokens, window 3, cp_size 3 -> 8
    """
    chunk, rank = padded[:, None] // (2 * cp_size), np.arange(cp_size)
    before_early, before_late = rank * chunk, (2 * cp_size - 2 - 2 * rank) * chunk  # not held by the rank itself
    return (np.minimum(before_early, window - 1) + np.minimum(before_late, window - 1)).sum(axis=1)
