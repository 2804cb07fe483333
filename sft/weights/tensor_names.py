"""Selects Hugging Face tensors of a model by names and patterns, for train.freeze and optim.groups.

A pattern is that of lora.targets: a name, the end of a name, or a pattern of one of these.  The name of a module, such
as `embed_tokens` or `q_proj`, selects its weight and its bias.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from sft.config import ModelConfig
from sft.errors import ConfigError
from sft.hf.family import Family, TensorMapping
from sft.weights.lora.targets import is_match, nearest


@dataclass(frozen=True)
class NamedWeight:
    """One of our weights, and what it consists of in files and in checkpoints.

    parameter  "decoder.layers.self_attention.linear_qkv.weight"
    names      the names of its Hugging Face tensors, for example q, k and v
    keys       key and index of its tensors in a checkpoint
    is_vector  whether it has one axis
    """

    parameter: str
    names: Sequence[str]
    keys: Sequence[tuple[str, tuple[int, ...]]]
    is_vector: bool


def units(mappings: Iterable[TensorMapping]) -> list[NamedWeight]:
    """Our weights.  mappings: the family's mappings for the model"""
    by_weight: dict[tuple[str, tuple[int, ...]], list[TensorMapping]] = {}
    for mapping in mappings:
        if not mapping.is_buffer:
            by_weight.setdefault((mapping.parameter, mapping.stack_index), []).append(mapping)
    return [
        NamedWeight(
            parameter=parameter,
            names=list(dict.fromkeys(name for mapping in listed for name in names_of(mapping))),
            keys=list(dict.fromkeys((mapping.key, mapping.stack_index) for mapping in listed)),
            is_vector=not listed[0].row_shape,
        )
        for (parameter, _), listed in by_weight.items()
    ]


def names_of(mapping: TensorMapping) -> list[str]:
    """The names of the Hugging Face tensors of which our weight consists, for example q, k and v for linear_qkv."""
    return list(dict.fromkeys(view.name for view in mapping.sources))


def stem(name: str) -> str:
    """The module of a tensor: model.norm.weight -> model.norm.  Names without .weight or .bias stay as they are."""
    return name.removesuffix(".weight").removesuffix(".bias")


def selected(key: str, pattern: str, names: Sequence[str], family: Family, model: ModelConfig) -> list[str]:
    """The names that a pattern selects.  Raises ConfigError if there are none.  key: the key that has the pattern"""
    if matches := [name for name in names if is_match(pattern, name) or is_match(pattern, stem(name))]:
        return matches
    if model.tie_embeddings and is_match(pattern, stem(family.head)):
        raise ConfigError(
            f"{key} names {pattern!r}, but the output weight of this model is its embedding (model.tie_embeddings).  "
            f"{stem(family.embedding)} means both."
        )
    leaves = sorted({stem(name).rpartition(".")[2] for name in names})
    raise ConfigError(
        f"{key} names {pattern!r}, which matches no tensor of this model.{nearest(pattern, leaves)}  The model "
        f"has {', '.join(leaves)}, for example {names[-1]}."
    )


def check_whole(key: str, unit: NamedWeight, chosen: Collection[str], rule: str) -> None:
    """Raise ConfigError if only some of the tensors of which our weight consists are chosen.

    rule: what holds for the weight as a whole
    """
    inside = [name for name in unit.names if name in chosen]
    if not inside or len(inside) == len(unit.names):
        return
    outside = [name for name in unit.names if name not in chosen]
    raise ConfigError(
        f"{key} names {', '.join(inside)}, but not {', '.join(outside)}.  These are rows of one weight here, "
        f"{unit.parameter.removeprefix('decoder.layers.')}, which {rule}.  Name all of "
        f"{', '.join(stem(name).rpartition('.')[2] for name in unit.names)}, or none of them."
    )
