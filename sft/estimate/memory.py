"""Estimates the device memory and the host memory of a rank.  Arithmetic only: no torch, no measurement.

    device = weights + gradients + optimizer + layers + ends + the largest of the working sets

The files of sft/layers give the bytes of the halves of a layer.  This module adds up bytes over a layer, a stage and a
run.  `layers` are the tensors that layers save for backward, `ends` the rotary tables.  A working set is the memory
that the loss head, or backward of an MLP or of attention, needs for a time (working_sets.py).  The numbers assume CUDA
with fused activations and torch's flash kernel, or with run.device = cpu the plain operations of a CPU.  The estimate
leaves out CUDA itself, NCCL (communicators.py) and gaps between allocations.
"""

from dataclasses import dataclass

from sft.config import Config
from sft.console import size
from sft.estimate.parameters import stage_parameters, vocab_rows
from sft.estimate.saved_by_layer import SavingLayers, saving_layers, saving_mtp
from sft.estimate.working_sets import StageWork, WorkingSet
from sft.layers.adapters import Trained
from sft.layers.offload import num_offloaded_layers, num_resident_layers
from sft.layers.rank_share import FP32
from sft.parallel.layout import Layout

CARD_BYTES = 80e9  # 74.5 GiB: about what CUDA leaves of an 80-GB card's 79 GiB.  `describe` reports its longest context


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
        """Bytes that do not grow with the context."""
        return self.weights + self.gradients + self.optimizer

    @property
    def device(self) -> float:
        return self.static + self.layers + self.ends + self.peak.net

    @property
    def peak(self) -> WorkingSet:
        """The working set that needs the most memory together with the layers' saved tensors of that time."""
        return max(self.sets, key=lambda working: working.net)

    @property
    def host(self) -> float:
        return self.host_layers + self.host_optimizer

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


# --- a stage -----------------------------------------------------------------------------------------------------


def _state(
    config: Config, layout: Layout, vocab_size: int, stage: int, width: int, trained: Trained
) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer on the device, and of the optimizer in host memory.

    A bf16 parameter takes 18 bytes.  With the distributed optimizer it takes 6 + 12 / (dp x cp), and a parameter of an
    expert 6 + 12 / number of copies.
    """
    own = stage_parameters(config, layout, vocab_size, stage, trained)
    owned = own.trained.owned(layout) if config.parallel.distributed_optimizer else own.trained.total
    optimizer, fraction = config.optim.optimizer, config.optim.offload_fraction
    main_weight = FP32 if width < FP32 else 0
    return {
        "weights": width * own.all.total,
        "gradients": FP32 * own.trained.total,
        "optimizer": (1 - fraction) * (optimizer.moment_bytes + main_weight) * owned,
        "host_optimizer": fraction * optimizer.host_bytes * owned,
    }


def _copied(config: Config, layout: Layout, vocab_size: int, stage: int, width: int, trained: Trained) -> float:
    """Bytes of the copy that a save in the background writes: this rank's part of a checkpoint."""
    checkpoint, sharded = config.checkpoint, config.parallel.distributed_optimizer
    if not checkpoint.async_save or (checkpoint.save_every is None and checkpoint.save_every_minutes is None):
        return 0.0
    own = stage_parameters(config, layout, vocab_size, stage, trained)
    has_own_weights = sharded or width == 2
    weights = own.trained if config.lora.is_used else own.all
    of_optimizer = config.optim.optimizer.moment_bytes + FP32 * has_own_weights
    return width * weights.owned(layout) + of_optimizer * own.trained.owned(layout)


def _num_waiting(layout: Layout, stage: int) -> int:
    """Number of forward passes of model chunks whose backward has not run.  Each keeps saved tensors and rotary tables.

    pp 4 -> 4 on the first stage, 1 on the last; with 2 virtual stages 11 and 5
    """
    pp, virtual, num_microbatches = layout.pp, layout.virtual_stages, layout.num_microbatches
    if layout.cp_sizes:  # the pack plan decides the number of microbatches of a step, which may be larger
        num_microbatches = max(num_microbatches, 2 * pp)
    if virtual == 1:
        return min(pp - stage, num_microbatches)
    return min(2 * (pp - stage - 1) + (virtual - 1) * pp + 1, num_microbatches * virtual)


def _sent(layout: Layout, stage: int, hidden: float) -> float:
    """Bytes of outputs that virtual stages keep after sending them, until their gradients arrive.

    The last chunk of the last stage sends nothing.  hidden: bytes of the hidden states of all tokens
    """
    if layout.virtual_stages == 1:
        return 0.0
    return hidden * (_num_waiting(layout, stage) - (1 if stage == layout.pp - 1 else 0))


def _layers(config: Config, layout: Layout, stage: int, layer: float) -> tuple[float, float]:
    """Bytes that the layers of a rank save on the device and in host memory.  layer: bytes per layer and microbatch"""
    num_layers = config.model.num_layers / layout.pp / layout.virtual_stages  # number of layers of one model chunk
    is_last = stage == layout.pp - 1
    num_offloaded = num_offloaded_layers(
        config.train.offload_fraction, num_layers, backward_is_next=is_last and layout.virtual_stages == 1
    )
    of_passes = layer * _num_waiting(layout, stage)
    return of_passes * num_resident_layers(num_offloaded, num_layers), of_passes * num_offloaded


def _stage(
    config: Config, layout: Layout, vocab_size: int, pack: int, stage: int, trained: Trained = Trained()
) -> Memory:
    model, rank, kinds = config.model, layout.share(config), saving_layers(config, layout, pack)
    is_last, waiting = stage == layout.pp - 1, _num_waiting(layout, stage)
    hidden = rank.hidden(model) * pack / layout.cp
    work = StageWork(
        config=config,
        layout=layout,
        chunks=layout.chunks(model.num_layers, stage),
        kinds=kinds,
        block=saving_mtp(config, layout, pack) if is_last else None,
        pack=pack,
        hidden=hidden,
        rows=vocab_rows(vocab_size, layout.tp),
        trained=trained,
        is_last=is_last,
    )
    layers, host_layers = _layers(config, layout, stage, work.saved_by_layer())
    block = work.saved_by_mtp() * (waiting if layout.virtual_stages == 1 else 1)
    return Memory(
        stage=stage,
        **_state(config, layout, vocab_size, stage, rank.width, trained),
        layers=layers + block + _sent(layout, stage, hidden),
        ends=_rotary(kinds, pack) * waiting,
        sets=tuple(work.all()),
        host_layers=host_layers,
        host_copy=_copied(config, layout, vocab_size, stage, rank.width, trained),
    )


def _rotary(kinds: list[SavingLayers], pack: int) -> float:
    """Bytes of all rotary tables.  Layers whose positions have the same base and width share one table."""
    tables: dict[tuple[int, str], float] = {}
    for kind in kinds:
        table = (kind.mixer.model.rotary_dim, repr(kind.mixer.model.rope))
        tables[table] = max(tables.get(table, 0.0), kind.mixer.rotary(pack))
    return sum(tables.values())


# --- a run -------------------------------------------------------------------------------------------------------


def estimate(
    config: Config, layout: Layout, vocab_size: int, tokens: int | None = None, trained: Trained = Trained()
) -> Memory:
    """The memory of the rank that needs the most memory.  tokens: length of a pack; None: data.seq_length"""
    pack = config.data.seq_length if tokens is None else tokens
    numbers = sorted({0, layout.pp - 1}) if config.model.stacks_layers else range(layout.pp)
    stages = (_stage(config, layout, vocab_size, pack, stage, trained) for stage in numbers)
    return max(stages, key=lambda memory: memory.device)


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
    memory = estimate(config, layout, vocab_size, trained=trained)
    lines = [
        f"per rank, estimated and not measured: {size(memory.device)}, of which",
        ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in memory.items().items()),
    ]
    if memory.host:
        lines.append(f"and of the host: layers {size(memory.host_layers)}, optimizer {size(memory.host_optimizer)}")
    if memory.host_copy:
        lines.append(f"saves copy {size(memory.host_copy)} to host memory (checkpoint.async_save)")
    longest = longest_context(config, layout, vocab_size, CARD_BYTES, trained)
    most = f"{longest:,} tokens" if longest else "none, because weights, gradients and optimizer states alone need more"
    return [*lines, f"longest context in {size(CARD_BYTES)} (an 80-GB card), by the same estimate: {most}"]
