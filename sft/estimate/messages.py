"""Predicts the exposed seconds of messages between GPUs: the seconds that computation does not hide.

    tp    all-gathers and reduce-scatters before and after each half of a layer; matrix products of backward hide a part
    cp    the bytes of sft/parallel/cp_bytes.py; attention hides a ring, nothing hides an all-to-all
    ep    tokens to experts and back; nothing hides them
    pp    hidden states between stages; only virtual stages hide them
    dp    gradients and weights; with parallel.overlap, the last backward pass hides gradients

Each rank receives N (n - 1) / n bytes in an all-gather or reduce-scatter of N bytes over n ranks.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sft.config import Config, ModelConfig
from sft.estimate.attention_kernels import uses_portable
from sft.estimate.constants import Constants
from sft.estimate.layer_work import Seconds, cp_sizes
from sft.estimate.lengths import Lengths
from sft.estimate.parameters import StageParameters
from sft.estimate.products import num_repeats
from sft.layers.kinds import LayerGroup, layer_groups
from sft.layers.matrices import matrices
from sft.layers.rank_share import FP32
from sft.layers.weight import expert_width
from sft.parallel.alignment import aligned
from sft.parallel.cp_bytes import CpBytes
from sft.parallel.layout import Layout


@dataclass(frozen=True)
class Messages:
    """The messages of one rank of an average pipeline stage."""

    config: Config
    layout: Layout
    constants: Constants
    lengths: Lengths

    def exposed_by_layers(self, forward: Seconds, backward: Seconds, repeated: Seconds) -> dict[str, float]:
        """Exposed seconds of one microbatch in all layers of a stage: {"tp": ..., "cp": ..., "ep": ..., "pp": ...}."""
        return {
            "tp": self._tensor_parallel(backward),
            "cp": self._context_parallel(forward.attention + backward.attention),
            "ep": self._experts(),
            "pp": self._pipeline(),
        }

    # --- parts ---------------------------------------------------------------------------------------------------

    @cached_property
    def _tokens(self) -> float:
        return self.config.data.seq_length / self.layout.cp

    @cached_property
    def _width(self) -> int:
        return 2 if self.config.run.precision == "bf16" else FP32

    @cached_property
    def _layers(self) -> float:
        return self.config.model.num_layers / self.layout.pp

    def seconds(self, num_bytes: float, gb_s: float, count: float) -> float:
        """Seconds of `count` messages that have num_bytes in total over a link of gb_s GB/s."""
        return num_bytes / (gb_s * 1e9) + count * self.constants.latency_us.value * 1e-6

    def _tensor_parallel(self, backward: Seconds) -> float:
        layout, model, recompute = self.layout, self.config.model, self.config.train.recompute
        if layout.tp == 1:
            return 0.0
        counts = [(group, len(group.numbers) / model.num_layers) for group in layer_groups(model)]
        mlps = sum(share for group, share in counts if group.mlp.is_split_by_tp)  # dense, or with a shared expert
        blocks = mlps + sum(share for group, share in counts if group.mixer.is_split_by_tp)
        mixers = sum(share for group, share in counts if group.mixer.is_recomputed)
        repeated = {"none": 0, "selective": mlps + mixers}.get(recompute, blocks)
        left_out = sum(share * num_left_out(self.config, group) for group, share in counts) if repeated else 0
        num = blocks + repeated  # forward and recomputation, each with a gather and a scatter
        # Nothing hides the gathers of the gradients of outputs.  Matrix products hide the second gather of inputs, and
        # the scatter of their gradients.
        beside = self._pairs(blocks if layout.sequence_parallel else 0, blocks) * self._layers
        exposed = self._pairs(num + blocks, num - left_out) * self._layers
        ends = 2 if layout.pp == 1 else 1  # embedding and loss head: each gathers and scatters once
        return exposed + self._pairs(ends, ends) + unhidden(self.constants, beside, backward.linear)

    def _pairs(self, num_gathers: float, num_scatters: float) -> float:
        """Seconds of all-gathers and reduce-scatters of hidden states over tp."""
        tp = self.layout.tp
        size = self._tokens * self.config.model.hidden_size * self._width * (tp - 1) / tp
        moved = size * (num_gathers + num_scatters / self.constants.reduce_scatter.value)
        return self.seconds(moved, self._link(tp), num_gathers + num_scatters)

    def _context_parallel(self, attention_s: float) -> float:
        layout, config = self.layout, self.config
        if layout.cp == 1:
            return 0.0
        cost = CpBytes.of(config)
        ring, others, hops = 0.0, 0.0, 0.0
        passes = 3 if config.train.repeats_attention else 2
        gathered, reduced = passes * self._width, FP32  # bytes per element of a key in all passes, and of its gradient
        longer = 1.0  # a ring sends keys and gradients at the same rate
        if uses_portable(config):
            longer = (gathered + reduced / self.constants.reduce_scatter.value) / (gathered + reduced)
        tokens, counts = self.lengths.of_pack(config.data.seq_length)
        sizes = cp_sizes(layout, tokens, config)
        heads = self._head_ranks()
        for cp_size in sorted(set(sizes) - {1}):
            has_size = np.array([size == cp_size for size in sizes])
            own, number = tokens[has_size], counts[has_size]
            padded, gb_s = aligned(np.ceil(own).astype(np.int64), layout.doc_multiple), self._link(cp_size * layout.tp)
            keys = cost.kv_bytes * float(number @ padded) * (cp_size // heads - 1)
            ring += longer * keys / layout.cp / (gb_s * 1e9)
            others += float(number @ cost.other_than_keys(padded, cp_size)) / layout.cp / (gb_s * 1e9)
            hops = max(hops, cp_size // heads - 1)
        latency = self.constants.latency_us.value * 1e-6
        shown = others + latency * passes * self._layers + self._all_to_all(heads, passes)
        return shown + self._ring(ring + hops * latency * passes * self._layers, attention_s)

    def _head_ranks(self) -> int:
        """Number of cp ranks between which an all-to-all exchanges heads; 1: no all-to-all."""
        parallel = self.config.parallel
        if uses_portable(self.config):
            return 1
        return {"a2a": self.layout.cp, "a2a+p2p": parallel.cp_a2a or 1}.get(parallel.cp_comm, 1)

    def _all_to_all(self, heads: int, passes: int) -> float:
        """Seconds of the all-to-alls of queries, keys, values and outputs, and of their gradients in backward.

        heads: number of ranks of an all-to-all; passes: number of passes that compute attention
        """
        model, layout = self.config.model, self.layout
        if heads == 1:
            return 0.0
        widths = model.resolved_head_dim + model.resolved_value_head_dim
        numbers = (model.num_attention_heads + model.resolved_query_groups) * widths / layout.tp
        num_bytes = self._tokens * numbers * self._width * (heads - 1) / heads
        attending = sum(len(group.numbers) for group in layer_groups(model) if group.mixer.pair_width) / layout.pp
        return attending * passes * self.seconds(num_bytes, self._link(heads * layout.tp), 2)

    def _ring(self, messages_s: float, attention_s: float) -> float:
        parallel = self.config.parallel
        if uses_portable(self.config):
            shares = [group.mixer.first_share(self.config) for group in layer_groups(self.config.model)]
            first = messages_s * min(shares)
            return first + unhidden(self.constants, messages_s - first, attention_s)
        if parallel.cp_comm == "all_gather":
            return messages_s
        return unhidden(self.constants, messages_s, attention_s)

    def _experts(self) -> float:
        layout, model = self.layout, self.config.model
        ranks = layout.ep * layout.etp
        if ranks == 1 or model.moe.num_experts is None:
            return 0.0
        sequence = layout.tp if layout.sequence_parallel else 1
        of_token = self._tokens / sequence * (expert_width(model) * self._width + FP32 / 2) * layout.etp
        times = 6 if self.config.train.repeats_layers else 4
        node, top_k = self.config.parallel.gpus_per_node, model.moe.top_k or 0
        away = max(0.0, 1 - node / ranks)  # share of the tokens that go to ranks of other nodes
        if self.config.parallel.ep_comm == "deepep":  # a rank or a node gets a token once, whatever experts it has
            local, remote = distinct(ranks, top_k) * (ranks - 1) / ranks, distinct(ranks / node, top_k) * away
        else:
            local, remote = top_k * ((ranks - 1) / ranks - away), top_k * away
        within = of_token * local / self.constants.intra_gb_s.value
        between = of_token * remote / self.constants.inter_gb_s.value
        latency = self.constants.latency_us.value * 1e-6
        return times * expert_share(model) * self._layers * (max(within, between) / 1e9 + 2 * latency)

    def _pipeline(self) -> float:
        layout = self.layout
        if layout.pp == 1:
            return 0.0
        sequence = layout.tp if layout.sequence_parallel else 1
        num_bytes = self._tokens / sequence * self.config.model.hidden_size * self._width
        ranks = layout.tp * layout.cp * layout.dp
        is_within = ranks * 2 <= self.config.parallel.gpus_per_node
        gb_s = (self.constants.intra_gb_s if is_within else self.constants.inter_gb_s).value
        if layout.virtual_stages > 1:  # messages of one chunk travel while another one computes
            return self.seconds(0.0, gb_s, 2 * layout.virtual_stages)
        return self.seconds(2 * num_bytes / self.constants.send.value, gb_s, 2)

    def gradients(self, own: StageParameters, backward_s: float) -> float:
        """Exposed seconds of a step for the reduce-scatter of gradients and the all-gather of weights."""
        layout, parallel = self.layout, self.config.parallel
        groups = (
            (own.trained.dense, layout.cp * layout.dp, layout.tp),
            (own.trained.experts, layout.expert_copies, layout.ep * layout.etp),
        )
        reduced, gathered, element = 0.0, 0.0, self.config.optim.gradient_bytes
        for numbers, ranks, stride in groups:
            if ranks == 1 or not numbers:
                continue
            gb_s, moved = self.wide_link(ranks, stride), numbers * (ranks - 1) / ranks
            reduced += self.seconds(element * moved / self.constants.reduce_scatter.value, gb_s, 1)
            gathered += self.seconds((self._width if parallel.distributed_optimizer else element) * moved, gb_s, 1)
        overlaps = parallel.overlap and self.config.run.device != "cpu"
        return gathered + (unhidden(self.constants, reduced, backward_s) if overlaps else reduced)

    # --- links ---------------------------------------------------------------------------------------------------

    def _link(self, num_gpus: int) -> float:
        """GB/s of a rank in a group of num_gpus neighbouring GPUs."""
        is_within = self.config.parallel.gpus_per_node % num_gpus == 0
        return (self.constants.intra_gb_s if is_within else self.constants.inter_gb_s).value

    def wide_link(self, ranks: int, stride: int) -> float:
        """GB/s of a rank in a ring over many ranks of each node, if all ports of a node share the traffic."""
        intra, inter = self.constants.intra_gb_s.value, self.constants.inter_gb_s.value
        node = self.config.parallel.gpus_per_node
        if ranks * stride <= node:
            return intra
        return min(intra, inter * max(1, node // stride))


def unhidden(constants: Constants, messages_s: float, compute_s: float) -> float:
    """Seconds of messages that simultaneous computation does not hide.  3 and 2 -> 1; with exposed = 1 -> 3"""
    return max(messages_s - compute_s, 0.0) + constants.exposed.value * min(messages_s, compute_s)


def distinct(groups: float, draws: int) -> float:
    """The mean number of different groups that random draws choose.  4 groups, 8 draws -> 3.6; 1 group or less -> 1"""
    return groups * (1 - (1 - 1 / groups) ** draws) if groups > 1 else 1.0


def expert_share(model: ModelConfig) -> float:
    """Share of the layers that have experts."""
    return sum(model.has_experts(number + 1) for number in range(model.num_layers)) / model.num_layers


def num_left_out(config: Config, group: LayerGroup) -> int:
    """Number of scatters over tp that recomputation of a layer leaves out, with the products before them."""
    left_out = {matrix.part for matrix in matrices(group) if matrix.unread.leaves_out(config, matrix.part)}
    return sum(num_repeats(config, part) > 0 for part in left_out - {"experts"})
