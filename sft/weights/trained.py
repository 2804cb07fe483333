"""Selects what a run trains: all weights, the weights that train.freeze does not name, or LoRA adapters.

Also finds the weights that Muon updates (optim.name = muon), and those of each group of optim.groups.

With LoRA, embedding and output weight can be trained whole beside the adapters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sft.config import Config, ModelConfig
from sft.errors import ConfigError
from sft.hf.families import FAMILIES
from sft.hf.family import Family, TensorMapping
from sft.hf.model_family import model_family
from sft.layers.adapters import EMBEDDING, HEAD, Rows, Trained, Weight
from sft.layers.weights import is_of_layer, weight_of
from sft.weights.lora.targets import adapted_weights
from sft.weights.param_groups import grouped
from sft.weights.tensor_names import check_whole, names_of, selected, units


def trained_weights(config: Config, vocab_size: int) -> Trained:
    """The weights that the recipe trains.

    Raises ConfigError if a name matches nothing, if no family has the tensors of the model, or if the recipe trains a
    block for multi-token prediction that the family does not have.
    """
    lora, model, groups = config.lora, config.model, config.optim.groups
    if model.has_mtp:
        _check_mtp(config)
    has_muon = config.optim.has_muon
    if not lora.is_used and not config.train.freeze and not has_muon and not groups:
        return Trained()
    family = model_family(model)
    if family is None:
        names = "optim.groups names tensors" if groups else "train.freeze names tensors"
        names = "lora.targets names Linears" if lora.is_used else names
        names = "optim.name = muon updates projections" if has_muon else names
        raise ConfigError(f"{names} of a Hugging Face model, but no table has the tensors of `model`.")
    mappings = list(family.mappings(model, vocab_size))
    muon = projections(mappings) if has_muon else {}
    trained = _with_adapters(config, vocab_size, mappings) if lora.is_used else _whole(config, family, mappings)
    return replace(trained, muon=muon, groups=grouped(groups, family, model, mappings, trained))


def _whole(config: Config, family: Family, mappings: Sequence[TensorMapping]) -> Trained:
    """The weights that train.freeze leaves trained."""
    freeze = config.train.freeze
    whole = unfrozen(freeze, family, config.model, mappings) if freeze else None
    _check_added(config, None if whole is None else [weight.key for weight in whole])
    return Trained(whole=whole)


def _with_adapters(config: Config, vocab_size: int, mappings: Sequence[TensorMapping]) -> Trained:
    """The adapters, and the weights that are trained beside them."""
    lora = config.lora
    keys = {EMBEDDING: lora.train_embeddings, HEAD: lora.train_head}
    whole = [_weight(mapping) for mapping in mappings if keys.get(mapping.key)]
    rows = {key: value for key, value in keys.items() if isinstance(value, list)}
    if beyond := sorted({row for numbers in rows.values() for row in numbers if row >= vocab_size}):
        raise ConfigError(
            f"lora.train_embeddings or lora.train_head names the id {beyond[0]:,}, but the model has {vocab_size:,} "
            "rows.  Name ids of the tokenizer, or added for those of data.add_tokens."
        )
    return Trained(adapted=adapted_weights(config, mappings), whole=whole, rows=rows)


def projections(mappings: Iterable[TensorMapping]) -> dict[str, tuple[Rows, ...]]:
    """The weights that Muon updates: for the key of each, the rows of each of its projections.

    These are the matrices of layers that multiply tokens, without routers.  A projection is what a family calls q_proj
    or gate_proj, also if files store several as one tensor.  All layers and experts of a key have the same rows.

    linear_qkv with 4 query heads and 2 key heads of width 1: q ((0, 2), (4, 6)), k ((2, 3), (6, 7)), v ((3, 4), (7, 8))
    """
    rows_of: dict[str, tuple[Rows, ...]] = {}
    for mapping in mappings:
        if mapping.key not in rows_of and is_of_layer(mapping.parameter) and weight_of(mapping.parameter).is_muon:
            rows: list[list[tuple[int, int]]] = [[] for _ in mapping.sources]
            for span in mapping.spans():
                of_source, end = rows[span.source or 0], span.target + span.num_rows
                if of_source and of_source[-1][1] == span.target:
                    of_source[-1] = (of_source[-1][0], end)
                else:
                    of_source.append((span.target, end))
            rows_of[mapping.key] = tuple(map(tuple, rows))
    return rows_of


def _check_added(config: Config, trained: Sequence[str] | None) -> None:
    """Raise ConfigError if train.freeze freezes the rows of data.add_tokens.

    trained: keys of the trained weights; None: all weights are trained
    """
    needed = {EMBEDDING} if config.model.tie_embeddings else {EMBEDDING, HEAD}
    if config.data.new_tokens and trained is not None and (frozen := sorted(needed.difference(trained))):
        raise ConfigError(
            f"train.freeze freezes {' and '.join(frozen)}, so the rows of data.add_tokens would never be trained.  "
            "Do not freeze the embedding and the output weight, or remove data.add_tokens."
        )


def trained_names(config: Config, vocab_size: int) -> set[str]:
    """The names of all weights that the recipe trains.

    A weight that is trained whole has the name of our tensor and its layer: "decoder.layers.mlp.linear_fc1.weight[3]".
    An adapter has the name of its Linear: "model.layers.3.self_attn.q_proj".
    Raises ConfigError as `trained_weights` does.
    """
    trained, family = trained_weights(config, vocab_size), model_family(config.model)
    whole = trained.whole
    if whole is None:
        model = config.model
        whole = [] if family is None else unfrozen((), family, model, list(family.mappings(model, vocab_size)))
    adapters = {adapter.name for weight in trained.adapted for adapter in weight.adapters}
    return adapters | {f"{weight.key}{list(weight.index) or ''}" for weight in whole}


def _check_mtp(config: Config) -> None:
    """Raise ConfigError if the family's table has no block for multi-token prediction."""
    family = model_family(config.model)
    if family is None or family.mtp is None:
        known = ", ".join(name for name, other in FAMILIES.items() if other.mtp is not None)
        of = "no family of Hugging Face has the tensors of `model`" if family is None else f"the model is {family.name}"
        raise ConfigError(
            f"train.mtp = {config.train.mtp} trains the block for multi-token prediction that files of some models "
            f"have, but {of}.  These families have one that is known here: {known}.  Use train.mtp = off; the files' "
            "tensors that are not trained pass through to exports."
        )


def unfrozen(
    patterns: Sequence[str], family: Family, model: ModelConfig, mappings: Iterable[TensorMapping]
) -> list[Weight]:
    """The weights that no pattern names.

    patterns: train.freeze; mappings: the family's mappings for this model
    Raises ConfigError if a pattern matches nothing, if no weight is left, or if patterns name only some of the tensors
    that one of our weights consists of.
    """
    mappings = [mapping for mapping in mappings if not mapping.is_buffer]
    names = list(dict.fromkeys(name for mapping in mappings for name in names_of(mapping)))
    frozen = {name for pattern in patterns for name in selected("train.freeze", pattern, names, family, model)}
    for unit in units(mappings):
        check_whole("train.freeze", unit, frozen, "is frozen or trained as a whole")
    weights = [_weight(mapping) for mapping in mappings if frozen.isdisjoint(names_of(mapping))]
    if not weights:
        raise ConfigError("train.freeze freezes every weight, so that nothing would be trained.  Name fewer weights.")
    return weights


def _weight(mapping: TensorMapping) -> Weight:
    return Weight(key=mapping.key, index=mapping.stack_index, shape=(mapping.num_rows, *mapping.row_shape))
