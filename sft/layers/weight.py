"""A row of the table of weights (`weights.py`): a weight of a layer, with its name, its shape and its role."""

from collections.abc import Callable, Mapping
from math import prod
from operator import attrgetter
from typing import Literal, NamedTuple

from sft.config import ModelConfig

# matrix    multiplies tokens, and is drawn
# kernel    is drawn, too, and multiplies no tokens
# norm      begins at 1, or at 0 if it is an offset from 1
# bias      begins at 0
# ones      begins at 1
# decay     the logarithm of a rate of decay
Role = Literal["matrix", "kernel", "norm", "bias", "ones", "decay"]
Split = Literal["rows", "columns", ""]  # what each rank of tp has, of experts each rank of etp; "": all of the weight
Condition = Callable[[ModelConfig], object]

LAST_OF_ATTENTION, LAST = 3, 7  # steps: the output projection of attention, and the norm after the MLP


class LayerWeight(NamedTuple):
    """A weight of a layer.

    key    its name within a layer; a checkpoint may store its rows in parts, `in_proj.weight.query`
    shape  in letters, of one expert
    part   what a product with it belongs to: "attention", "mlp", "experts", ...; "" if there is no product
    step   when a layer uses it: 0 is the norm before attention, 7 the norm after the MLP
    has    key below `model` that is true in models with this weight, or a condition; "": all models have it
    is_buffer  it gets no gradient, and counts as no parameter
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
        """Whether each expert has one."""
        return self.key.startswith("mlp.experts.")

    @property
    def module(self) -> str:
        """self_attention.linear_qkv.weight -> self_attention.linear_qkv"""
        return self.key.rpartition(".")[0]

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of a Linear of Hugging Face; routers are none."""
        return self.role == "matrix" and self.part != "router"

    @property
    def writes_residual(self) -> bool:
        """Whether its product is added to the residual stream."""
        return self.role == "matrix" and self.split == "columns"

    def is_in(self, model: ModelConfig) -> bool:
        """Whether a layer of the model has it, if it has the mixer or the MLP that it belongs to."""
        has = attrgetter(self.has) if isinstance(self.has, str) and self.has else self.has
        return bool(has(model)) if callable(has) else True

    def sizes(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """shape "q+k h" with q 4, k 2, h 8 -> (6, 8)"""
        return tuple(sum(sizes[letter] for letter in axis.split("+")) for axis in self.shape.split())

    def size(self, sizes: Mapping[str, int]) -> int:
        """The number of its numbers."""
        return prod(self.sizes(sizes))


def has_input_norms(model: ModelConfig) -> bool:
    """Whether norms are on the inputs of attention and MLP."""
    return model.norm_placement != "post"


def has_output_norms(model: ModelConfig) -> bool:
    """Whether norms are on the outputs of attention and MLP."""
    return model.norm_placement != "pre"
