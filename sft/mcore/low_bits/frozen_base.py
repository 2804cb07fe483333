"""The frozen weights of a model chunk that are held in low bits, and their layers.

A layer's weights have memory in the precision of the run only while the layer computes, forward and backward
(sharding/passes.py).  Experts are dequantised by groups (experts/rows.py), and never as a whole layer.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from sft.layers.weights import is_of_layer, weight_of
from sft.mcore.experts.grouped import EachExpert
from sft.mcore.low_bits.stored_weight import StoredWeight
from sft.mcore.sharding.flat import FlatWeights
from sft.mcore.sharding.passes import UnitPasses
from sft.mcore.sharding.units import Reduction


class FrozenLayer:
    """The weights of a layer, as a unit of `UnitPasses`.  Backward needs no gradient of them."""

    flats: Sequence[FlatWeights] = ()
    is_trained = False

    def __init__(self, layer: torch.nn.Module, weights: Sequence[StoredWeight]) -> None:
        self.name, self.module, self._weights = "frozen layer", layer, weights
        self._is_whole = False

    def gather(self) -> None:
        """Do nothing.  Weights that were dequantised ahead of their use would be a second layer in memory."""

    def make_whole(self) -> None:
        if not self._is_whole:
            self._is_whole = True
            for weight in self._weights:
                weight.fill()

    def free(self) -> None:
        if self._is_whole:
            self._is_whole = False
            for weight in self._weights:
                weight.free()

    def open_gradients(self) -> None:
        raise AssertionError("frozen weights have no gradients")

    def reduce(self) -> Reduction:
        raise AssertionError("frozen weights have no gradients")


class FrozenBase:
    """The frozen matrices of the layers of `chunk`, a HiddenStatesGPT.  They have no values yet.

    layers: the layers of the chunk in the order of its forward pass, whose weights have no memory
    weights: these matrices
    """

    def __init__(self, chunk: Any, layers: Sequence[torch.nn.Module]) -> None:
        self.weights: list[StoredWeight] = []
        frozen = {id(param): param for param in matrices(chunk)}
        of_experts = self._hold_experts(chunk, frozen)
        units = []
        for layer in layers:
            params = [param for param in layer.parameters() if id(param) in frozen and id(param) not in of_experts]
            weights = [StoredWeight(param) for param in params]
            self.weights += weights
            units.append(FrozenLayer(layer, weights))
            for other in layer.parameters():  # the layer freed them when it was built
                if id(other) not in frozen and other.untyped_storage().nbytes() == 0:
                    other.untyped_storage().resize_(other.numel() * other.element_size())
                    other.data.fill_(torch.nan)  # until the weights are loaded or drawn
        self._by_storage = {weight.param.untyped_storage()._cdata: weight for weight in self.weights}
        self._passes = UnitPasses(units, overlap=False)
        chunk.register_forward_pre_hook(lambda *_: self._passes.begin_forward())
        chunk.register_forward_hook(lambda module, args, output: self._passes.end_forward(output))

    def _hold_experts(self, chunk: Any, frozen: dict[int, torch.nn.Parameter]) -> set[int]:
        """Let the experts of the chunk compute with stored weights.  Returns the ids of these weights."""
        own: set[int] = set()
        for module in chunk.modules():
            if isinstance(module, EachExpert):
                params = module.experts_weights
                assert all(id(param) in frozen for param in params)
                weights = [StoredWeight(param) for param in params]
                module.stored = weights
                self.weights += weights
                own.update(map(id, params))
        return own

    def weight_of(self, tensor: Tensor) -> StoredWeight | None:
        """The weight of which `tensor` is a view; None: the tensor has memory all the time."""
        weight = self._by_storage.get(tensor.untyped_storage()._cdata)
        return weight if weight is not None and weight.is_held else None


def matrices(chunk: Any) -> Iterator[torch.nn.Parameter]:
    """The frozen weights of linear layers and of experts of `chunk`.  Routers are not among them."""
    for leaf in nested_values(chunk.sharded_state_dict()):
        if isinstance(leaf, ShardedTensor | ShardedTensorFactory) and isinstance(leaf.data, torch.nn.Parameter):
            if is_of_layer(leaf.key) and weight_of(leaf.key).is_linear and not leaf.data.requires_grad:
                yield leaf.data


def frozen_weight(chunks: Iterable[Any], tensor: Tensor) -> StoredWeight | None:
    """The weight, held in low bits by one of these wrapped chunks, of which `tensor` is a view; None: there is none."""
    for chunk in chunks:
        base: FrozenBase | None = chunk.module.frozen_base
        if base is not None and (weight := base.weight_of(tensor)) is not None:
            return weight
    return None
