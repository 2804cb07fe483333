"""A mixture of experts: a router, experts, and at most one shared expert.  Each token goes to top_k experts.

Bytes are an approximation: they assume that all ranks receive the same number of tokens.
"""

from dataclasses import dataclass

from sft.config import ModelConfig
from sft.config.halves import HalvesConfig
from sft.layers.mlps.limits import has_plain_swiglu
from sft.layers.moved import Moved, activation, around, total
from sft.layers.rank_share import FP32, RankShare
from sft.layers.second_half import MLP_NORM, MLP_OUTPUT, NORM_SCALE, Mlp, MlpBackward
from sft.layers.weight import LayerWeight, expert_width, has_gate, has_input_norms

LATENT = "latent of experts"  # `LayerWeight.part` of the projections to the experts' width and back
_M, _X, _SHARED = "mlp", "mlp.experts.experts", "moe.shared_ffn_hidden_size"
UNFUSED = "silu, up and product"  # saved on a CPU, where activation and weighting are three operations
# (forward, backward): counted bytes per token and expert that the router reads and writes: scores, probabilities, masks
# and order.
ROUTER = (150, 24)
OWN_NORMS = ("other normed inputs", "outputs of MLP and experts")  # the outputs are saved as inputs of their norms


def _has_norm_of_all(model: ModelConfig) -> bool:
    return has_input_norms(model) and not model.moe.own_norms


@dataclass(frozen=True)
class Experts(Mlp):
    weights = (
        LayerWeight("pre_mlp_layernorm.weight", "h", "norm", step=4, has=_has_norm_of_all),
        LayerWeight(f"{_M}.router.weight", "x h", "matrix", "", "router", 5),
        LayerWeight(f"{_M}.router.bias", "x", "kernel", step=5, has="moe.router_bias"),
        LayerWeight(f"{_M}.router.expert_bias", "x", "bias", step=5, has="moe.correction_bias", is_buffer=True),
        LayerWeight(f"{_M}.router.input_scale", "h", "ones", step=5, has="moe.own_norms"),
        LayerWeight(f"{_M}.router.expert_scale", "x", "ones", step=5, has="moe.own_norms"),
        LayerWeight(f"{_M}.expert_norm.weight", "h", "norm", step=5, has="moe.own_norms"),
        LayerWeight(f"{_M}.fc1_latent_proj.weight", "W h", "matrix", "", LATENT, 5, "moe.latent_size"),
        LayerWeight(f"{_X}.linear_fc1.weight", "E W", "matrix", "rows", "experts", 5),
        LayerWeight(f"{_X}.linear_fc1.bias", "E", "bias", "rows", step=5, has="mlp_bias"),
        LayerWeight(f"{_X}.linear_fc2.weight", "W e", "matrix", "columns", "experts", 6),
        LayerWeight(f"{_X}.linear_fc2.bias", "h", "bias", step=6, has="mlp_bias"),
        LayerWeight(f"{_M}.fc2_latent_proj.weight", "h W", "matrix", "", LATENT, 6, "moe.latent_size"),
        LayerWeight(f"{_M}.expert_output_norm.weight", "h", "norm", step=5, has="moe.own_norms"),
        LayerWeight(f"{_M}.shared_norm.weight", "h", "norm", step=5, has="moe.own_norms"),
        LayerWeight(f"{_M}.shared_experts.linear_fc1.weight", "R h", "matrix", "rows", "shared", 5, _SHARED),
        LayerWeight(f"{_M}.shared_experts.linear_fc2.weight", "h s", "matrix", "columns", "shared", 6, _SHARED),
        LayerWeight(f"{_M}.shared_experts.gate_weight", "1 h", "matrix", "", "shared gate", 5, "moe.shared_gate"),
        LayerWeight(f"{_M}.shared_output_norm.weight", "h", "norm", step=5, has="moe.own_norms"),
    )

    @staticmethod
    def narrowed(model: ModelConfig) -> ModelConfig:
        moe = model.moe.model_copy(update={"dense_layers": 0, "layers": None})
        return model.model_copy(update={"moe": moe, "halves": HalvesConfig()})

    @property
    def is_split_by_tp(self) -> bool:
        return self.model.moe.shared_ffn_hidden_size is not None

    @property
    def num_experts(self) -> int:
        return self.model.moe.num_experts or 0

    def saved_inside(self, rank: RankShare) -> dict[str, float]:
        model, top_k = self.model, self.model.moe.top_k or 0
        sent = rank.sequence * top_k * rank.width * expert_width(model)
        ffn = rank.sequence * top_k * rank.width * model.resolved_expert_ffn
        return {
            # For each expert an fp32 score, probability and weight, and two masks; for each choice two int64 indices
            # and two fp32 values.
            "router": rank.sequence * ((3 * FP32 + 2) * self.num_experts + 24 * top_k),
            "sent to experts": sent * rank.etp,  # each etp rank has all tokens of its expert, and a part of its width
            "gate and up": (1 + has_gate(model)) * ffn,
            "gated": ffn,
            **({} if rank.is_fused or not has_plain_swiglu(model) else {UNFUSED: 3 * ffn}),
            **({LATENT: rank.sequence * rank.width * expert_width(model)} if model.moe.latent_size else {}),
            **self._shared_expert(rank),
            **self._own_norms(rank),
        }

    def _shared_expert(self, rank: RankShare) -> dict[str, float]:
        """Bytes per token that the shared expert saves, except its input, which the router saves, too."""
        model = self.model
        if model.moe.shared_ffn_hidden_size is None:
            return {}
        ffn = rank.width * model.moe.shared_ffn_hidden_size / rank.tp
        gate = {"shared expert's output and gate": rank.hidden(model) + rank.width * rank.sequence}
        return {
            "shared gate and up": (1 + has_gate(model)) * ffn,
            "shared gated": ffn,
            **(gate if model.moe.shared_gate else {}),
        }

    def _own_norms(self, rank: RankShare) -> dict[str, float]:
        """Bytes per token that the norms of moe.own_norms save: norms of the router, the shared expert and the experts.

        Their input, the residual stream, counts as `RESIDUAL`.  The first of their three outputs counts as `MLP_NORM`.
        """
        if not self.model.moe.own_norms:
            return {}
        hidden = rank.hidden(self.model)
        return {OWN_NORMS[0]: 2 * hidden, OWN_NORMS[1]: 2 * hidden, "router's norm's scale": FP32 * rank.sequence}

    def kept_by_selective(self, *, norm_outputs_are_saved: bool) -> set[str]:
        """Names in `saved` of the tensors that are kept.  Received tokens are kept, so no token is sent again."""
        saves_norm = norm_outputs_are_saved or self.model.norm_placement == "post"
        kept = {NORM_SCALE, MLP_OUTPUT, "router", "sent to experts", LATENT, OWN_NORMS[1], "router's norm's scale"}
        return kept | ({MLP_NORM, OWN_NORMS[0]} if saves_norm else set())

    def in_backward(self, work: MlpBackward) -> float:
        """Bytes while backward computes the experts.  The sizes in `work.saved` count a token top_k times.

        After the recomputation of a whole layer, these are the recomputed tensors, and the larger of two sums: gate
        and up with one tensor as wide as the sent tokens, or three such tensors.  The output of a shared expert, and
        the sum of the experts' outputs to which it is added, are in memory too, if nothing saves them.
        """
        if not work.repeats_layer:
            return (self._recomputed(work) if work.recompute == "selective" else self._all_saved(work)) + work.hidden
        sent, gate_up = work.saved["sent to experts"], work.saved["gate and up"]
        moe = self.model.moe
        is_added = moe.shared_ffn_hidden_size is not None and not (moe.shared_gate or moe.own_norms)
        return work.with_hidden(work.recomputed + max(gate_up + sent, 3 * sent)) + 2 * is_added * work.hidden

    def _recomputed(self, work: MlpBackward) -> float:
        """Bytes while backward computes experts, if only the experts are recomputed.

        The output of the experts, its gradient and the gradient of their input are in memory all the time.  When
        recomputation ends, the output exists twice: as one tensor and by expert.  When backward ends, the gradient of
        the input exists twice, and the gradients of all weights are in memory.  Kernels that compute all experts at
        once hold the gradient of gate and up for all experts.
        """
        sent, gate_up = work.saved["sent to experts"], work.saved["gate and up"]
        gated = work.saved["gated"] + work.saved.get(UNFUSED, 0.0)
        end = gate_up + gated + 4 * sent
        if work.computes_at_once:
            end = max(end, 2 * gate_up + gated + 3 * sent)
        return max(end * work.tokens, 5 * sent * work.tokens + work.weight_gradients)

    def _all_saved(self, work: MlpBackward) -> float:
        """Bytes while backward computes experts without recomputation.

        At first the gradient of their output exists twice: as one tensor and by expert.  Later, kernels that compute
        all experts at once hold the gradients inside the experts.
        """
        sent, inside = work.saved["sent to experts"], work.saved["gate and up"] + work.saved["gated"]
        return (max(2 * sent, inside + sent) if work.computes_at_once else 2 * sent) * work.tokens

    def frame(self, rank: RankShare, *, is_portable: bool) -> Moved:
        return around(self.model, rank, repeated=2.0 * is_portable)

    @staticmethod
    def divided_by_tp(model: ModelConfig) -> dict[str, int]:
        shared = model.moe.shared_ffn_hidden_size
        return {"model.moe.shared_ffn_hidden_size": shared} if shared else {}

    def te_widths(self, tp: int, etp: int) -> dict[str, int]:
        widths = {"the width of an expert / etp": self.model.resolved_expert_ffn // etp}
        if latent := self.model.moe.latent_size:
            widths["model.moe.latent_size"] = latent
        if shared := self.model.moe.shared_ffn_hidden_size:
            widths["model.moe.shared_ffn_hidden_size / tp"] = shared // tp
        return widths

    def moved(self, rank: RankShare) -> Moved:
        """Bytes of the router, of activations, of four copies of the tokens that are sent (by choice, by expert, and
        back), of their sum, and of biases, which are weighted and added in fp32."""
        model, width = self.model, rank.width
        hidden, num_sent = rank.hidden(model), (model.moe.top_k or 0) * rank.sequence
        sent, received = (width * count * expert_width(model) for count in (num_sent, num_sent * rank.etp))
        ffn = width * num_sent * model.resolved_expert_ffn
        in_fp32 = rank.sequence * model.hidden_size * (width + FP32)
        copies = 2 * sent + 4 * received + sent + rank.sequence * width * expert_width(model)
        forward = copies + in_fp32 + ROUTER[0] * rank.sequence * self.num_experts
        backward = copies + 2 * in_fp32 + ROUTER[1] * rank.sequence * self.num_experts + 3 * hidden
        own = Moved(forward, backward, 2 * received)
        return total(own, activation(model, ffn), self._biases(ffn, received * FP32 / width), self._shared_passes(rank))

    def _biases(self, ffn: float, received: float) -> Moved:
        """Bytes of both biases.  received: bytes of the tokens of this rank's experts in fp32"""
        if not self.model.mlp_bias:
            return Moved()
        first = ffn * (1 + has_gate(self.model))
        forward = 2 * first + 4 * received
        return Moved(forward, first + 7.5 * received, forward)

    def _shared_passes(self, rank: RankShare) -> Moved:
        """Bytes of the shared expert: its activation, the sums with the experts' output and of gradients, its gate."""
        model, hidden = self.model, rank.hidden(self.model)
        if model.moe.shared_ffn_hidden_size is None:
            return Moved()
        ffn, gate = rank.width * model.moe.shared_ffn_hidden_size / rank.tp, hidden * model.moe.shared_gate
        own = Moved(3 * hidden + 2 * gate, 3 * hidden + 9 * gate, 2 * hidden + 2 * gate)
        return total(own, activation(model, ffn))
