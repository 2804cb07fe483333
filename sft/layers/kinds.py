"""The kinds of a model's layers: which heads, window and positions attention has in each, and which have experts.

A layer is what mixes tokens (`LayerKind`), and an MLP or experts.  `layer_groups` lists the combinations of a model.
`of_kind` is the one table of sizes by kind.  It answers with a model whose layers are all of one kind, so that code
about one layer reads `head_dim` and `num_query_groups` as it does of any other model.
"""

from typing import NamedTuple

from sft.config.full_attention import FullAttentionConfig
from sft.config.model import LayerKind, ModelConfig

SOFTMAX: tuple[LayerKind, ...] = ("full attention", "window attention")  # kinds whose layers have keys and values


def of_kind(model: ModelConfig, kind: LayerKind) -> ModelConfig:
    """The model whose layers all have the heads, the window and the positions of this kind of layer.

    The model itself, unless `full_attention` makes a difference.
    """
    full = model.full_attention
    if not full.is_used:
        return model
    changes: dict[str, object] = {"sliding_window_layers": None}
    if kind == "window attention":
        changes |= {"full_attention": FullAttentionConfig(), "rope": model.rope.of_windows or model.rope}
    else:
        changes |= {
            "sliding_window": None,
            "head_dim": full.head_dim or model.head_dim,
            "num_query_groups": full.num_query_groups or model.num_query_groups,
            "full_attention": FullAttentionConfig(keys_as_values=full.keys_as_values),
            "rope": model.rope.model_copy(update={"window_base": None}),
        }
    return model.model_copy(update=changes)


def of_layer(model: ModelConfig, layer_number: int) -> ModelConfig:
    """`of_kind` of a layer, counted from 1."""
    return of_kind(model, model.kind_of(layer_number))


def numbers_of(model: ModelConfig, kind: LayerKind) -> list[int]:
    """The numbers of the layers of this kind, from 1."""
    return [number for number in range(1, 1 + model.num_layers) if model.kind_of(number) == kind]


def attention_widths(model: ModelConfig) -> dict[LayerKind, float]:
    """The sum of `attention_width` over the layers of each kind with a softmax."""
    return {kind: len(numbers_of(model, kind)) * of_kind(model, kind).attention_width for kind in SOFTMAX}


class LayerGroup(NamedTuple):
    """The layers of a model that are alike.

    model    a model whose layers are all like these
    numbers  of the layers, from 1
    """

    kind: LayerKind
    model: ModelConfig
    numbers: tuple[int, ...]


def layer_groups(model: ModelConfig) -> list[LayerGroup]:
    """The groups of a model, in the order of their first layers.

    Groups whose layers differ in nothing but the window have the same `model`, unless `full_attention` is used.
    """
    numbers: dict[tuple[LayerKind, bool], list[int]] = {}
    for number in range(1, model.num_layers + 1):
        numbers.setdefault((model.kind_of(number), model.has_experts(number)), []).append(number)
    dense = model.without_experts if model.moe.num_experts is not None else model
    return [
        LayerGroup(kind, of_kind(model if has_experts else dense, kind), tuple(of_group))
        for (kind, has_experts), of_group in numbers.items()
    ]
