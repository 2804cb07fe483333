"""A row of the table of weights (`weights.py`): a weight of a layer, with its name, its shape and its role."""

from collections.abc import Callable, Mapping
from math import prod
from operator import attrgetter
from typing import Literal, NamedTuple

from sft.config import ModelConfig

# matrix    a matrix that multiplies tokens; its initial values are random
# kernel    another weight with random initial values, such as that of a convolution
# norm      the weight of a norm; initially 1, or 0 if the norm adds 1 to it
# bias      initially 0
# ones      initially 1
# decay     the logarithm of a rate of decay
Role = Literal["matrix", "kernel", "norm", "bias", "ones", "decay"]
Split = Literal["rows", "columns", ""]  # the dimension that tp (for experts: etp) divides; "": every rank has all of it
Condition = Callable[[ModelConfig], object]

LAST_OF_ATTENTION, LAST = 3, 7  # steps: the output projection of attention, and the norm after the MLP


class LayerWeight(NamedTuple):
    """A weight of a layer.

    key    name in the layer; a checkpoint may store the rows in parts, `in_proj.weight.query`
    shape  shape in letters (`weights.py`); for experts, the shape of one expert's weight
    part   group of matrix products that use the weight: "attention", "mlp", "experts", ...; "": no product uses it
    step   its turn in the layer's computation: 0 is the norm before attention, 7 the norm after the MLP
    has    key below `model` that is true if the model has this weight, or a condition; "": every model has it
    is_buffer  whether it is a buffer, which gets no gradient and is no parameter
    """

    key: str
    shape: str
    role: Role
    split: Split = ""
    part: str = ""
    step: int = 0
    has: str | Condition = ""
    is_buffer: bool = False

    @property
    def is_of_expert(self) -> bool:
        """Whether each expert has such a weight."""
        return self.key.startswith("mlp.experts.")

    @property
    def module(self) -> str:
        """The module that has the weight: self_attention.linear_qkv.weight -> self_attention.linear_qkv"""
        return self.key.rpartition(".")[0]

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of a Linear in transformers, where routers are no Linears."""
        return self.role == "matrix" and self.part != "router"

    @property
    def is_muon(self) -> bool:
        """Whether Muon updates it, if optim.name = muon.  The gate of a shared expert has one row."""
        return self.is_linear and self.part != "shared gate"

    @property
    def writes_residual(self) -> bool:
        """Whether the output of its product is added to the residual stream."""
        return self.role == "matrix" and self.split == "columns"

    def is_in(self, model: ModelConfig) -> bool:
        """Whether the model's layers with this mixer or MLP have the weight."""
        has = attrgetter(self.has) if isinstance(self.has, str) and self.has else self.has
        return bool(has(model)) if callable(has) else True

    def sizes(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape, with these sizes for its letters.  "q+k h" with q 4, k 2, h 8 -> (6, 8)"""
        return tuple(sum(sizes[letter] for letter in axis.split("+")) for axis in self.shape.split())

    def size(self, sizes: Mapping[str, int]) -> int:
        """The number of parameters."""
        return prod(self.sizes(sizes))


def has_input_norms(model: ModelConfig) -> bool:
    """Whether norms are on the inputs of attention and MLP."""
    return model.norm_placement != "post"


def has_output_norms(model: ModelConfig) -> bool:
    """Whether norms are on the outputs of attention and MLP."""
    return model.norm_placement != "pre"


def has_gate(model: ModelConfig) -> bool:
    """Whether MLPs and experts have a gate projection in addition to the up projection."""
    return model.activation != "relu2"


def expert_width(model: ModelConfig) -> int:
    """Width of the tokens that experts read and write."""
    return model.moe.latent_size or model.hidden_size
