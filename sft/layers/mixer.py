"""The interface of a kind of layer.  `mixers/` has one file for each way to mix tokens.

A layer is a mixer and an MLP.  The mixer lets a token read other tokens: attention, a window, a recurrence.  The
estimate, the planner, checkpoints and adapters ask the mixer what they need to know about a kind of layer, and name no
kind themselves.  `sft/mcore/model/mixers.py` has the module of each kind.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from sft.config import Config, ModelConfig
from sft.config.mixer_section import LayerKind
from sft.layers.moved import Moved, around
from sft.layers.rank_share import FP32, RankShare
from sft.layers.traffic import Passes, Traffic
from sft.layers.weight import LayerWeight


class StateWork(NamedTuple):
    """The work of a recurrence.

    The unit is one forward pass that computes no maps of fragments.

    forward, backward  the work of forward and of backward, in this unit
    flops, num_bytes   FLOPs and bytes of the unit in plain torch, per token, for the heads of all tp ranks; 0: a fused
                       kernel computes the recurrence
    """

    forward: float
    backward: float
    flops: float = 0.0
    num_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MixerBytes(ABC):
    """Bytes of activations of a mixer in one layer on one rank, with one implementation."""

    model: ModelConfig
    rank: RankShare = RankShare()
    norm_outputs_are_saved: ClassVar[bool] = False  # whether train.recompute = selective saves the outputs of norms
    is_recomputed: ClassVar[bool] = False  # whether train.recompute = selective recomputes the mixer
    # Names in `saved` of the tensors that train.recompute = attention_kept keeps.
    results: ClassVar[frozenset[str]] = frozenset({"attention's output", "log-sum-exp"})

    @property
    @abstractmethod
    def saved(self) -> dict[str, float]:
        """Bytes that a layer saves per token for backward, by name."""

    @property
    @abstractmethod
    def norm_outputs(self) -> dict[str, float]:
        """Bytes per token of the outputs of norms inside the mixer, if a layer saves them."""

    def frame(self, recompute: str, residual: dict[str, float]) -> dict[str, float]:
        """Bytes per token that a layer saves around the mixer, unless backward recomputes the whole layer.

        recompute: train.recompute; residual: the bytes per token of the residual stream after the mixer, by name
        """
        model, saves_norms = self.model, recompute == "none" or self.norm_outputs_are_saved
        hidden = self.rank.hidden(model)
        scales = FP32 * self.rank.sequence * model.num_layer_norms / 2 + self.norm_scales
        saved = {"norms' scales": scales, **residual}
        if model.norm_placement != "pre":
            saved["attention's projected output"] = hidden  # the input of the norm
        if model.norm_placement != "post" and saves_norms:
            saved["normed input"] = hidden
        return saved | (self.norm_outputs if saves_norms else {})

    @property
    def kept(self) -> dict[str, float]:
        """Bytes per token that the kernel keeps with train.recompute = attention_kept, by name."""
        return {name: value for name, value in self.saved.items() if name in self.results}

    @property
    def norm_scales(self) -> float:
        """Bytes per token of the fp32 scales that the norms of heads save."""
        return 0.0

    @abstractmethod
    def local(self, tokens: float) -> float:
        """Bytes of temporary tensors while backward computes the mixer.  tokens: number of tokens on this rank"""

    def gathered(self, pack: float) -> float:
        """Peak bytes of other ranks' keys and values while backward computes the mixer.  pack: tokens of a pack"""
        return 0.0

    def rotary(self, pack: float) -> float:
        """Bytes of cosines and sines; with the te backend, bytes of angles.  pack: number of tokens of a pack"""
        return 0.0

    @property
    def freed(self) -> tuple[str, ...]:
        """Names in `saved` of the tensors that backward has already freed when it computes attention itself.

        These tensors belong to operations that follow attention in the layer.
        """
        return ()


@dataclass(frozen=True)
class Mixer(ABC):
    """A kind of layer.  model: a model whose layers are all of this kind (`narrowed`)"""

    model: ModelConfig
    kind: ClassVar[LayerKind]
    weights: ClassVar[tuple[LayerWeight, ...]]  # the mixer's rows of the table of weights, with the norm on its input
    is_recomputed: ClassVar[bool] = False  # whether train.recompute = selective recomputes it, with its projections
    has_positions: ClassVar[bool] = True  # whether it uses rotary positions
    is_split_by_tp: ClassVar[bool] = True  # whether tp ranks gather its inputs and sum its outputs

    @staticmethod
    def narrowed(model: ModelConfig) -> ModelConfig:
        """A model with the sizes of layers of this kind; the model itself if nothing differs."""
        return model

    @staticmethod
    def sizes(model: ModelConfig) -> Mapping[str, int]:
        """The sizes that only this kind of layer has, by their letter in `LayerWeight.shape`."""
        return {}

    @classmethod
    def described(cls, model: ModelConfig) -> str:
        """The name of this kind of layer in `sft check`.  model: the whole model"""
        return cls.kind

    @abstractmethod
    def bytes(self, config: Config, rank: RankShare, pack: float) -> MixerBytes:
        """Bytes of activations with the recipe's implementation of the mixer.  pack: tokens of a pack"""

    # --- tensor parallelism --------------------------------------------------------------------------------------

    @staticmethod
    def divided_by_tp(model: ModelConfig) -> dict[str, int]:
        """Sizes that tp must divide, by key of the recipe.  model: the whole model"""
        return {}

    def te_widths(self, tp: int) -> dict[str, int]:
        """Sizes of a rank's parts of weights in Transformer Engine, {formula: number of rows or columns}."""
        return {}

    # --- messages ------------------------------------------------------------------------------------------------

    def sent(self, config: Config) -> int:
        """Elements per token that a rank sends to all ranks of its cp group: keys and values, or the latent."""
        return 0

    def traffic(self, config: Config, passes: Passes) -> Traffic:
        """Bytes that one tensor-parallel rank receives over cp in one layer."""
        return Traffic(gathered=self.sent(config) * passes.key_bytes)

    def first_share(self, config: Config) -> float:
        """Share of the gathered bytes that must arrive before attention begins.  No computation hides this share."""
        return 1.0

    # --- computation ---------------------------------------------------------------------------------------------

    @property
    def pair_width(self) -> float:
        """heads x (key width + value width) / 2, see `softmax.pair_width`; 0: the mixer has no softmax attention."""
        return 0.0

    @property
    def window(self) -> int | None:
        """The largest number of keys that a query sees; None: all keys before it."""
        return None

    @property
    def state_products(self) -> int:
        """Multiplications per token with the states of a recurrence, in forward."""
        return 0

    def num_states(self, tp: int) -> int:
        """Heads with a state on a tensor-parallel rank; 0: the mixer has no recurrence."""
        return 0

    def state_work(self, config: Config, cp_size: int) -> StateWork:
        """The work of the recurrence in one layer, for long documents on cp_size ranks."""
        return StateWork(0.0, 0.0)

    def frame(self, rank: RankShare, *, is_portable: bool) -> Moved:
        """Bytes of the norms and the residual sum around the mixer.

        With selective, the portable backend computes outputs of norms again, which Transformer Engine saves.  A mixer
        that is computed again saves the output of the norm before it.
        """
        return around(self.model, rank, repeated=2.0 * (is_portable and not self.is_recomputed))

    @abstractmethod
    def moved(self, config: Config, rank: RankShare, *, is_portable: bool) -> Moved:
        """Bytes of the mixer without the norm before it.  is_portable: whether the portable backend runs attention"""
