"""Selects the weights that LoRA adapts, by the names that Hugging Face gives the Linears of a model.

    q_proj                 every Linear of this name
    self_attn.q_proj       the end of a name
    layers.0.*_proj        a pattern: * stands for any characters, ? for one, [..] for one of several
    all-linear             every Linear of the layers except those of experts, which are not nn.Linear in transformers

Every Linear gets its own adapter, even if our model stores several Linears as one weight.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from sft.config import Config, ModelConfig
from sft.config.lora import ALL_LINEAR, LoraConfig
from sft.errors import ConfigError
from sft.hf.family import Family, TensorMapping
from sft.hf.model_family import model_family
from sft.hf.tensor_view import HfView
from sft.layers.adapters import AdaptedWeight, Adapter, names_of
from sft.layers.weights import is_of_layer, weight_of
from sft.weights.lora.parameters import STACKED, kind_of_stack, selected
from sft.weights.lora.peft.targets import is_refused, lost_by_peft

_WEIGHT = ".weight"
_LAYERS = "decoder.layers."
_ROUTER = "router.proj.weight"  # the router of Gemma 4, which is a Linear in transformers
_WILD = set("*?[")


def adapted_weights(config: Config, mappings: Iterable[TensorMapping]) -> list[AdaptedWeight]:
    """The weights to which a recipe with LoRA gives adapters.  mappings: those of all tensors of the model

    Raises ConfigError if a target matches nothing, or if checkpoint.export_hf would write adapters that PEFT does not
    read correctly.
    """
    weights = select(config.lora, config.model, mappings)
    names = [name for weight in weights for name in weight.linears()]
    lost = lost_by_peft(names, rslora=config.lora.rslora)
    if lost is not None and config.checkpoint.export_hf != "none" and config.lora.export == "adapter":
        raise ConfigError(
            f"checkpoint.export_hf = {config.checkpoint.export_hf} would write a PEFT folder, but {lost}.  "
            "lora.export=merged writes whole models."
        )
    return weights


def select(lora: LoraConfig, model: ModelConfig, mappings: Iterable[TensorMapping]) -> list[AdaptedWeight]:
    """The weights with adapters, in the order of the layers.  mappings: those of all tensors of the model

    Raises ConfigError if a target matches nothing, or matches a Linear that cannot have an adapter.
    """
    mappings = list(mappings)
    linears = _of_linears(mappings)
    kinds = _kinds(linears)
    chosen = _chosen(lora, kinds)
    if refused := [name for name, kind in kinds.items() if name in chosen and kind not in ("linear", "expert")]:
        kind, way = kinds[refused[0]], "To train without an adapter for it, add it to lora.exclude"
        if kind == STACKED:
            kind = "the files of this model hold all experts of a layer in one tensor, which is no Linear"
            way = "lora.target_parameters adapts it, for example [experts.gate_up_proj, experts.down_proj]"
        raise ConfigError(f"LoRA cannot adapt {refused[0]}: {kind}.  {way}.")
    parameters = selected(lora, model, mappings)
    chosen |= parameters.keys()
    adaptable = {id(mapping) for mapping in (*linears, *parameters.values())}
    by_parameter: dict[tuple[str, int | None], list[TensorMapping]] = {}
    for mapping in mappings:
        if id(mapping) in adaptable and not mapping.expert:  # one expert stands for all
            by_parameter.setdefault((mapping.parameter, mapping.layer), []).append(mapping)
    weights = (_adapted(of_parameter, model, chosen) for of_parameter in by_parameter.values())
    return [weight for weight in weights if weight.adapters]


def kinds_of(family: Family, model: ModelConfig) -> dict[str, str]:
    """Every Linear by name -> "linear", "expert", `STACKED`, or the reason why the Linear cannot have an adapter."""
    return _kinds(_of_linears(family.mappings(model, 0)))


def not_adaptable(model: ModelConfig) -> list[str]:
    """The value of lora.exclude with which lora.targets = all-linear works: Linears without adapters here or in PEFT.

    Qwen3.6-35B-A3B -> ["shared_expert_gate"]        Nemotron 3 -> ["out_proj"]
    Raises ConfigError if no family has the tensors of the model.
    """
    family = model_family(model)
    if family is None:
        raise ConfigError(
            "lora.targets names Linears of a Hugging Face model, but no table has the tensors of `model`."
        )
    kinds = kinds_of(family, model)
    selected = _matches(ALL_LINEAR, kinds, "lora.targets")
    refused = [name for name in selected if kinds[name] != "linear" or is_refused(name)]
    return sorted({name.rpartition(".")[2] for name in refused})


def _of_linears(mappings: Iterable[TensorMapping]) -> list[TensorMapping]:
    """The mappings of weights of linear layers, including experts and the router of Gemma 4."""
    return [
        mapping
        for mapping in mappings
        if (is_of_layer(mapping.parameter) and weight_of(mapping.parameter).is_linear)
        or mapping.sources[0].name.endswith(_ROUTER)
    ]


def _kinds(mappings: Iterable[TensorMapping]) -> dict[str, str]:
    """The result of `kinds_of`.  mappings: those of linear layers"""
    return {name: _kind(mapping) for mapping in mappings for name in _linears(mapping.sources)}


def _kind(mapping: TensorMapping) -> str:
    """The kind of a Linear, as `kinds_of` defines it."""
    if weight_of(mapping.parameter).part == "shared gate":
        return "megatron-core multiplies with this weight outside of a linear layer"
    if mapping.expert is not None:
        return kind_of_stack(mapping) or "expert"
    return "linear"


def _linears(sources: Iterable[HfView]) -> dict[str, tuple[int, ...]]:
    """The Linears of which a weight consists: name -> indexes of the Linear's views in `sources`."""
    parts: dict[str, tuple[int, ...]] = {}
    for part, view in enumerate(sources):
        name = view.name.removesuffix(_WEIGHT)
        parts[name] = (*parts.get(name, ()), part)
    return parts


def _chosen(lora: LoraConfig, kinds: Mapping[str, str]) -> set[str]:
    """The names of the Linears that the recipe selects.  kinds: the kind of every Linear, by name"""
    chosen = {name for target in lora.targets for name in _matches(target, kinds, "lora.targets")}
    excluded = {name for target in lora.exclude for name in _matches(target, kinds, "lora.exclude")}
    if lora.targets and not chosen - excluded:
        raise ConfigError("lora.exclude excludes everything that lora.targets names, so that nothing would be trained.")
    return chosen - excluded


def _matches(target: str, kinds: Mapping[str, str], key: str) -> list[str]:
    """The names that a target selects.  Raises ConfigError if there are none.  key: the recipe's key, for errors"""
    if target == ALL_LINEAR:
        return [name for name, kind in kinds.items() if "expert" not in kind]
    names = list(kinds)
    if matches := [name for name in names if is_match(target, name)]:
        return matches
    leaves = sorted({name.rpartition(".")[2] for name in names})
    raise ConfigError(
        f"{key} names {target!r}, which matches no Linear of this model.{nearest(target, leaves)}  The model has "
        f"{', '.join(leaves)} in its layers, for example {names[0]}."
    )


def nearest(target: str, leaves: Iterable[str]) -> str:
    """A sentence that names up to two of `leaves`, the last parts of names, that resemble the target; "" if none do."""
    near = difflib.get_close_matches(target.rpartition(".")[2], list(leaves), n=2, cutoff=0.5)
    return f"  Nearest: {', '.join(near)}." if near else ""


def is_match(target: str, name: str) -> bool:
    """Whether the target is the Linear `name`, or the end of its name, or a pattern of one of these."""
    if _WILD.isdisjoint(target):
        return name == target or name.endswith(f".{target}")
    return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def _adapted(mappings: Sequence[TensorMapping], model: ModelConfig, chosen: Collection[str]) -> AdaptedWeight:
    """The weight of `mappings`, with an adapter for each of its Linears in `chosen`.

    mappings: all mappings of one weight, in the order of its rows; for experts, those of a layer's first expert
    """
    mapping, sources = mappings[0], [view for mapping in mappings for view in mapping.sources]
    num_experts = 0 if mapping.expert is None else model.moe.num_experts or 0
    assert mapping.layer is not None
    adapters = (_adapter(name, sources, parts) for name, parts in _linears(sources).items())
    return AdaptedWeight(
        module=mapping.parameter.removeprefix(_LAYERS).removeprefix(f"{mapping.layer}.").removesuffix(_WEIGHT),
        layer=mapping.layer,
        num_experts=num_experts,
        part_rows=tuple(view.num_rows for view in sources),
        num_columns=mapping.row_shape[0],
        num_groups=mapping.num_groups if mapping.form == "groups" else 1,
        adapters=tuple(adapter for adapter in adapters if _is_chosen(adapter.name, num_experts, chosen)),
    )


def _adapter(name: str, sources: Sequence[HfView], parts: tuple[int, ...]) -> Adapter:
    """The adapter of the Linear `name`.  The first expert's Linear stands for those of all experts.

    parts: indexes of the Linear's views in `sources`
    """
    view = sources[parts[0]]
    if view.index:
        return Adapter(name=f"{view.name}.*", parts=parts)
    return Adapter(name=name.replace(".experts.0.", ".experts.*."), parts=parts, num_blocks=view.num_blocks)


def _is_chosen(name: str, num_experts: int, chosen: Collection[str]) -> bool:
    """Whether `chosen` has the Linear `name`.  A name with * for the expert stands for the Linears of all experts.

    Raises ConfigError if only some experts of the layer are chosen.
    """
    if name in chosen:  # the tensor of all experts
        return True
    linears = names_of(name, range(num_experts))
    adapted = [linear for linear in linears if linear in chosen]
    if adapted and len(adapted) < len(linears):
        other = next(linear for linear in linears if linear not in chosen)
        raise ConfigError(
            f"lora.targets and lora.exclude give {adapted[0]} an adapter, but not {other}.  The adapters of a layer's "
            f"experts are stored, and exported, together: name all experts, for example with "
            f"experts.*.{name.rpartition('.')[2]}."
        )
    return bool(adapted)
