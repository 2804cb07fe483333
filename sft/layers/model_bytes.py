"""Computes bytes of activations that norms, the MLP, experts and the loss head save per token, and bytes per parameter.

Does not import torch.  sft/estimate sums the results.  attention/activation_bytes.py counts the bytes of attention.
"""

import math
from dataclasses import dataclass

from sft.config import Config, LossConfig, ModelConfig
from sft.parallel.layout import Layout

FP32 = 4
RESIDUAL = "MLP's norm input"  # the residual stream between the halves of a layer
MLP_NORM = "MLP's normed input"  # with norm_placement = post, the output of the MLP, which the norm saves
UNFUSED = "silu, up and product"  # of experts on a CPU, whose activation and weighting are three operations
OWN_NORMS = ("other normed inputs", "outputs of MLP and experts")  # the second are inputs of norms
MLP_OUTPUT = "MLP's output"  # with norm_placement = both, saved by the norm on it


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """The part of a token's tensors that one rank holds."""

    tp: int = 1  # tensor-parallel size of layers
    etp: int = 1  # tensor-parallel size of an expert
    ep: int = 1  # ranks that share out the experts of a layer
    sequence: float = 1.0  # share of the tokens between layers that the rank holds: 1 / tp with sequence parallelism
    width: int = 2  # bytes of a number
    is_fused: bool = True  # the kernels of a GPU; False: those of a CPU, which save and copy more

    @staticmethod
    def of(config: Config, layout: Layout) -> "RankShare":
        return RankShare(
            tp=layout.tp,
            etp=layout.etp,
            ep=layout.ep,
            sequence=1 / layout.tp if layout.sequence_parallel else 1.0,
            width=2 if config.run.precision == "bf16" else FP32,
            is_fused=config.run.device != "cpu",
        )


def hidden_state(model: ModelConfig, rank: RankShare) -> float:
    """Bytes of one hidden state between layers."""
    return rank.width * model.hidden_size * rank.sequence


def norm_scales(model: ModelConfig, rank: RankShare) -> float:
    """Bytes of the fp32 number per row that norm.py and qk_norm.py save, of the norms of attention's input and output
    and of the norms of queries, keys and values."""
    heads = (model.num_attention_heads + model.resolved_query_groups) / rank.tp
    rows = 2 if model.qk_norm_across_heads else heads
    values = model.resolved_query_groups / rank.tp * model.value_norm
    return FP32 * rank.sequence * model.num_layer_norms / 2 + FP32 * (model.qk_norm * rows + values)


def mlp(model: ModelConfig, rank: RankShare) -> dict[str, float]:
    """Bytes that the second half of a layer saves in addition to its input, by name.

    On a GPU the gated activation is one kernel.  On a CPU, core's SwiGLU saves 2 * ffn_hidden_size numbers more: the
    gate after silu, and a second copy of up.
    """
    hidden = hidden_state(model, rank)
    saved = {"MLP norm's scale": FP32 * rank.sequence * model.num_layer_norms / 2, MLP_NORM: hidden}
    saved |= {MLP_OUTPUT: hidden} if model.norm_placement == "both" else {}
    if model.moe.num_experts is not None:
        return {**saved, **_experts(model, rank, model.moe.num_experts)}
    ffn = rank.width * model.ffn_hidden_size / rank.tp
    unfused = {} if rank.is_fused or model.activation != "swiglu" else {"silu and up": 2 * ffn}
    return {**saved, "gate and up": 2 * ffn, "gated": ffn, **unfused}


def _experts(model: ModelConfig, rank: RankShare, num_experts: int) -> dict[str, float]:
    """Bytes of experts, an approximation: each token goes to top_k experts, and each rank gets an equal share."""
    top_k = model.moe.top_k or 0
    sent = rank.sequence * top_k * rank.width * model.hidden_size
    ffn = rank.sequence * top_k * rank.width * model.resolved_expert_ffn
    return {
        # Scores, probabilities and weights, and two masks; of each choice, two indices and two numbers.
        "router": rank.sequence * ((3 * FP32 + 2) * num_experts + 24 * top_k),
        "sent to experts": sent * rank.etp,  # each etp rank sees all tokens of its expert, and a part of its width
        "gate and up": 2 * ffn,
        "gated": ffn,
        **({} if rank.is_fused or model.activation != "swiglu" else {UNFUSED: 3 * ffn}),
        **_shared_expert(model, rank),
        **_own_norms(model, rank),
    }


def _shared_expert(model: ModelConfig, rank: RankShare) -> dict[str, float]:
    """Bytes of the shared expert, without its input, which the router saves."""
    if model.moe.shared_ffn_hidden_size is None:
        return {}
    ffn = rank.width * model.moe.shared_ffn_hidden_size / rank.tp
    gate = {"shared expert's output and gate": hidden_state(model, rank) + rank.width * rank.sequence}
    return {"shared gate and up": 2 * ffn, "shared gated": ffn, **(gate if model.moe.shared_gate else {})}


def _own_norms(model: ModelConfig, rank: RankShare) -> dict[str, float]:
    """Bytes of the norms of moe.own_norms: of the router's, and of those on the outputs of shared expert and experts.

    The residual stream, their input, is `MLP's norm input`; the first of three normed ones is MLP_NORM.
    """
    if not model.moe.own_norms:
        return {}
    hidden = hidden_state(model, rank)
    return {OWN_NORMS[0]: 2 * hidden, OWN_NORMS[1]: 2 * hidden, "router's norm's scale": FP32 * rank.sequence}


def kept_by_selective(model: ModelConfig, *, norm_outputs_are_saved: bool) -> set[str]:
    """Names of the bytes of `mlp` that train.recompute = selective does not recompute.

    Of a dense layer none.  Of experts the tokens that a rank has received, so that no token is sent again.
    """
    if model.moe.num_experts is None:
        return set()
    saves_norm = norm_outputs_are_saved or model.norm_placement == "post"
    kept = {"MLP norm's scale", MLP_OUTPUT, "router", "sent to experts", OWN_NORMS[1], "router's norm's scale"}
    return kept | ({MLP_NORM, OWN_NORMS[0]} if saves_norm else set())


def gradients_of_experts(model: ModelConfig, rank: RankShare) -> float:
    """Bytes of the weight gradients of all experts of a layer on this rank."""
    numbers = 3 * model.hidden_size * model.resolved_expert_ffn * (model.moe.num_experts or 0)
    return rank.width * numbers / (rank.ep * rank.etp)


def widest_gradient(model: ModelConfig, rank: RankShare) -> float:
    """Bytes of the weight gradient of gate and up, before it is added to the fp32 gradient."""
    dense = model.ffn_hidden_size if model.moe.dense_layers else 0
    widest = max(model.resolved_expert_ffn, model.moe.shared_ffn_hidden_size or 0, dense)
    return rank.width * model.hidden_size * 2 * widest / rank.tp


def loss_head(loss: LossConfig, model: ModelConfig, rank: RankShare, *, vocab_rows: float, tokens: float) -> float:
    """Bytes that the loss head allocates for all tokens, without its inputs.  See docs/concepts/loss.md."""
    if loss.impl == "chunked":
        return 2 * rank.width * tokens * vocab_rows
    if loss.impl == "full":
        return (2 * rank.width + 2 * FP32) * tokens * vocab_rows
    # With sequence parallelism the head also holds the gathered hidden states.
    gradient = rank.width * model.hidden_size * tokens * (2 if rank.sequence < 1 else 1)
    return max(loss.chunk(math.ceil(tokens)), model.hidden_size) * vocab_rows * rank.width + gradient


def state(*, parameters: float, owned: float, width: int, offload_fraction: float) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer on the device, and of the optimizer in host memory.

    parameters: on this rank; owned: parameters whose optimizer states this rank has; width: bytes of a weight
    bf16 weights take 18 bytes per parameter.  With the distributed optimizer they take 6 + 12 / (dp x cp), and weights
    of an expert 6 + 12 / its copies.
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
    """Number of offloaded layers of a model chunk: the first ones, which backward reaches last.

    backward_is_next: backward follows each forward pass at once, so the last two layers stay on the device

    4 layers: a fraction of 0.3 -> 2, 0.1 -> 1, 1 -> 4, or 2 if backward is next
    """
    return min(math.ceil(fraction * num_layers), max(0, num_layers - 2) if backward_is_next else num_layers)


def num_resident_layers(num_offloaded: float, num_layers: float) -> float:
    """Largest number of layers whose activations are on the device at a time.  The number is at least two, because an
    offloaded layer is prefetched while backward computes the following layer."""
    return max(num_layers - num_offloaded, min(2.0, num_layers))
