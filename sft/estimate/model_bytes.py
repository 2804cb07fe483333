"""Computes the bytes of a model's state, of its largest gradients, and of the loss head.  Arithmetic only."""

import math

from sft.config import LossConfig, ModelConfig
from sft.estimate.parameters import StageParameters
from sft.estimate.stage import Stage
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
    expert 6 + 12 / number of copies.
    """
    config, width = stage.config, stage.rank.width
    optimizer, fraction = config.optim.optimizer, config.optim.offload_fraction
    is_sharded = config.parallel.distributed_optimizer
    owned = own.trained.owned(stage.layout) if is_sharded else own.trained.total
    main_weight = FP32 if width < FP32 else 0
    return {
        "weights": width * own.all.total,
        "gradients": FP32 * own.trained.total,
        "optimizer": (1 - fraction) * (optimizer.moment_bytes + main_weight) * owned,
        "host_optimizer": fraction * optimizer.host_bytes * owned,
        "host_copy": _copied(stage, own),
    }


def _copied(stage: Stage, own: StageParameters) -> float:
    """Bytes of the copy that a save in the background writes: this rank's part of a checkpoint."""
    config, width = stage.config, stage.rank.width
    if not config.checkpoint.copies_state:
        return 0.0
    has_own_weights = config.parallel.distributed_optimizer or width == 2
    weights = own.trained if config.lora.is_used else own.all
    of_optimizer = config.optim.optimizer.moment_bytes + FP32 * has_own_weights
    return width * weights.owned(stage.layout) + of_optimizer * own.trained.owned(stage.layout)
