"""Computes the bytes of a model's state, of its largest gradients, and of the loss head.  Arithmetic only."""

import math

from sft.config import LossConfig, ModelConfig
from sft.config.train import MUON
from sft.estimate.low_bits import LowBitBase
from sft.estimate.parameters import StageParameters
from sft.estimate.stage import Stage
from sft.estimate.units import StageUnits
from sft.layers.adapters import EMBEDDING, HEAD
from sft.layers.rank_share import FP32, RankShare
from sft.layers.weight import expert_width, has_gate

TEACHER_BYTES = 8  # of a token of a teacher's list: int32 and fp32
# Of a token of a list in a chunk: its column (8 bytes), whether the column is of this shard, its stored score, its
# score in fp32, and temporary log-probabilities; `python -m tools.bench loss_head --ways fused,distilled` counts them.
OUTCOME_BYTES = 52


def gradients_of_experts(model: ModelConfig, rank: RankShare) -> float:
    """Bytes of the weight gradients of all experts of a layer on this rank."""
    numbers = (2 + has_gate(model)) * expert_width(model) * model.resolved_expert_ffn * (model.moe.num_experts or 0)
    return rank.width * numbers / (rank.ep * rank.etp)


def widest_gradient(model: ModelConfig, rank: RankShare) -> float:
    """Bytes of a rank's largest weight gradient of gate and up, before it is added to the fp32 sum."""
    dense = model.ffn_hidden_size if model.moe.is_mixed else 0
    widest = max(model.resolved_expert_ffn, model.moe.shared_ffn_hidden_size or 0, dense)
    return rank.width * model.hidden_size * (1 + has_gate(model)) * widest / rank.tp


def loss_head(
    loss: LossConfig, model: ModelConfig, rank: RankShare, *, vocab_rows: float, tokens: float, listed: int = 0
) -> float:
    """Bytes that the loss head allocates, without its inputs (docs/concepts/loss.md), with a teacher's lists.

    vocab_rows: rows of the output weight on this rank; tokens: tokens on this rank
    listed: tokens of a teacher's list (data.teacher); 0: there is no teacher
    """
    return _head(loss, model, rank, vocab_rows, tokens) + _divergence(loss, vocab_rows, tokens, listed)


def _divergence(loss: LossConfig, vocab_rows: float, tokens: float, listed: int) -> float:
    """Bytes of the teacher's lists on the device, and of the divergence (docs/concepts/distill.md)."""
    if not listed:
        return 0.0
    in_lists = TEACHER_BYTES * listed * tokens
    if loss.impl == "full":  # scores without those of the lists, a mask, and copies of the lists
        return in_lists + (FP32 + 1) * tokens * vocab_rows + 29 * listed * tokens
    in_chunk = OUTCOME_BYTES * listed * loss.chunk(math.ceil(tokens))
    return in_lists * (2 if loss.impl == "chunked" else 1) + in_chunk  # chunked also lists unsupervised tokens


def _head(loss: LossConfig, model: ModelConfig, rank: RankShare, vocab_rows: float, tokens: float) -> float:
    if loss.impl == "chunked":
        return 2 * rank.width * tokens * vocab_rows
    if loss.impl == "full":
        return (2 * rank.width + 2 * FP32) * tokens * vocab_rows
    # With sequence parallelism, the head also holds the gathered hidden states.
    gradient = rank.width * model.hidden_size * tokens * (2 if rank.sequence < 1 else 1)
    return max(loss.chunk(math.ceil(tokens)), model.hidden_size) * vocab_rows * rank.width + gradient


def state(stage: Stage, own: StageParameters, units: StageUnits | None) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer, by the names of `Memory`.

    A bf16 parameter takes 18 bytes.  With the distributed optimizer it takes 6 + 12 / (dp x cp), with sharded gradients
    2 + 16 / (dp x cp), and with sharded weights 18 / (dp x cp).  For a parameter of an expert, the number of copies of
    the expert replaces dp x cp.  parallel.shard_size may reduce both numbers.  optim.grad_dtype = bf16 takes 2 bytes
    less for each gradient.  Muon keeps 4 bytes instead of Adam's 8.

    own: the parameters on one rank
    units: the units of the stage, with sharded gradients or weights; None: a rank has whole gradients and weights
    """
    config, width, layout = stage.config, stage.rank.width, stage.layout
    optimizer, fraction = config.optim.optimizer, config.optim.offload_fraction
    saved = (optimizer.moment_bytes - MUON.moment_bytes) * own.muon.updated(config, layout)
    trained = own.trained if units is None else units.trained
    owned = trained.updated(config, layout)
    weights, gradients = own.all.total, trained.total
    if units is not None:
        gradients = owned
        weights = units.whole.owned(layout) if config.parallel.shard == "weights" else units.whole.total
    main_weight = FP32 if width < FP32 else 0
    base = LowBitBase.of(stage)
    return {
        "weights": width * weights if base is None else width * (weights - base.numbers) + base.num_bytes,
        "gradients": config.optim.gradient_bytes * gradients,
        "optimizer": (1 - fraction) * ((optimizer.moment_bytes + main_weight) * owned - saved),
        "host_optimizer": fraction * optimizer.host_bytes * owned,
        "host_copy": _copied(stage, own),
    }


def fp32_gradients(stage: Stage, own: StageParameters) -> float:
    """Bytes of the fp32 copies of bf16 gradients that the update makes on the device; 0 for fp32 gradients."""
    optim = stage.config.optim
    return (
        0.0
        if optim.gradient_bytes == FP32
        else FP32 * (1 - optim.offload_fraction) * own.trained.updated(stage.config, stage.layout)
    )


def head_sum(stage: Stage) -> float:
    """Bytes of the fp32 sum over chunks of the gradient of a head's weight.

    0 if gradients are in fp32, because then the gradient itself holds the sum.
    """
    config, model = stage.config, stage.config.model
    is_summed = stage.trained.has(EMBEDDING if model.tie_embeddings else HEAD, ()) and config.loss.impl == "fused"
    return FP32 * stage.rows * model.hidden_size if config.optim.gradient_bytes < FP32 and is_summed else 0.0


def tile_sum(stage: Stage) -> float:
    """Bytes of the fp32 sums over tiles of the gradients of an MLP's weights.

    0 if gradients are in fp32, because then the gradients themselves hold the sums.
    """
    config, model = stage.config, stage.config.model
    is_summed = config.train.mlp_tile is not None and stage.trains_layers
    size = (2 + has_gate(model)) * model.hidden_size * model.ffn_hidden_size / stage.rank.tp
    return FP32 * size if config.optim.gradient_bytes < FP32 and is_summed else 0.0


def _copied(stage: Stage, own: StageParameters) -> float:
    """Bytes of the copy that a save in the background writes: this rank's part of a checkpoint."""
    config, width = stage.config, stage.rank.width
    if not config.checkpoint.copies_state:
        return 0.0
    has_own_weights = config.parallel.distributed_optimizer or width == 2
    weights = own.trained if config.lora.is_used else own.all
    optimizer = config.optim.optimizer
    of_optimizer = optimizer.stored_bytes + FP32 * has_own_weights
    saved = (optimizer.stored_bytes - MUON.stored_bytes) * own.muon.owned(stage.layout)
    return width * weights.owned(stage.layout) + of_optimizer * own.trained.owned(stage.layout) - saved
