"""The weight matrices of a model's layers, and what of them a run trains.  Independent of layout and length."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from sft.config import ModelConfig
from sft.config.model import LayerKind
from sft.layers.adapters import EMBEDDING, HEAD, AdaptedWeight, Trained, Weight
from sft.layers.kinds import of_kind

# Parts of latent attention: products that every rank of tp computes, and the one that makes keys of latents.
DUPLICATED, EXPANDED = "latent attention, duplicated", "latent attention, keys and values"


class Matrix(NamedTuple):
    """A weight of a layer, [rows, columns].  splits: what tp splits; key: its name in checkpoints"""

    part: str
    rows: int
    columns: int
    splits: str
    key: str


def matrices(model: ModelConfig, kind: LayerKind) -> list[Matrix]:
    """The weight matrices of a layer of this kind, experts once."""
    hidden, moe = model.hidden_size, model.moe
    listed = []
    if kind == "linear attention":
        linear = model.linear_attention
        keys, values, heads = linear.key_width, linear.value_width, linear.num_value_heads or 0
        rows = 2 * keys + 2 * values + 2 * heads
        listed += [
            Matrix("linear attention", rows, hidden, "rows", "self_attention.in_proj."),
            Matrix("linear attention", hidden, values, "columns", "self_attention.out_proj."),
        ]
    elif model.latent_attention.is_used:
        listed += _latent_attention(model)
    else:
        queries = model.num_attention_heads * model.resolved_head_dim
        pairs = model.full_attention.num_kv_projections * model.resolved_query_groups * model.resolved_head_dim
        rows = queries * (2 if model.attention_output_gate else 1) + pairs
        listed += [
            Matrix("attention", rows, hidden, "rows", "self_attention.linear_qkv."),
            Matrix("attention", hidden, queries, "columns", "self_attention.linear_proj."),
        ]
    if moe.num_experts is None:
        return [*listed, *_mlp("mlp", hidden, model.ffn_hidden_size, "mlp.linear_")]
    listed += [Matrix("router", moe.num_experts, hidden, "", "mlp.router.")]
    listed += _mlp("experts", hidden, model.resolved_expert_ffn, "experts.experts.linear_")
    if moe.shared_ffn_hidden_size is not None:
        listed += _mlp("shared", hidden, moe.shared_ffn_hidden_size, "shared_experts.linear_")
    if moe.shared_gate:
        listed += [Matrix("shared gate", 1, hidden, "", "shared_experts.gate_")]
    return listed


def _latent_attention(model: ModelConfig) -> list[Matrix]:
    hidden, heads, latent, ours = model.hidden_size, model.num_attention_heads, model.latent_attention, "self_attention"
    queries, rank = heads * latent.qk_head_dim, latent.q_lora_rank
    width = latent.qk_nope_head_dim + latent.v_head_dim
    of_queries = [Matrix("attention", queries, hidden, "rows", f"{ours}.linear_q_proj.")]
    if rank is not None:
        of_queries = [
            Matrix(DUPLICATED, rank, hidden, "", f"{ours}.linear_q_down_proj."),
            Matrix("attention", queries, rank, "rows", f"{ours}.linear_q_up_proj."),
        ]
    return [
        *of_queries,
        Matrix(DUPLICATED, latent.compressed_width, hidden, "", f"{ours}.linear_kv_down_proj."),
        Matrix(EXPANDED, heads * width, latent.kv_lora_rank or 0, "rows", f"{ours}.linear_kv_up_proj."),
        Matrix("attention", hidden, heads * latent.v_head_dim, "columns", f"{ours}.linear_proj."),
    ]


def _mlp(part: str, hidden: int, ffn: int, key: str) -> list[Matrix]:
    return [
        Matrix(part, 2 * ffn, hidden, "rows", f"{key}fc1."),
        Matrix(part, hidden, ffn, "columns", f"{key}fc2."),
    ]


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
        layers: dict[tuple[LayerKind, bool], list[int]] = {}
        for number in range(model.num_layers):
            layers.setdefault((model.kind_of(number + 1), model.has_experts(number + 1)), []).append(number)
        of_kinds = [
            (matrix, numbers)
            for (kind, has_experts), numbers in layers.items()
            for own in [of_kind(model, kind)]
            for matrix in matrices(own if has_experts else own.without_experts, kind)
        ]
        if trained.whole is None:
            return ModelProducts(weights=tuple(LayerWeights(matrix, len(numbers)) for matrix, numbers in of_kinds))
        table = EMBEDDING if model.tie_embeddings else HEAD
        lowest = min(_orders(trained), default=(model.num_layers, 0))
        return ModelProducts(
            weights=tuple(_of_matrix(model, *of_kind, trained, rank, lowest) for of_kind in of_kinds),
            trains_head=any(weight.key == table for weight in trained.whole),
            rank=rank,
        )


def _of_matrix(
    model: ModelConfig, matrix: Matrix, layers: list[int], trained: Trained, rank: int, lowest: tuple[int, int]
) -> LayerWeights:
    copies = (model.moe.num_experts or 1) if matrix.part == "experts" else 1
    numbers, order = len(layers), _order_of(matrix.key)
    half = _LAST_OF_ATTENTION if "attention" in matrix.part else _LAST
    adapted = [w for w in trained.adapted if matrix.key in f"{w.module}." and w.layer in layers]
    return LayerWeights(
        matrix=matrix,
        num_layers=numbers,
        trained=_num_trained(matrix, layers, trained.whole or ()) / (numbers * copies * matrix.rows * matrix.columns),
        reached=sum((layer, order) > lowest for layer in layers) / numbers,
        revisited=sum((layer, half) >= lowest for layer in layers) / numbers,
        factor_a=sum(rank * weight.num_columns * len(weight.adapters) for weight in adapted) / numbers,
        factor_b=sum(rank * _rows(weight) for weight in adapted) / numbers,
    )


def _num_trained(matrix: Matrix, layers: list[int], whole: Iterable[Weight]) -> int:
    own = (weight for weight in whole if matrix.key in weight.key and len(weight.shape) > 1)
    return sum(weight.size for weight in own if weight.layer in layers)


def _rows(weight: AdaptedWeight) -> int:
    return sum(map(weight.rows_of, weight.adapters))


# The order in which a layer uses its weights, by parts of their names; the first that fits counts.
_ORDER = (
    *(
        ("fc1.layer_norm_weight", 4),
        ("layer_norm_weight", 0),
        ("input_layernorm", 0),
        ("linear_qkv", 1),
        ("down_proj", 1),
        ("linear_q_proj", 1),
        ("in_proj", 1),
        ("linear_proj", 3),
    ),
    *(("out_proj", 3), ("self_attention", 2), ("post_self_attn", 4), ("pre_mlp", 4), ("fc2", 6), ("post_mlp", 7)),
)
_OF_MLP, _LAST_OF_ATTENTION, _LAST = 5, 3, 7


def _order_of(name: str) -> int:
    return next((order for part, order in _ORDER if part in name), _OF_MLP)


def _orders(trained: Trained) -> Iterable[tuple[int, int]]:
    """Layer and order of all weights that get a gradient; the embedding is before the first layer."""
    for weight in trained.whole or ():
        if weight.layer is not None:
            yield weight.layer, _order_of(weight.key)
        elif weight.key == EMBEDDING:
            yield -1, 0
    for adapted in trained.adapted:
        yield adapted.layer, _order_of(adapted.module)
