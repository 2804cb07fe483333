"""Linear layers whose output nobody reads in recomputation, which therefore leaves them out (sft/layers/unread.py)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from megatron.core.transformer import ModuleSpec
from torch import Tensor

from sft.config import Config
from sft.layers.kinds import all_layer_groups
from sft.layers.unread import Unread
from sft.mcore.activations.kept_calls import unread_product
from sft.mcore.modules.biases import submodules_of


class Unrepeated:
    """Stands before a class of linear layers among the bases of a class."""

    def computed(self, x: Tensor, *args: Any) -> tuple[Tensor, Any]:
        """The output and the bias that the linear layer itself computes."""
        result: tuple[Tensor, Any] = super().forward(x, *args)  # type: ignore[misc]
        return result

    @property
    def matrices(self: Any) -> list[Tensor]:
        return [weight for name, weight in self.named_parameters() if name.rpartition(".")[2].startswith("weight")]

    def forward(self, x: Tensor, *args: Any) -> tuple[Tensor, Any]:
        return unread_product(self, lambda x, *_: self.computed(x, *args), [x], self.matrices)


def unrepeated(linear: type[Any]) -> type[Any]:
    """A subclass of a class of linear layers, whose product recomputation leaves out."""
    return type(f"Unrepeated{linear.__name__}", (Unrepeated, linear), {})


def around(
    linear: Any, function: Callable[..., tuple[Tensor, Any]], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, Any]:
    """`function(linear, *inputs)`, which adds something to the output of a linear layer, with these weights.

    If recomputation leaves out the product of the linear layer, it leaves out the whole function.
    """
    if not isinstance(linear, Unrepeated):
        return function(linear, *inputs)
    return unread_product(linear, partial(function, linear.computed), inputs, [*linear.matrices, *weights])


# the modules that have the projection in core's spec of a layer, and its name there; by `LayerWeight.part`
_LINEARS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "mlp": (lambda layer: submodules_of(layer.mlp), "linear_fc2"),
    "experts": (lambda layer: submodules_of(submodules_of(layer.mlp).experts), "linear_fc2"),
    "shared": (lambda layer: submodules_of(submodules_of(layer.mlp).shared_experts), "linear_fc2"),
}
_OF_MIXER = attrgetter("self_attention.submodules"), "linear_proj"


def leave_out_products(spec: ModuleSpec, config: Config, layer_number: int) -> None:
    """Change core's spec of a layer so that recomputation leaves out its unread products.

    layer_number: from 1
    """
    (group,) = (group for group in all_layer_groups(config.model) if layer_number in group.numbers)
    for weight in group.weights:
        unread = Unread.of(group.model, weight, has_mlp=bool(group.mlp.weights))
        if unread.leaves_out(config, weight.part):
            owner, name = _LINEARS.get(weight.part, _OF_MIXER)
            parts = owner(spec.submodules)
            setattr(parts, name, unrepeated(getattr(parts, name)))
