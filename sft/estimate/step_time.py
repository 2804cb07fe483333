"""Predicts the duration of a step, part by part.  Arithmetic only; nothing is measured.

    a part of a microbatch = FLOPs / rate, bytes / bandwidth, or the time of messages that computation does not hide
    a step = microbatches x parts + the pipeline's bubble + gradients over dp + the update of weights

`products.py` lists products, `messages.py` messages, `constants.py` rates.  The prediction assumes that packs are full,
all tokens are supervised, and documents have the lengths of `lengths.py`.  Where packs differ in attention, ranks wait
for the slowest one (`uneven.py`).  The prediction leaves out saves, evaluation and waiting for data.
"""

from dataclasses import dataclass

from sft.config import Config
from sft.config.train import MUON
from sft.estimate import muon
from sft.estimate.attention_kernels import Kernels
from sft.estimate.constants import Constants
from sft.estimate.layer_work import LayerWork
from sft.estimate.lengths import Lengths
from sft.estimate.low_bits import LowBitBase
from sft.estimate.messages import Messages
from sft.estimate.parameters import StageParameters, stage_parameters
from sft.estimate.products import attention_reached, head_product, layer_products
from sft.estimate.shard_messages import ShardMessages
from sft.estimate.stage import Stage
from sft.estimate.uneven import slowest
from sft.layers.adapters import Trained
from sft.layers.flops import TrainFlops
from sft.layers.matrices import ModelProducts
from sft.parallel.layout import Layout

PARTS = (
    *("linear", "attention", "head", "elementwise", "recompute", "waits", "tp", "cp", "ep", "pp", "dp"),
    *("bubble", "optimizer", "offload", "overhead", "dequantise"),
)
# Accesses of a gradient in an update: the norm reads it, a division reads and writes it, and it is set to zero.
GRADIENT_ACCESSES = 4
TRANSFER_BYTES = 8  # per parameter whose optimizer is in host memory: an fp32 gradient to the host, an fp32 weight back


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The predicted time of a step on all GPUs.

    parts         seconds of a step by part (`PARTS`); of messages, only the exposed time counts
    microbatch_s  seconds of a microbatch through all pipeline stages
    tokens        tokens of a step
    model_flops   FLOPs of a step, without recomputation
    """

    parts: dict[str, float]
    microbatch_s: float
    tokens: float
    num_gpus: int
    model_flops: float
    peak_tflops: float

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all GPUs together."""
        return self.tokens / self.step_s

    @property
    def tokens_per_gpu_s(self) -> float:
        return self.tokens_per_s / self.num_gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: model_flops / (step_s x peak of all GPUs)."""
        return self.model_flops / (self.step_s * self.num_gpus * self.peak_tflops * 1e12)


def step_time(
    config: Config,
    layout: Layout,
    vocab_size: int,
    lengths: Lengths,
    constants: Constants,
    trained: Trained = Trained(),
    products: ModelProducts | None = None,
    kernels: Kernels | None = None,
) -> StepTime:
    """The predicted time of a step.

    products: ModelProducts.of(config.model, trained, rank of adapters), if the caller has it; None: computed here
    kernels: the kernels of attention; None: the kernels that `attention_kernels` assumes
    """
    pack, rank = config.data.seq_length, config.lora.rank or 0
    products = products or ModelProducts.of(config.model, trained, rank)
    stages = [Stage.of(config, layout, vocab_size, number, trained) for number in sorted({0, layout.pp - 1})]
    stage, own = max(((stage, stage_parameters(stage)) for stage in stages), key=lambda numbers: numbers[1].all.total)
    work = LayerWork(config, layout, constants, lengths, kernels)
    listed = layer_products(config, layout, products, pack / layout.cp)
    forward, backward, repeated = work.passes(listed, attention_reached(config, layout, products))
    attention_s = forward.attention + backward.attention + repeated.attention
    messages = Messages(config, layout, constants, lengths)
    exposed = messages.exposed_by_layers(forward, backward, repeated)
    head = work.seconds([head_product(config, layout, products, vocab_size, pack / layout.cp)])
    layer_s = {
        "linear": forward.linear + backward.linear,
        "attention": forward.attention + backward.attention,
        "elementwise": forward.elementwise + backward.elementwise + work.gradient_sums(own.trained.total),
        "recompute": repeated.total,
        "waits": attention_s * (slowest(config, layout, lengths) - 1),
        **exposed,
        "offload": work.offload(forward.total, backward.total + repeated.total),
        "dequantise": dequantise(stage, constants),
        "overhead": constants.layer_overhead_us.value * 1e-6 * config.model.num_layers / layout.pp,
    }
    if config.model.has_mtp:  # the last stage has one more layer and a second head, and the other stages wait for it
        layer_s = {name: seconds * (1 + layout.pp / config.model.num_layers) for name, seconds in layer_s.items()}
    turns = layout.num_microbatches
    parts = dict.fromkeys(PARTS, 0.0) | {name: turns * seconds for name, seconds in layer_s.items()}
    head_s = sum(head) * (1 + config.model.has_mtp) + work.divergence(vocab_size, stage.rank.width)
    parts["head"] = turns * head_s
    stage_s = sum(layer_s.values())
    parts["bubble"] = (layout.pp - 1) / layout.virtual_stages * stage_s
    parts["dp"] = _data_parallel(stage, own, messages, forward.total, backward.total + repeated.total)
    optimizer, transferred = _update(config, layout, own, constants)
    parts["optimizer"] = optimizer + _muon(stage, own, messages)
    parts["offload"] += transferred
    flops, lengths_of, counts = TrainFlops.of(config.model, vocab_size, trained, rank), *lengths.of_pack(pack)
    pack_flops = pack * (flops.per_token + flops.per_label)
    pack_flops += (flops.per_token + flops.saved) * float(counts @ flops.cost(lengths_of))
    return StepTime(
        parts=parts,
        microbatch_s=stage_s * layout.pp + head_s,
        tokens=float(pack * layout.global_batch_size),
        num_gpus=layout.world_size,
        model_flops=pack_flops * layout.global_batch_size,
        peak_tflops=constants.peak_tflops,
    )


def dequantise(stage: Stage, constants: Constants) -> float:
    """Seconds of a microbatch in which the stage's frozen weights in low bits are dequantised."""
    base, train = LowBitBase.of(stage), stage.config.train
    if base is None:
        return 0.0
    moved = base.moved(repeats_layers=train.repeats_layers, repeats_experts=train.recompute == "selective")
    return moved / constants.elementwise_gb_s.value / 1e9


def _data_parallel(
    stage: Stage, own: StageParameters, messages: Messages, forward_s: float, backward_s: float
) -> float:
    """Exposed seconds of a step for gradients and weights.  forward_s, backward_s: seconds of all layers' passes"""
    if not stage.config.parallel.shards_gradients:
        return messages.gradients(own, backward_s)
    shards = ShardMessages.of(stage, messages)
    return stage.layout.num_microbatches * shards.of_microbatch(forward_s, backward_s) + shards.of_step()


def _muon(stage: Stage, own: StageParameters, messages: Messages) -> float:
    """Seconds of Muon's iterations and exchange.  Products of square matrices have the rate of hidden_size."""
    if not stage.config.optim.has_muon:
        return 0.0
    share = muon.FP32_RATE if stage.config.optim.muon.ns_dtype == "fp32" else 1.0
    rate = share * messages.constants.gemm_tflops.at(stage.config.model.hidden_size) * 1e12
    gb_s = messages.wide_link(muon.stage_ranks(stage), 1)
    return muon.flops(stage) / rate + messages.seconds(muon.exchanged(stage, own), gb_s, 2)


def _update(config: Config, layout: Layout, own: StageParameters, constants: Constants) -> tuple[float, float]:
    """Seconds of the optimizer's update on the device, and on the host with the transfers."""
    trained = own.trained
    owned = trained.updated(config, layout)
    fraction, moved = config.optim.offload_fraction, config.optim.optimizer.moved_bytes
    saved = (moved - MUON.moved_bytes) * own.muon.updated(config, layout)
    summed = owned if config.parallel.shards_gradients else trained.total
    on_device = (1 - fraction) * owned * moved - saved + summed * GRADIENT_ACCESSES * config.optim.gradient_bytes
    on_host = fraction * owned * moved / constants.host_optimizer_gb_s.value
    transferred = fraction * owned * TRANSFER_BYTES / constants.pcie_gb_s.value
    return on_device / constants.optimizer_gb_s.value / 1e9, (on_host + transferred) / 1e9
