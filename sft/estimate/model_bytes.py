"""Computes the bytes of a model's state, of its largest gradients, and of the loss head.  Arithmetic only."""

import math

from sft.config import LossConfig, ModelConfig
from sft.estimate.parameters import StageParameters
from sft.estimate.stage import Stage
from sft.layers.adapters import EMBEDDING, HEAD
from sft.layers.rank_share import FP32, RankShare


def gradients_of_experts(model: ModelConfig, rank: RankShare) -> float:
    """Bytes of the weight gradients of all experts of a layer on this rank."""
    numbers = 3 * model.hidden_size * model.resolved_expert_ffn * (model.moe.num_experts or 0)
    return rank.width * numbers / (rank.ep * rank.etp)


def widest_gradient(model: ModelConfig, rank: RankShare) -> float:
    """Bytes of a rank's largest weight gradient of gate and up, before it is added to the fp32 sum."""
    dense = model.ffn_hidden_size if model.moe.dense_layers else 0
    widest = max(model.resolved_expert_ffn, model.moe.shared_ffn_hidden_size or 0, dense)
    return rank.width * model.hidden_size * 2 * widest / rank.tp


def loss_head(loss: LossConfig, model: ModelConfig, rank: RankShare, *, vocab_rows: float, tokens: float) -> float:
    """Bytes that the loss head allocates, without its inputs (docs/concepts/loss.md).

    vocab_rows: rows of the output weight on this rank; tokens: tokens on this rank
    """
    if loss.impl == "chunked":
        return 2 * rank.width * tokens * vocab_rows
    if loss.impl == "full":
        return (2 * rank.width + 2 * FP32) * tokens * vocab_rows
    # With sequence parallelism, the head also holds the gathered hidden states.
    gradient = rank.width * model.hidden_size * tokens * (2 if rank.sequence < 1 else 1)
    return max(loss.chunk(math.ceil(tokens)), model.hidden_size) * vocab_rows * rank.width + gradient


def state(stage: Stage, own: StageParameters) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer, by the names of `Memory`.  own: the parameters on one rank

    A bf16 parameter takes 18 bytes.  With the distributed optimizer it takes 6 + 12 / (dp x cp), and a parameter of an
    expert 6 + 12 / number of copies.  optim.grad_dtype = bf16 takes 2 bytes less.
    """
    config, width = stage.config, stage.rank.width
    optimizer, fraction = config.optim.optimizer, config.optim.offload_fraction
    owned = _updated(stage, own)
    main_weight = FP32 if width < FP32 else 0
    return {
        "weights": width * own.all.total,
        "gradients": config.optim.gradient_bytes * own.trained.total,
        "optimizer": (1 - fraction) * (optimizer.moment_bytes + main_weight) * owned,
        "host_optimizer": fraction * optimizer.host_bytes * owned,
        "host_copy": _copied(stage, own),
    }


def fp32_gradients(stage: Stage, own: StageParameters) -> float:
    """Bytes of the fp32 copies of bf16 gradients that the update makes on the device; 0 for fp32 gradients."""
    optim = stage.config.optim
    return 0.0 if optim.gradient_bytes == FP32 else FP32 * (1 - optim.offload_fraction) * _updated(stage, own)


def fp32_sums(stage: Stage) -> tuple[float, float]:
    """Bytes of temporary fp32 sums, where gradients are bf16: of a head's weight over chunks, and of an MLP over tiles.

    Without optim.grad_dtype = bf16, chunks and tiles are added to the gradients themselves.
    """
    config, model = stage.config, stage.config.model
    if config.optim.gradient_bytes == FP32:
        return 0.0, 0.0
    whole, table = stage.trained.whole, EMBEDDING if model.tie_embeddings else HEAD
    trains_head = whole is None or any(weight.key == table for weight in whole)
    head = FP32 * stage.rows * model.hidden_size if trains_head and config.loss.impl == "fused" else 0.0
    tiled = config.train.mlp_tile is not None and stage.trains_layers
    return head, FP32 * 3 * model.hidden_size * model.ffn_hidden_size / stage.rank.tp if tiled else 0.0


def _updated(stage: Stage, own: StageParameters) -> float:
    """The number of parameters that the rank's optimizer updates."""
    is_sharded = stage.config.parallel.distributed_optimizer
    return own.trained.owned(stage.layout) if is_sharded else own.trained.total


def _copied(stage: Stage, own: StageParameters) -> float:
    """Bytes of the copy that a save in the background writes: this rank's part of a checkpoint."""
    config, width = stage.config, stage.rank.width
    checkpoint = config.checkpoint
    if not checkpoint.async_save or (checkpoint.save_every is None and checkpoint.save_every_minutes is None):
        return 0.0
    has_own_weights = config.parallel.distributed_optimizer or width == 2
    weights = own.trained if config.lora.is_used else own.all
    of_optimizer = config.optim.optimizer.moment_bytes + FP32 * has_own_weights
    return width * weights.owned(stage.layout) + of_optimizer * own.trained.owned(stage.layout)
