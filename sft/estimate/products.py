"""The matrix products of a rank in one microbatch: their sizes, and how often each runs.  Arithmetic only.

`step_time.py` makes seconds of this list.  Attention is no product of this list, and neither is the state of linear
attention.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from sft.adapters import EMBEDDING, HEAD, Trained
from sft.config import Config, ModelConfig
from sft.config.model import LayerKind
from sft.parallel.layout import Layout, padded_vocab_size


class Product(NamedTuple):
    """[rows, inner] x [inner, columns], `copies` times; also backward, where two products have the same FLOPs.

    part      "attention", "linear attention", "mlp", "shared", "experts" (whose products are grouped), "router", "head"
    forward   runs forward, in each of which a token counts once; 1 without recompute
    repeated  runs of recompute
    inputs    runs for the gradient of the input
    weights   runs for the gradient of the weight; a share, if only some layers train it
    """

    part: str
    rows: float
    columns: float
    inner: float
    copies: float = 1.0
    forward: float = 1.0
    repeated: float = 0.0
    inputs: float = 1.0
    weights: float = 1.0

    @property
    def flops(self) -> float:
        """Of one run.  [2, 3] x [3, 4] -> 48"""
        return 2.0 * self.rows * self.columns * self.inner * self.copies

    @property
    def num_runs(self) -> float:
        return self.forward + self.repeated + self.inputs + self.weights

    @property
    def smallest(self) -> float:
        """The smallest of its three sizes, which decides how fast the product runs."""
        return min(self.rows, self.columns, self.inner)


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
    else:
        queries = model.num_attention_heads * model.resolved_head_dim
        pairs = 2 * model.resolved_query_groups * model.resolved_head_dim
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


def _mlp(part: str, hidden: int, ffn: int, key: str) -> list[Matrix]:
    return [
        Matrix(part, 2 * ffn, hidden, "rows", f"{key}fc1."),
        Matrix(part, hidden, ffn, "columns", f"{key}fc2."),
    ]


@dataclass(frozen=True, kw_only=True)
class ModelProducts:
    """What the products of a model depend on besides layout and length.  Make it once for many layouts.

    kinds     the matrices of each kind of layer, and the number of such layers
    weights   by key of a matrix, the share of its numbers that is trained itself
    factors   numbers in the adapters of all layers, by key and by what tp splits of them: "whole", "split"
    head      whether the output weight is trained
    """

    model: ModelConfig
    kinds: tuple[tuple[LayerKind, tuple[Matrix, ...], int], ...]
    weights: dict[str, float] = field(default_factory=dict)
    factors: dict[str, tuple[float, float]] = field(default_factory=dict)
    trains_head: bool = True
    rank: int = 0

    @staticmethod
    def of(model: ModelConfig, trained: Trained = Trained(), rank: int = 0) -> "ModelProducts":
        """trained: what of the model; rank: of its adapters"""
        names = [model.kind_of(number + 1) for number in range(model.num_layers)]
        kinds = tuple((kind, tuple(matrices(model, kind)), names.count(kind)) for kind in dict.fromkeys(names))
        if trained.whole is None:
            return ModelProducts(model=model, kinds=kinds)
        weights: dict[str, float] = {}
        for weight in trained.whole:
            if weight.layer is not None and len(weight.shape) > 1 and "conv1d" not in weight.key:
                key = _key_of(kinds, weight.key)
                weights[key] = weights.get(key, 0.0) + weight.size
        totals = {
            m.key: m.rows * m.columns * number * _copies(model, m) for _, of_kind, number in kinds for m in of_kind
        }
        factors: dict[str, tuple[float, float]] = {}
        for adapted in trained.adapted:
            key = _key_of(kinds, f"{adapted.module}.")
            experts = max(1, adapted.num_experts)
            split = 2 * (adapted.num_trained(rank) - adapted.num_trained(rank, 2)) / experts
            before = factors.get(key, (0.0, 0.0))
            factors[key] = (before[0] + adapted.num_trained(rank) / experts - split, before[1] + split)
        table = EMBEDDING if model.tie_embeddings else HEAD
        return ModelProducts(
            model=model,
            kinds=kinds,
            weights={key: weights.get(key, 0.0) / total for key, total in totals.items()},
            factors=factors,
            trains_head=any(weight.key == table for weight in trained.whole),
            rank=rank,
        )


def _key_of(kinds: tuple[tuple[LayerKind, tuple[Matrix, ...], int], ...], name: str) -> str:
    for _, of_kind, _ in kinds:
        for matrix in of_kind:
            if matrix.key in name:
                return matrix.key
    return name


def _copies(model: ModelConfig, matrix: Matrix) -> int:
    return (model.moe.num_experts or 1) if matrix.part == "experts" else 1


def layer_products(config: Config, layout: Layout, of_model: ModelProducts, tokens: float) -> list[Product]:
    """The products of all layers of one pipeline stage in one microbatch.  tokens: of a pack on one rank of cp

    `copies` counts layers, with experts also the experts of the rank.
    """
    model, listed = config.model, []
    for _, of_kind, number in of_model.kinds:
        for matrix in of_kind:
            repeated = _repeated(config, matrix.part)
            share = of_model.weights.get(matrix.key, 1.0) if of_model.weights else 1.0
            rows, copies, size = tokens, number / layout.pp, layout.tp
            columns, inner = float(matrix.rows), float(matrix.columns)
            if matrix.part == "experts":
                rows, copies, size = _of_experts(model, layout, tokens, copies)
            elif matrix.part in ("router", "shared gate") and layout.sequence_parallel:
                rows = tokens / layout.tp
            if matrix.splits == "rows":
                columns = columns / size
            elif matrix.splits == "columns":
                inner = inner / size
            listed.append(Product(matrix.part, rows, columns, inner, copies, repeated=repeated, weights=share))
            if matrix.key in of_model.factors:
                whole, split = of_model.factors[matrix.key]
                numbers = (whole + split / size) / layout.pp * (copies * layout.pp / number)
                adapter = Product(matrix.part, rows, numbers / of_model.rank, of_model.rank, repeated=repeated)
                listed.append(adapter)
    return listed


def _of_experts(model: ModelConfig, layout: Layout, tokens: float, layers: float) -> tuple[float, float, int]:
    """Rows of one expert, number of experts of the rank in all layers, and etp.  All experts get as many tokens."""
    num_experts, top_k = model.moe.num_experts or 1, model.moe.top_k or 1
    own = num_experts / layout.ep
    sent = tokens * layout.etp * top_k / (layout.tp if layout.sequence_parallel else 1)
    return sent / own, layers * own, layout.etp


def _repeated(config: Config, part: str) -> float:
    """Forward passes of backward."""
    recompute, is_tiled = config.train.recompute, config.train.mlp_tile is not None
    halves = ("mlp", "experts", "shared", "shared gate", "linear attention")
    repeated = 1.0 if recompute == "full" or (recompute == "selective" and part in halves) else 0.0
    if part == "mlp" and is_tiled:
        return 2.0 if recompute == "full" else 1.0
    return repeated


def head_product(config: Config, layout: Layout, of_model: ModelProducts, vocab_size: int, labels: float) -> Product:
    """The output layer.  labels: supervised tokens of a rank of cp for the fused head, all tokens for the others"""
    return Product(
        "head",
        rows=labels,
        columns=padded_vocab_size(vocab_size, layout.tp) / layout.tp,
        inner=config.model.hidden_size,
        weights=1.0 if of_model.trains_head else 0.0,
    )
