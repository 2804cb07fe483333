"""The MLP of a layer that has none (model.halves.without_mlp): nothing is saved, computed or sent."""

from dataclasses import dataclass

from sft.config import ModelConfig, MoeConfig
from sft.config.halves import HalvesConfig
from sft.layers.moved import Moved
from sft.layers.rank_share import RankShare
from sft.layers.second_half import Mlp, MlpBackward


@dataclass(frozen=True)
class NoMlp(Mlp):
    weights = ()
    num_experts = 0
    is_split_by_tp = False

    @staticmethod
    def narrowed(model: ModelConfig) -> ModelConfig:
        halves = HalvesConfig(without_mlp=[*range(1, model.num_layers + 1)])
        return model.model_copy(update={"moe": MoeConfig(), "halves": halves})

    def residual(self, rank: RankShare) -> dict[str, float]:
        return {}

    def saved(self, rank: RankShare) -> dict[str, float]:
        return {}

    def saved_inside(self, rank: RankShare) -> dict[str, float]:
        return {}

    def kept_by_selective(self, *, norm_outputs_are_saved: bool) -> set[str]:
        return set()

    def in_backward(self, work: MlpBackward) -> float:
        return 0.0

    def frame(self, rank: RankShare, *, is_portable: bool) -> Moved:
        return Moved()

    def moved(self, rank: RankShare) -> Moved:
        return Moved()

    @staticmethod
    def divided_by_tp(model: ModelConfig) -> dict[str, int]:
        return {}

    def te_widths(self, tp: int, etp: int) -> dict[str, int]:
        return {}
