"""The weight matrices of a model's layers, and what of them a run trains.  Independent of layout and length."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from sft.config import ModelConfig
from sft.layers.adapters import EMBEDDING, HEAD, AdaptedWeight, Trained, Weight
from sft.layers.kinds import LayerGroup, layer_groups
from sft.layers.weight import LAST, LAST_OF_ATTENTION, Split
from sft.layers.weights import sizes_of, weight_of, weights_of


class Matrix(NamedTuple):
    """A matrix of a layer, [rows, columns], of one expert.  key: the first part of its name in checkpoints

    The other fields are those of `weight.LayerWeight`.
    """

    part: str
    rows: int
    columns: int
    split: Split
    key: str
    step: int


def matrices(layers: LayerGroup) -> list[Matrix]:
    """The matrices with which one of these layers multiplies tokens, experts once."""
    sizes, listed = sizes_of(layers.model), []
    for weight in weights_of(layers):
        if weight.role == "matrix":
            rows, columns = weight.sizes(sizes)
            key = weight.key.removesuffix("weight")
            listed.append(Matrix(weight.part, rows, columns, weight.split, key, weight.step))
    return listed


class LayerWeights(NamedTuple):
    """A matrix of all layers of one kind, or of one expert of each of these layers.

    trained    share of its numbers that is trained itself
    reached    share of the layers in which backward needs the gradient of the matrix' input
    revisited  share of the layers that backward enters, and computes again with train.recompute
    factor_a, factor_b  numbers in the factors of its adapters, mean of a layer
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
    """What the products of a model depend on besides layout and length.  Make it once for many layouts.

    rank: of adapters; trains_head: whether the output weight is trained
    """

    weights: tuple[LayerWeights, ...]
    trains_head: bool = True
    rank: int = 0

    @staticmethod
    def of(model: ModelConfig, trained: Trained = Trained(), rank: int = 0) -> "ModelProducts":
        """trained: what of the model; rank: of its adapters"""
        of_kinds = [
            (matrix, [number - 1 for number in group.numbers])
            for group in layer_groups(model)
            for matrix in matrices(group)
        ]
        if trained.whole is None:
            return ModelProducts(weights=tuple(LayerWeights(matrix, len(numbers)) for matrix, numbers in of_kinds))
        table = EMBEDDING if model.tie_embeddings else HEAD
        lowest = min(_steps(trained), default=(model.num_layers, 0))
        return ModelProducts(
            weights=tuple(_of_matrix(model, *of_kind, trained, rank, lowest) for of_kind in of_kinds),
            trains_head=any(weight.key == table for weight in trained.whole),
            rank=rank,
        )


def _of_matrix(
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
    """Layer and step of all weights that get a gradient; the embedding is before the first layer."""
    for weight in trained.whole or ():
        if weight.layer is not None:
            yield weight.layer, weight_of(weight.key).step
        elif weight.key == EMBEDDING:
            yield -1, 0
    for adapted in trained.adapted:
        yield adapted.layer, weight_of(f"{adapted.module}.weight").step
