"""The mixer of a layer that has none (model.halves.without_mixer): nothing is saved, computed or sent."""

from dataclasses import dataclass

from sft.config import Config, ModelConfig
from sft.layers.mixer import Mixer, MixerBytes
from sft.layers.moved import Moved
from sft.layers.rank_share import RankShare


@dataclass(frozen=True, kw_only=True)
class NoMixerBytes(MixerBytes):
    @property
    def saved(self) -> dict[str, float]:
        return {}

    @property
    def norm_outputs(self) -> dict[str, float]:
        return {}

    def frame(self, recompute: str, residual: dict[str, float]) -> dict[str, float]:
        return {}

    def local(self, tokens: float) -> float:
        return 0.0


@dataclass(frozen=True)
class NoMixer(Mixer):
    kind = "no mixer"
    weights = ()
    has_positions = False
    is_split_by_tp = False

    @classmethod
    def described(cls, model: ModelConfig) -> str:
        return "an MLP only"

    def bytes(self, config: Config, rank: RankShare, pack: float) -> NoMixerBytes:
        return NoMixerBytes(model=self.model, rank=rank)

    def frame(self, rank: RankShare, *, is_portable: bool) -> Moved:
        return Moved()

    def moved(self, config: Config, rank: RankShare, *, is_portable: bool) -> Moved:
        return Moved()
