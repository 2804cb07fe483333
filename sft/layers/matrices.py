"""The weight matrices of a model's layers, and the share of each that a run trains.  They do not depend on a layout."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from sft.config import ModelConfig
from sft.layers.adapters import EMBEDDING, HEAD, AdaptedWeight, Trained, Weight
from sft.layers.kinds import LayerGroup, layer_groups
from sft.layers.unread import Unread
from sft.layers.weight import LAST, LAST_OF_ATTENTION, Split
from sft.layers.weights import sizes_of, weight_of


class Matrix(NamedTuple):
    """A matrix of a layer, [rows, columns]; for experts, the matrix of one expert.

    key     the beginning of the matrix' name in checkpoints; `weight.LayerWeight` explains the other fields
    unread  when recomputation leaves out its product
    """

    part: str
    rows: int
    columns: int
    split: Split
    key: str
    step: int
    unread: Unread


def matrices(layers: LayerGroup) -> list[Matrix]:
    """The matrices that multiply tokens in one of these layers.  One entry describes the matrix of every expert."""
    sizes, listed = sizes_of(layers.model), []
    for weight in layers.weights:
        if weight.role == "matrix":
            rows, columns = weight.sizes(sizes)
            key = weight.key.removesuffix("weight")
            unread = Unread.of(layers.model, weight, has_mlp=bool(layers.mlp.weights))
            listed.append(Matrix(weight.part, rows, columns, weight.split, key, weight.step, unread))
    return listed


class LayerWeights(NamedTuple):
    """One matrix in all layers of one kind; for experts, the matrix of one expert of each layer.

    trained    share of the matrix' own parameters that the optimizer updates
    reached    share of the layers in which backward needs the gradient of the matrix' input
    revisited  share of the layers that backward enters; train.recompute computes these layers again
    factor_a, factor_b  parameters in the factors A and B of the matrix' adapters, on average per layer
    """

    matrix: Matrix
    num_layers: int
    trained: float = 1.0
    reached: float = 1.0
    revisited: float = 1.0
    factor_a: float = 0.0
    factor_b: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelProducts:
    """The matrices of a model.  They depend on no layout and no length, so one object serves a whole search.

    trains_head  whether the output weight is trained
    rank         rank of the adapters; 0: no adapters
    """

    weights: tuple[LayerWeights, ...]
    trains_head: bool = True
    rank: int = 0

    @staticmethod
    def of(model: ModelConfig, trained: Trained = Trained(), rank: int = 0) -> "ModelProducts":
        """The matrices of a model.  trained: its trained part; rank: rank of its adapters"""
        kinds = [
            (matrix, [number - 1 for number in group.numbers])
            for group in layer_groups(model)
            for matrix in matrices(group)
        ]
        if trained.whole is None:
            return ModelProducts(weights=tuple(LayerWeights(matrix, len(numbers)) for matrix, numbers in kinds))
        table = EMBEDDING if model.tie_embeddings else HEAD
        lowest = min(_steps(trained), default=(model.num_layers, 0))
        return ModelProducts(
            weights=tuple(
                _layer_weights(model, *matrix_and_layers, trained, rank, lowest) for matrix_and_layers in kinds
            ),
            trains_head=any(weight.key == table for weight in trained.whole),
            rank=rank,
        )


def _layer_weights(
    model: ModelConfig, matrix: Matrix, layers: list[int], trained: Trained, rank: int, lowest: tuple[int, int]
) -> LayerWeights:
    copies = (model.moe.num_experts or 1) if matrix.part == "experts" else 1
    numbers = len(layers)
    half = LAST_OF_ATTENTION if matrix.step <= LAST_OF_ATTENTION else LAST
    adapted = [w for w in trained.adapted if matrix.key in f"{w.module}." and w.layer in layers]
    return LayerWeights(
        matrix=matrix,
        num_layers=numbers,
        trained=_num_trained(matrix, layers, trained.whole or ()) / (numbers * copies * matrix.rows * matrix.columns),
        reached=sum((layer, matrix.step) > lowest for layer in layers) / numbers,
        revisited=sum((layer, half) >= lowest for layer in layers) / numbers,
        factor_a=sum(rank * weight.num_columns * len(weight.adapters) for weight in adapted) / numbers,
        factor_b=sum(rank * _rows(weight) for weight in adapted) / numbers,
    )


def _num_trained(matrix: Matrix, layers: list[int], whole: Iterable[Weight]) -> int:
    own = (weight for weight in whole if matrix.key in weight.key and len(weight.shape) > 1)
    return sum(weight.size for weight in own if weight.layer in layers)


def _rows(weight: AdaptedWeight) -> int:
    return sum(map(weight.rows_of, weight.adapters))


def _steps(trained: Trained) -> Iterable[tuple[int, int]]:
    """Layer and step of each weight that gets a gradient.  The embedding has layer -1, before the first layer."""
    for weight in trained.whole or ():
        if weight.layer is not None:
            yield weight.layer, weight_of(weight.key).step
        elif weight.key == EMBEDDING:
            yield -1, 0
    for adapted in trained.adapted:
        yield adapted.layer, weight_of(f"{adapted.module}.weight").step
