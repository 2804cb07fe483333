"""An MLP: down(activation(gate(x)) * up(x)), with the projections gate, up and down; or down(activation(up(x)))."""

from dataclasses import dataclass

from sft.config import ModelConfig, MoeConfig
from sft.config.halves import HalvesConfig
from sft.layers.mlps.limits import has_plain_swiglu
from sft.layers.moved import Moved, activation, around
from sft.layers.rank_share import RankShare
from sft.layers.second_half import Mlp, MlpBackward
from sft.layers.weight import LayerWeight, has_gate, has_input_norms

_M = "mlp"


@dataclass(frozen=True)
class DenseMlp(Mlp):
    weights = (
        LayerWeight(f"{_M}.linear_fc1.layer_norm_weight", "h", "norm", step=4, has=has_input_norms),
        LayerWeight(f"{_M}.linear_fc1.weight", "F h", "matrix", "rows", "mlp", 5),
        LayerWeight(f"{_M}.linear_fc1.bias", "F", "bias", "rows", step=5, has="mlp_bias"),
        LayerWeight(f"{_M}.linear_fc2.weight", "h f", "matrix", "columns", "mlp", 6),
        LayerWeight(f"{_M}.linear_fc2.bias", "h", "bias", step=6, has="mlp_bias"),
    )
    num_experts = 0
    is_split_by_tp = True

    @staticmethod
    def narrowed(model: ModelConfig) -> ModelConfig:
        return model.model_copy(update={"moe": MoeConfig(), "halves": HalvesConfig()})

    def saved_inside(self, rank: RankShare) -> dict[str, float]:
        ffn, gates = rank.width * self.model.ffn_hidden_size / rank.tp, has_gate(self.model)
        unfused = {} if rank.is_fused or not has_plain_swiglu(self.model) else {"silu and up": 2 * ffn}
        return {"gate and up": (1 + gates) * ffn, "gated": ffn, **unfused}

    def kept_by_selective(self, *, norm_outputs_are_saved: bool) -> set[str]:
        return set()

    def in_backward(self, work: MlpBackward) -> float:
        """Bytes while backward computes the MLP.  Adapters add their outputs to the weight's, in the same memory."""
        return work.with_hidden(work.recomputed + work.saved["gate and up"])

    def replaced(self, work: MlpBackward) -> float:
        """Bytes of the gated activation, if it was saved.  The activation's gradient replaces it in memory.

        Without a gate, the moment before is as large: there, the activation and its gradient are in memory.
        """
        is_replaced = "gated" in work.kept and has_gate(self.model)
        return (work.saved["gated"] if is_replaced else 0.0) * work.tokens

    def frame(self, rank: RankShare, *, is_portable: bool) -> Moved:
        """Bytes of norms and the residual sum.  Selective computes this half again, and copies its input's gradient."""
        return around(self.model, rank, repeated=7.0 + 2.0 * (self.model.norm_placement == "both"))

    @staticmethod
    def divided_by_tp(model: ModelConfig) -> dict[str, int]:
        return {"model.ffn_hidden_size": model.ffn_hidden_size}

    def te_widths(self, tp: int, etp: int) -> dict[str, int]:
        return {"model.ffn_hidden_size / tp": self.model.ffn_hidden_size // tp}

    def moved(self, rank: RankShare) -> Moved:
        return activation(self.model, rank.width * self.model.ffn_hidden_size / rank.tp)
