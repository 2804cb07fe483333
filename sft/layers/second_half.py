"""The interface of the second half of a layer.  `mlps/` has the dense MLP and the experts."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from sft.config import ModelConfig
from sft.config.train import Recompute, repeats_layers
from sft.layers.moved import Moved
from sft.layers.rank_share import FP32, RankShare
from sft.layers.weight import LayerWeight

RESIDUAL = "MLP's norm input"  # the residual stream between the halves of a layer
MLP_NORM = "MLP's normed input"  # with norm_placement = post, the output of the MLP, which the norm saves
MLP_OUTPUT = "MLP's output"  # saved by the norm on this output, with norm_placement = both
NORM_SCALE = "MLP norm's scale"


@dataclass(frozen=True, kw_only=True)
class MlpBackward:
    """The inputs of `Mlp.in_backward`, which estimates an MLP's memory in backward.

    tokens     number of tokens on this rank
    hidden     bytes of the hidden states of these tokens
    saved      bytes per token that the MLP would save without recomputation, by name
    kept       names in `saved` of the tensors that the MLP saves with the recipe's recomputation
    recompute  train.recompute; tile: train.mlp_tile
    recomputed_attention  bytes per token of attention's tensors that backward computes again; they are in
                          memory while backward computes the MLP of a layer that is recomputed as a whole
    widest_gradient       bytes of the largest gradient of a weight, before it is added to the fp32 gradient
    computes_at_once      whether kernels compute all experts at once; False: one expert after the other
    weight_gradients      bytes of the gradients of this rank's experts
    """

    tokens: float
    hidden: float
    saved: dict[str, float]
    kept: frozenset[str]
    recompute: Recompute
    tile: int | None
    recomputed_attention: float
    widest_gradient: float
    computes_at_once: bool
    weight_gradients: float

    @property
    def repeats_layer(self) -> bool:
        return repeats_layers(self.recompute)

    @property
    def recomputed(self) -> float:
        """Bytes per token of the tensors that backward computes again."""
        return sum(value for name, value in self.saved.items() if name not in self.kept)

    def with_hidden(self, inside: float) -> float:
        """Bytes while backward computes the MLP, or a tile of it.  inside: bytes per token inside the MLP

        The result also counts the gradient of the output, recomputed attention, and the largest gradient of a weight.
        With train.recompute = selective, it also counts the gradient of the input.
        """
        around = (2 if self.recompute == "selective" else 1) * self.hidden
        waits = self.recomputed_attention if self.repeats_layer else 0.0
        of_tile = inside * min(self.tokens, self.tile or self.tokens)
        return of_tile + waits * self.tokens + around + self.widest_gradient


@dataclass(frozen=True)
class Mlp(ABC):
    """The MLP or the experts of a layer.  model: a model whose layers all have this second half"""

    model: ModelConfig
    weights: ClassVar[tuple[LayerWeight, ...]]  # the MLP's rows of the table of weights, with the norm on its input

    @staticmethod
    @abstractmethod
    def narrowed(model: ModelConfig) -> ModelConfig:
        """A model whose layers all have this second half."""

    @property
    @abstractmethod
    def is_split_by_tp(self) -> bool:
        """Whether tp ranks gather its inputs and sum its outputs."""

    def saved(self, rank: RankShare) -> dict[str, float]:
        """Bytes per token that the second half of a layer saves in addition to its input, by name.

        On a GPU the gated activation is one kernel.  On a CPU, core's SwiGLU saves 2 * ffn_hidden_size elements more:
        the gate after silu, and a second copy of up.
        """
        model, hidden = self.model, rank.hidden(self.model)
        saved = {NORM_SCALE: FP32 * rank.sequence * model.num_layer_norms / 2, MLP_NORM: hidden}
        saved |= {MLP_OUTPUT: hidden} if model.norm_placement == "both" else {}
        return saved | self.saved_inside(rank)

    def residual(self, rank: RankShare) -> dict[str, float]:
        """Bytes per token of the input of this half, by name, if the layer has a mixer before it."""
        return {RESIDUAL: rank.hidden(self.model)}

    @abstractmethod
    def saved_inside(self, rank: RankShare) -> dict[str, float]:
        """Bytes per token that the MLP saves without the tensors of its norms, by name."""

    @abstractmethod
    def kept_by_selective(self, *, norm_outputs_are_saved: bool) -> set[str]:
        """Names in `saved` of the tensors that train.recompute = selective does not recompute."""

    @abstractmethod
    def in_backward(self, work: MlpBackward) -> float:
        """Bytes of recomputed activations and gradients while backward computes the MLP."""

    def replaced(self, work: MlpBackward) -> float:
        """Bytes of saved tensors whose memory the gradients of `in_backward` take."""
        return 0.0

    @abstractmethod
    def frame(self, rank: RankShare, *, is_portable: bool) -> Moved:
        """Bytes of the norms and the residual sum around this half."""

    @abstractmethod
    def moved(self, rank: RankShare) -> Moved:
        """Bytes of activation functions, and of copies to experts and back."""

    @staticmethod
    @abstractmethod
    def divided_by_tp(model: ModelConfig) -> dict[str, int]:
        """Sizes that tp must divide, by key of the recipe.  model: the whole model"""

    @abstractmethod
    def te_widths(self, tp: int, etp: int) -> dict[str, int]:
        """Sizes of a rank's parts of weights in Transformer Engine, {formula: number of rows or columns}."""

    @property
    @abstractmethod
    def num_experts(self) -> int:
        """The number of experts of a layer; 0: a dense MLP."""
