"""Counts the parameters of a layer: split by tp or not, in experts, in matrices.  Arithmetic only."""

from collections.abc import Iterable
from dataclasses import dataclass

from sft.config import ModelConfig
from sft.layers.weight import LayerWeight
from sft.layers.weights import sizes_of


@dataclass(frozen=True, kw_only=True)
class LayerParameters:
    """Numbers of parameters of a layer.

    split     parameters that tp splits, without experts
    whole     parameters that every tensor-parallel rank holds
    expert    parameters of one expert
    products  parameters in the matrices of `split` and `whole`: multiplications per token
    expert_products  parameters in the matrices of one expert
    state_products   multiplications per token with the state of linear attention
    """

    split: int
    whole: int
    expert: int
    num_experts: int
    products: int
    expert_products: int
    state_products: int = 0

    @property
    def total(self) -> int:
        return self.split + self.whole + self.num_experts * self.expert

    @staticmethod
    def of(
        model: ModelConfig, weights: Iterable[LayerWeight], num_experts: int, state_products: int
    ) -> "LayerParameters":
        """The parameters of a layer with these weights.  model: a model whose layers are all like this one

        the example of `flops.num_parameters` -> split 160, whole 8, products 160
        8 experts of width 2 instead of the MLP -> split 64, whole 8 + 32 of the router, expert 24, products 96
        also a shared expert of width 6 with its gate -> split 136, whole 44, products 172
        """
        sizes = sizes_of(model)
        counted = [(weight, weight.size(sizes)) for weight in weights if not weight.is_buffer]
        own = [(weight, size) for weight, size in counted if not weight.is_of_expert]
        of_expert = [(weight, size) for weight, size in counted if weight.is_of_expert]
        return LayerParameters(
            split=sum(size for weight, size in own if weight.split),
            whole=sum(size for weight, size in own if not weight.split),
            expert=sum(size for _, size in of_expert),
            num_experts=num_experts,
            products=sum(size for weight, size in own if weight.role == "matrix"),
            expert_products=sum(size for weight, size in of_expert if weight.role == "matrix"),
            state_products=state_products,
        )
