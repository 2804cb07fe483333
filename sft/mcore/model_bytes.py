"""Bytes that norms, the MLP, experts and the loss head keep of a token, and those of a parameter.

Arithmetic only, no torch: sft/estimate sums these.  Attention counts its own (attention/activation_bytes.py).
"""

import math
from dataclasses import dataclass

from sft.config import Config, LossConfig, ModelConfig
from sft.parallel.layout import Layout

FP32 = 4


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """Which part of a token's tensors one rank holds."""

    tp: int = 1  # tensor-parallel size of layers
    etp: int = 1  # and of an expert
    sequence: float = 1.0  # share of the tokens between layers that the rank holds: 1 / tp with sequence parallelism
    width: int = 2  # bytes of a number

    @staticmethod
    def of(config: Config, layout: Layout) -> "RankShare":
        return RankShare(
            tp=layout.tp,
            etp=layout.etp,
            sequence=1 / layout.tp if layout.sequence_parallel else 1.0,
            width=2 if config.run.precision == "bf16" else FP32,
        )


def hidden_state(model: ModelConfig, rank: RankShare) -> float:
    """One hidden state, as it is between layers."""
    return rank.width * model.hidden_size * rank.sequence


def norm_scales(model: ModelConfig, rank: RankShare) -> float:
    """norm.py saves one fp32 number for each row: of the layer's first norm, and of those of queries and keys."""
    heads = model.num_attention_heads + model.resolved_query_groups
    return FP32 * rank.sequence + FP32 * model.qk_norm * heads / rank.tp


def mlp(model: ModelConfig, rank: RankShare) -> dict[str, float]:
    """What the second half of a layer saves beside its input, by name.

    The gated activation is one kernel, as on CUDA; on a CPU core saves 2 ffn_hidden_size numbers more: the gate after
    silu, and up a second time.
    """
    saved = {"MLP norm's scale": FP32 * rank.sequence, "MLP's normed input": hidden_state(model, rank)}
    if model.moe.num_experts is not None:
        return {**saved, **_experts(model, rank, model.moe.num_experts)}
    ffn = rank.width * model.ffn_hidden_size / rank.tp
    return {**saved, "gate and up": 2 * ffn, "gated": ffn}


def _experts(model: ModelConfig, rank: RankShare, num_experts: int) -> dict[str, float]:
    """An approximation: every token is sent to top_k experts, and every rank gets an equal share of them."""
    top_k = model.moe.top_k or 0
    sent = rank.sequence * top_k * rank.width * model.hidden_size
    ffn = rank.sequence * top_k * rank.width * model.resolved_expert_ffn
    return {
        "router": 2 * FP32 * rank.sequence * num_experts,  # scores and probabilities
        "sent to experts": sent * rank.etp,  # each etp rank sees all tokens of its expert, and a part of its width
        "gate and up": 2 * ffn,
        "gated": ffn,
        "from experts": sent,
    }


def widest_gradient(model: ModelConfig, rank: RankShare) -> float:
    """The gradient of gate and up's weight, as its product gives it, before it is added to the fp32 one."""
    return rank.width * model.hidden_size * 2 * model.resolved_expert_ffn / rank.tp


def loss_head(loss: LossConfig, model: ModelConfig, rank: RankShare, *, vocab_rows: float, tokens: float) -> float:
    """Bytes that the loss head allocates for all tokens, without its inputs.  See docs/loss.md."""
    if loss.impl == "chunked":
        return 2 * rank.width * tokens * vocab_rows
    if loss.impl == "full":
        return (2 * rank.width + 2 * FP32) * tokens * vocab_rows
    # With sequence parallelism the gathered hidden states, too.
    gradient = rank.width * model.hidden_size * tokens * (2 if rank.sequence < 1 else 1)
    return max(loss.chunk(math.ceil(tokens)), model.hidden_size) * vocab_rows * rank.width + gradient


def state(*, parameters: float, owned: float, width: int, offload_fraction: float) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer on the device, and of the optimizer in host memory.

    parameters: on this rank; owned: those of them whose optimizer states it has; width: bytes of a weight
    With bf16 weights 18 bytes a parameter; with the distributed optimizer 6 + 12 / (dp x cp), and of an expert
    6 + 12 / its copies.
    """
    moments, main_weight = 2 * FP32, FP32 if width < FP32 else 0
    offloaded = 4 * FP32  # main weight, moments, and the gradient in transfer
    return {
        "weights": width * parameters,
        "gradients": FP32 * parameters,
        "optimizer": (1 - offload_fraction) * (moments + main_weight) * owned,
        "host_optimizer": offload_fraction * offloaded * owned,
    }


def num_offloaded_layers(fraction: float, num_layers: float, *, backward_is_next: bool) -> float:
    """Of the layers of a model chunk, the first ones, which backward reaches last; the forward pass asks, too.

    backward_is_next: backward follows each forward pass at once, so that the last two layers stay

    4 layers: a fraction of 0.3 -> 2, 0.1 -> 1, 1 -> 4, or 2 where backward is next
    """
    return min(math.ceil(fraction * num_layers), max(0, num_layers - 2) if backward_is_next else num_layers)


def num_resident_layers(num_offloaded: float, num_layers: float) -> float:
    """Most layers whose activations are on the device at a time: an offloaded layer is fetched while the one behind it
    is computed, so that two are there at least."""
    return max(num_layers - num_offloaded, min(2.0, num_layers))
