"""Estimates the device memory and the host memory of a rank.  Arithmetic only: no torch, no measurement.

    device = weights + gradients + optimizer + layers + ends + the largest of (MLP, attention + gathered, head)

sft/mcore/model_bytes.py and sft/mcore/attention/activation_bytes.py give the bytes of parts of the model.  This module
adds up these bytes over a layer, a stage and a run.  `layers` are tensors that layers save for backward.  `MLP` and
`attention` are recomputed activations and gradients of the layer whose backward is running.  `head` has the hidden
states around the final norm, too.  `ends` are rotary tables.  Numbers are for CUDA, with fused activations and torch's
flash kernel; with run.device = cpu, for the plain operations of a CPU.  The estimate leaves out CUDA itself, NCCL
(communicators.py) and gaps between allocations.
"""

from dataclasses import dataclass

from sft.adapters import EMBEDDING, Trained
from sft.config import Config
from sft.console import size
from sft.estimate.parameters import Numbers, of_stage, trains_layers, vocab_rows
from sft.estimate.saved_by_layer import LayerKind, kinds_of
from sft.mcore import model_bytes
from sft.parallel.layout import Layout

CARD_BYTES = 80e9  # 74.5 GiB; `describe` reports the longest context on an 80-GB card, which has 79 GiB less CUDA's own


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the rank that needs the most memory.  The rank belongs to pipeline stage `stage`."""

    stage: int
    weights: float
    gradients: float
    optimizer: float
    layers: float  # saved for backward
    ends: float  # rotary tables
    mlp: float  # working memory while the backward of a layer computes its MLP
    attention: float  # working memory while the backward of a layer computes its attention
    gathered: float  # keys and values of the whole pack with cp; in memory together with `attention`
    head: float
    host_layers: float = 0.0
    host_optimizer: float = 0.0
    host_copy: float = 0.0  # of weights and optimizer states, for a save in the background

    @property
    def static(self) -> float:
        """Bytes that do not grow with the context."""
        return self.weights + self.gradients + self.optimizer

    @property
    def device(self) -> float:
        return self.static + self.layers + self.ends + self.working

    @property
    def working(self) -> float:
        """The largest of three working sets (MLP, attention, loss head), of which only one exists at a time."""
        return max(self.mlp, self.attention + self.gathered, self.head)

    @property
    def host(self) -> float:
        return self.host_layers + self.host_optimizer

    def items(self) -> dict[str, float]:
        """The bytes of `device` by name.  Of the three working sets, the largest is named.

        {"weights": ..., "gradients": ..., "optimizer": ..., "saved by layers": ..., "rotary": ..., "loss head": ...}
        """
        working: list[dict[str, float]] = [
            {"MLP in backward": self.mlp},
            {"attention in backward": self.attention, "gathered keys and values": self.gathered},
            {"loss head": self.head},
        ]
        items = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "saved by layers": self.layers,
            "rotary": self.ends,
            **max(working, key=lambda largest: sum(largest.values())),
        }
        return {name: value for name, value in items.items() if value}


# --- a stage -----------------------------------------------------------------------------------------------------


def _state(
    config: Config, layout: Layout, vocab_size: int, stage: int, width: int, trained: Trained
) -> dict[str, float]:
    own = of_stage(config, layout, vocab_size, stage, trained)
    state = model_bytes.state(
        parameters=own.trained.total,
        owned=_owned(own.trained, layout) if config.parallel.distributed_optimizer else own.trained.total,
        width=width,
        offload_fraction=config.optim.offload_fraction,
    )
    return state | {"weights": width * own.all.total}


def _owned(own: Numbers, layout: Layout) -> float:
    """The share of a rank, if all ranks that hold the same numbers share them out."""
    copies = layout.tp * layout.cp * layout.dp / (layout.ep * layout.etp)  # copies of each expert
    return own.dense / (layout.dp * layout.cp) + own.experts / copies


def _copied(config: Config, layout: Layout, vocab_size: int, stage: int, width: int, trained: Trained) -> float:
    """Bytes of the copy that a save in the background writes: this rank's part of a checkpoint."""
    checkpoint, sharded = config.checkpoint, config.parallel.distributed_optimizer
    if not checkpoint.async_save or (checkpoint.save_every is None and checkpoint.save_every_minutes is None):
        return 0.0
    own = of_stage(config, layout, vocab_size, stage, trained)
    fp32_tensors = 3 if sharded or width == 2 else 2  # two moments, and weights of the optimizer's own
    weights = own.trained if config.lora.is_used else own.all
    return width * _owned(weights, layout) + 4 * fp32_tensors * _owned(own.trained, layout)


def _num_waiting(layout: Layout, stage: int) -> int:
    """Forward passes of model chunks whose backward waits.  Each has what its layers saved, and its own rotary tables.

    pp 4 -> 4 on the first stage, 1 on the last; with 2 virtual stages 11 and 5
    """
    pp, virtual, num_microbatches = layout.pp, layout.virtual_stages, layout.num_microbatches
    if layout.cp_sizes:  # the plan of a step decides their number, which may be larger
        num_microbatches = max(num_microbatches, 2 * pp)
    if virtual == 1:
        return min(pp - stage, num_microbatches)
    return min(2 * (pp - stage - 1) + (virtual - 1) * pp + 1, num_microbatches * virtual)


def _sent(layout: Layout, stage: int, hidden: float) -> float:
    """Bytes of outputs that were sent to the next stage and wait for their gradient: virtual stages keep them.

    The last stage's last chunk sends nothing.  hidden: bytes of the hidden states of all tokens
    """
    if layout.virtual_stages == 1:
        return 0.0
    return hidden * (_num_waiting(layout, stage) - (1 if stage == layout.pp - 1 else 0))


def _layers(config: Config, layout: Layout, stage: int, layer: float) -> tuple[float, float]:
    """Bytes that all layers of a rank save on the device and in host memory.  layer: bytes per layer and microbatch"""
    num_layers = config.model.num_layers / layout.pp / layout.virtual_stages  # layers of one model chunk
    is_last = stage == layout.pp - 1
    num_offloaded = model_bytes.num_offloaded_layers(
        config.train.offload_fraction, num_layers, backward_is_next=is_last and layout.virtual_stages == 1
    )
    of_passes = layer * _num_waiting(layout, stage)
    return (
        of_passes * model_bytes.num_resident_layers(num_offloaded, num_layers),
        of_passes * num_offloaded,
    )


def _mlp_backward(config: Config, kind: LayerKind, tokens: float) -> float:
    """Bytes while backward computes the MLP of a layer: recomputed activations, and the gradient of gate and up.

    A token in experts counts top_k times, and so does the gradient of the experts' output.  If only the experts are
    recomputed, so do their output and the gradient of their input, which are in memory until their backward ends.
    train.mlp_tile limits the number of tokens.  With recompute = full, the recomputed attention is also in memory.
    """
    mlp = kind.everything.mlp
    recomputed = sum(value for name, value in mlp.items() if name not in kind.kept.mlp)
    in_experts = mlp.get("sent to experts", 0.0) * (3 if config.train.recompute == "selective" else 1)
    inside = recomputed + mlp["gate and up"] + in_experts
    waits = kind.recomputed_attention if config.train.recompute == "full" else 0.0
    return inside * min(tokens, config.train.mlp_tile or tokens) + waits * tokens


def _waiting_table(config: Config, layout: Layout, rows: float, trained: Trained) -> float:
    """Numbers in the gradient of tied embeddings that the output makes: autograd adds that of the input, which comes
    last.  0 if they are not tied, or are on two stages of a pipeline, or are frozen."""
    is_trained = trained.whole is None or any(weight.key == EMBEDDING for weight in trained.whole)
    is_one = config.model.tie_embeddings and layout.pp == 1
    return rows * config.model.hidden_size if is_one and is_trained else 0.0


def _mtp_block(config: Config, layout: Layout, kind: LayerKind, hidden: float) -> tuple[float, float]:
    """Bytes of multi-token prediction on the last stage: what its block saves, and what its loss head adds.

    Saved are a layer, the embedding, the projection's input of twice the width, and the input of the last norm; with
    train.recompute = full, the layer's input stands for all but the last.  While the second head computes, the first
    one's gradient waits.  kind: of the layer; hidden: bytes of the hidden states of all tokens
    """
    if not config.model.has_mtp:
        return 0.0, 0.0
    layer = kind.kept.total * hidden / model_bytes.hidden_state(kind.backend.model, kind.backend.rank)
    around = 2 * hidden if config.train.recompute == "full" else 4 * hidden
    waiting = _num_waiting(layout, layout.pp - 1) if layout.virtual_stages == 1 else 1.0
    return waiting * (layer + around), 2 * hidden


def _stage(
    config: Config, layout: Layout, vocab_size: int, pack: int, stage: int, trained: Trained = Trained()
) -> Memory:
    model, rank, kinds = config.model, model_bytes.RankShare.of(config, layout), kinds_of(config, layout, pack)
    tokens, is_last = pack / layout.cp, stage == layout.pp - 1
    hidden = model_bytes.hidden_state(model, rank) * tokens
    kept = sum(kind.number * kind.kept.total for kind in kinds) / model.num_layers
    layers, host_layers = _layers(config, layout, stage, kept * tokens)
    block = _mtp_block(config, layout, kinds[0], hidden) if is_last else (0.0, 0.0)
    local, gathered = max((kind.attention(pack, tokens) for kind in kinds), key=sum)
    matrix = model_bytes.widest_gradient(model, rank) if trains_layers(trained) else 0.0
    rotary = (sum if model.full_attention.is_used else max)(kind.backend.rotary(pack) for kind in kinds)
    rows = vocab_rows(vocab_size, layout.tp)
    table = _waiting_table(config, layout, rows, trained) * rank.width
    head = model_bytes.loss_head(config.loss, model, rank, vocab_rows=rows, tokens=tokens)
    return Memory(
        stage=stage,
        **_state(config, layout, vocab_size, stage, rank.width, trained),
        layers=layers + block[0] + _sent(layout, stage, hidden),
        ends=rotary * _num_waiting(layout, stage),
        mlp=max(_mlp_backward(config, kind, tokens) for kind in kinds) + 2 * hidden + matrix + table,
        attention=local + 2 * hidden + matrix + table,
        gathered=gathered,
        head=head + 2 * hidden + block[1] if is_last else 0.0,  # hidden states before and after the final norm
        host_layers=host_layers,
        host_copy=_copied(config, layout, vocab_size, stage, rank.width, trained),
    )


# --- a run -------------------------------------------------------------------------------------------------------


def estimate(
    config: Config, layout: Layout, vocab_size: int, tokens: int | None = None, trained: Trained = Trained()
) -> Memory:
    """The memory of the rank that needs the most memory.

    tokens: length of a pack; None: data.seq_length.
    """
    pack = config.data.seq_length if tokens is None else tokens
    stages = (_stage(config, layout, vocab_size, pack, stage, trained) for stage in sorted({0, layout.pp - 1}))
    return max(stages, key=lambda memory: memory.device)


def longest_context(
    config: Config, layout: Layout, vocab_size: int, bytes_available: float, trained: Trained = Trained()
) -> int:
    """Tokens of the longest pack that fits into `bytes_available` on every rank; 0 if none fits."""

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
