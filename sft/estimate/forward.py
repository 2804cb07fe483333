"""Predicts the memory and the time of forward passes without gradients, over packs that one document fills.

Evaluations make such passes in a run, beside its gradients and optimizer states.  Both predictions are upper bounds: a
layer is assumed to hold all that it would save for backward, and messages to take as long as in both passes of
training.
"""

import math
from dataclasses import dataclass

from sft.config import Config
from sft.estimate.constants import Constants
from sft.estimate.layer_work import LayerWork, Seconds
from sft.estimate.lengths import Lengths
from sft.estimate.messages import Messages
from sft.estimate.model_bytes import state
from sft.estimate.parameters import stage_parameters
from sft.estimate.products import head_product, layer_products
from sft.estimate.saved_by_layer import rotary_tables
from sft.estimate.shard_messages import ShardMessages
from sft.estimate.stage import Stage
from sft.estimate.step_time import dequantise
from sft.estimate.working_sets import StageWork, in_forward
from sft.layers.adapters import Trained
from sft.layers.matrices import ModelProducts
from sft.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True)
class ForwardTime:
    """Seconds of forward passes.  batch_s: of a global batch, after which a run may stop; total_s: of all packs"""

    batch_s: float
    total_s: float


def forward_memory(config: Config, layout: Layout, vocab_size: int, trained: Trained, tokens: int) -> float:
    """Bytes of the rank that needs the most memory, with the state of training.  tokens: length of a pack"""
    stages = [Stage.of(config, layout, vocab_size, number, trained) for number in range(layout.pp)]
    return max(_stage_memory(stage, tokens) for stage in stages)


def _stage_memory(stage: Stage, tokens: int) -> float:
    work = StageWork.of(stage, tokens)
    standing = state(stage, stage_parameters(stage), work.in_use.units if work.in_use else None)
    on_device = sum(standing[name] for name in ("weights", "gradients", "optimizer"))
    return on_device + rotary_tables(work.kinds, tokens) + in_forward(work)


def forward_time(
    config: Config,
    layout: Layout,
    vocab_size: int,
    constants: Constants,
    trained: Trained,
    *,
    tokens: int,
    num_packs: int,
) -> ForwardTime:
    """The predicted time of forward passes.  layout: with the microbatches of a global batch; tokens: of a pack"""
    config = config.model_copy(update={"data": config.data.model_copy(update={"seq_length": tokens})})
    lengths, own = Lengths.all_of(tokens), tokens / layout.cp
    products = ModelProducts.of(config.model, trained, config.lora.rank or 0)
    work, messages = LayerWork(config, layout, constants, lengths), Messages(config, layout, constants, lengths)
    forward, _, _ = work.passes(layer_products(config, layout, products, own))
    layers = config.model.num_layers / layout.pp
    seconds = forward.total + sum(messages.exposed_by_layers(forward, Seconds(), Seconds()).values())
    seconds += constants.layer_overhead_us.value * 1e-6 * layers
    stage = Stage.of(config, layout, vocab_size, layout.pp - 1, trained)
    seconds += dequantise(stage, constants)
    if config.parallel.shards_gradients:
        seconds += ShardMessages.of(stage, messages).of_microbatch(forward.total, 0.0)
    if config.model.has_mtp:
        seconds *= 1 + 1 / layers
    if config.loss.impl != "fused":  # fused computes logits of answers only
        seconds += work.seconds([head_product(config, layout, products, vocab_size, own)])[0]
    batch_s = (layout.num_microbatches + layout.pp - 1) * seconds
    return ForwardTime(batch_s=batch_s, total_s=math.ceil(num_packs / layout.global_batch_size) * batch_s)
