"""Estimates the device memory and the host memory of a rank.  Arithmetic only: no torch, no measurement.

    device = weights + gradients + optimizer + layers + ends + the largest of the working sets

The files of sft/layers give the bytes of the two halves of a layer.  This module adds them up over a stage.  `layers`
are the tensors that layers save for backward, `ends` the rotary tables.  A working set is the temporary memory of the
loss head, of backward in an MLP or in attention, or of the update (working_sets.py).  On CUDA, the estimate assumes
fused activations and the attention kernels that may run.  With run.device = cpu, it assumes the plain operations of a
CPU.  It leaves out CUDA itself, NCCL (communicators.py) and gaps between allocations.
"""

from dataclasses import dataclass, replace

from sft.config import Config
from sft.console import size
from sft.estimate import muon
from sft.estimate.layer_work import cp_sizes
from sft.estimate.lengths import Lengths
from sft.estimate.low_bits import LowBitBase
from sft.estimate.model_bytes import fp32_gradients, state
from sft.estimate.parameters import stage_parameters
from sft.estimate.saved_by_layer import rotary_tables
from sft.estimate.stage import Stage
from sft.estimate.working_sets import MATRICES, UPDATE, StageWork, WorkingSet
from sft.layers.adapters import Trained
from sft.parallel.layout import Layout

# 74.5 GiB, about the part of an 80-GB card's 79 GiB that CUDA leaves.  `describe` reports the longest context for it.
CARD_BYTES = 80e9


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the rank that needs the most memory.  The rank belongs to pipeline stage `stage`."""

    stage: int
    weights: float
    gradients: float
    optimizer: float
    layers: float  # saved by layers when backward begins
    ends: float  # rotary tables
    sets: tuple[WorkingSet, ...]  # only one of them exists at a time
    host_layers: float = 0.0
    host_optimizer: float = 0.0
    host_copy: float = 0.0  # the copy of weights and optimizer states that a save in the background writes

    @property
    def static(self) -> float:
        """Bytes that do not grow with the length of a pack."""
        return self.weights + self.gradients + self.optimizer

    @property
    def device(self) -> float:
        return self.static + self.layers + self.ends + self.peak.net

    @property
    def peak(self) -> WorkingSet:
        """The working set that needs the most memory together with the tensors that layers still save at that time."""
        return max(self.sets, key=lambda working: working.net)

    @property
    def host(self) -> float:
        return self.host_layers + self.host_optimizer + self.host_copy

    def host_of_node(self, gpus_per_node: int, num_gpus: int) -> float:
        """Bytes of host memory of a node, if each of its ranks needs as much as this one."""
        return self.host * min(gpus_per_node, num_gpus)

    def items(self) -> dict[str, float]:
        """The bytes of `device` by name, at the time of the peak.

        {"weights": ..., "gradients": ..., "optimizer": ..., "saved by layers": ..., "rotary": ..., "loss head": ...}
        """
        items = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "saved by layers": self.layers - self.peak.freed,
            "rotary": self.ends,
            **self.peak.by_name,
        }
        return {name: value for name, value in items.items() if value}


def stage_memory(stage: Stage, pack: int) -> Memory:
    """The memory of one rank of the stage.  pack: tokens of a pack"""
    own = stage_parameters(stage)
    work = StageWork.of(stage, pack)
    layers, host_layers = work.saved_by_layers()
    virtual, waiting = stage.layout.virtual_stages, stage.num_waiting
    block = work.saved_by_mtp() * (waiting if virtual == 1 else 1)
    # Virtual stages keep a sent hidden state until its gradient arrives.  The last chunk of the last stage sends none.
    sent = work.hidden * (waiting - stage.is_last) if virtual > 1 else 0.0
    saved = layers + block + sent
    in_update = {UPDATE: fp32_gradients(stage, own), MATRICES: muon.buffers(stage, own)}
    update = [WorkingSet({name: held for name, held in in_update.items() if held}, freed=saved)]
    return Memory(
        stage=stage.number,
        **state(stage, own, work.in_use.units if work.in_use else None),
        layers=saved,
        ends=rotary_tables(work.kinds, pack) * waiting,
        sets=(*work.all(), *(moment for moment in update if moment.by_name)),
        host_layers=host_layers,
    )


def estimate(
    config: Config,
    layout: Layout,
    vocab_size: int,
    tokens: int | None = None,
    trained: Trained = Trained(),
    lengths: Lengths | None = None,
) -> Memory:
    """The memory of the rank that needs the most memory.

    tokens: length of a pack; None: data.seq_length
    lengths: the distribution of document lengths, for an average pack; None: one document fills a pack
    """
    pack = config.data.seq_length if tokens is None else tokens
    numbers = sorted({0, layout.pp - 1}) if config.model.stacks_layers else range(layout.pp)
    stages = [Stage.of(config, layout, vocab_size, number, trained) for number in numbers]
    if lengths is not None:
        sizes = cp_sizes(layout, lengths.of_pack(pack)[0], config)
        stages = [replace(stage, rank=lengths.of_rank(stage.rank, pack, sizes)) for stage in stages]
    return max((stage_memory(stage, pack) for stage in stages), key=lambda memory: memory.device)


def longest_context(
    config: Config, layout: Layout, vocab_size: int, bytes_available: float, trained: Trained = Trained()
) -> int:
    """The length of the longest pack that fits into `bytes_available` on every rank; 0 if none fits."""

    def fits(multiples: int) -> bool:
        tokens = multiples * layout.pack_multiple
        return estimate(config, layout, vocab_size, tokens, trained).device <= bytes_available

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * layout.pack_multiple


def describe(config: Config, layout: Layout, vocab_size: int, trained: Trained = Trained()) -> list[str]:
    """Lines of `sft check` about memory: of the device, of the host, and, unless the run is on a CPU, the longest
    context on an 80-GB card."""
    memory = estimate(config, layout, vocab_size, trained=trained)
    lines = [
        f"per rank, estimated and not measured: {size(memory.device)}, of which",
        ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in memory.items().items()),
    ]
    base = LowBitBase.of(Stage.of(config, layout, vocab_size, memory.stage, trained))
    if base is not None:
        lines.append(
            f"frozen weights in low bits: {base.numbers:,.0f} numbers in {size(base.num_bytes)}; dequantised at one "
            f"time: a layer, {size(base.layer)}, and a group of its experts, {size(base.experts)}"
        )
    if memory.host:
        parts = {"layers": memory.host_layers, "optimizer": memory.host_optimizer, "copy for saves": memory.host_copy}
        shown = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in parts.items() if num_bytes)
        of_node = memory.host_of_node(config.parallel.gpus_per_node, layout.world_size)
        lines.append(f"and of the host: {size(memory.host)}, of which {shown}; {size(of_node)} for all ranks of a node")
    if config.data.turns == "each":
        lines.append("without the additional memory of trees of turns, which depends on the data")
    if config.run.device == "cpu":
        return lines
    longest = longest_context(config, layout, vocab_size, CARD_BYTES, trained)
    most = f"{longest:,} tokens" if longest else "none, because weights, gradients and optimizer states alone need more"
    return [*lines, f"longest context in {size(CARD_BYTES)} (an 80-GB card), by the same estimate: {most}"]
