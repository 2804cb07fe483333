"""What a kind of layer is: the interface of the files in `mixers/`, one for each way to mix tokens.

A layer is a mixer and an MLP.  The mixer lets a token read other tokens: attention, a window, a recurrence.  Whatever
the estimate, the planner, checkpoints and adapters ask about a kind of layer, they ask its mixer; so none of them
names a kind.  `sft/mcore/model/mixers.py` has the module of each kind.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from sft.config import Config, ModelConfig
from sft.config.model import LayerKind
from sft.layers.rank_share import RankShare
from sft.layers.traffic import Passes, Traffic
from sft.layers.weight import LayerWeight


@dataclass(frozen=True, kw_only=True)
class MixerBytes(ABC):
    """Bytes of activations of a mixer in one layer on one rank, with one implementation."""

    model: ModelConfig
    rank: RankShare = RankShare()
    norm_outputs_are_saved: ClassVar[bool] = False  # even if train.recompute is selective
    is_recomputed: ClassVar[bool] = False  # by train.recompute = selective

    @property
    @abstractmethod
    def saved(self) -> dict[str, float]:
        """Bytes that a layer saves per token for backward, by name."""

    @property
    @abstractmethod
    def norm_outputs(self) -> dict[str, float]:
        """Bytes per token of the outputs of norms inside the mixer, if a layer saves them."""

    @property
    def norm_scales(self) -> float:
        """Bytes per token of the fp32 numbers that norms of heads save."""
        return 0.0

    @abstractmethod
    def local(self, tokens: float) -> float:
        """Bytes of local tokens while backward computes the mixer."""

    def gathered(self, pack: float) -> float:
        """Peak bytes of keys and values of other ranks while backward computes the mixer.  pack: tokens of a pack"""
        return 0.0

    def rotary(self, pack: float) -> float:
        """Bytes of the rotary table or the rotation."""
        return 0.0

    @property
    def freed(self) -> tuple[str, ...]:
        """Names of `saved` that are free while backward computes the heart of the mixer: of what follows it."""
        return ()


@dataclass(frozen=True)
class Mixer(ABC):
    """A kind of layer, in a model that has the sizes of this kind where kinds differ (`narrowed`)."""

    model: ModelConfig
    kind: ClassVar[LayerKind]
    weights: ClassVar[tuple[LayerWeight, ...]]  # its rows of the table of weights, with the norm on its input
    is_recomputed: ClassVar[bool] = False  # by train.recompute = selective, with its projections
    has_positions: ClassVar[bool] = True  # rotary ones

    @staticmethod
    def narrowed(model: ModelConfig) -> ModelConfig:
        """A model with the sizes of layers of this kind; the model itself if nothing differs."""
        return model

    @staticmethod
    def sizes(model: ModelConfig) -> Mapping[str, int]:
        """Sizes of the model that only this kind has, by letter of shapes."""
        return {}

    @classmethod
    def described(cls, model: ModelConfig) -> str:
        """Words for `sft check`.  model: the whole model"""
        return cls.kind

    @abstractmethod
    def bytes(self, config: Config, rank: RankShare, pack: float) -> MixerBytes:
        """Bytes of activations with the implementation that the recipe names.  pack: tokens of a pack"""

    # --- tensor parallelism --------------------------------------------------------------------------------------

    @staticmethod
    def divided_by_tp(model: ModelConfig) -> dict[str, int]:
        """Sizes that tp must divide, by key of the recipe.  model: the whole model"""
        return {}

    def te_widths(self, tp: int) -> dict[str, int]:
        """Rows and columns of a rank's parts of weights in Transformer Engine, by their formula."""
        return {}

    # --- messages ------------------------------------------------------------------------------------------------

    def sent(self, config: Config) -> int:
        """Numbers of a token that a rank sends to all that share its pack: its keys and values, or its latent."""
        return 0

    def traffic(self, config: Config, passes: Passes) -> Traffic:
        """Bytes over cp of one rank of tp, in one layer."""
        return Traffic(gathered=self.sent(config) * passes.of_key)

    def first_share(self, tp: int) -> float:
        """Share of the gathered bytes that arrive before computation can begin, which so hides nothing of them."""
        return 1.0

    # --- computation ---------------------------------------------------------------------------------------------

    @property
    def pair_width(self) -> float:
        """`softmax.pair_width`; 0: the cost does not grow with the square of a length."""
        return 0.0

    @property
    def window(self) -> int | None:
        """The most keys that a query sees; None: all before it."""
        return None

    @property
    def state_products(self) -> int:
        """Multiplications of a token with a state, forward."""
        return 0

    @property
    def rotated(self) -> int:
        """Numbers of a token that norms of heads and rotary positions read and write."""
        return (self.model.num_attention_heads + self.model.resolved_query_groups) * self.model.resolved_head_dim
