"""`model.*` -> config.json: the file that the weights came with, changed where the model has changed.

A file without changes stays as it is, byte for byte.
"""

import json
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from sft.config import ModelConfig, listed
from sft.errors import ConfigError
from sft.hf.architecture import architecture, names_in
from sft.hf.family import Family
from sft.hf.rotary import written

_LONGEST = "max_position_embeddings"


def write_back(
    content: Mapping[str, Any], now: ModelConfig, path: str, *, dtype: str, seq_length: int | None
) -> dict[str, Any]:
    """`content` of a config.json -> that of `now`.

    dtype: of the weights, as `bfloat16`; seq_length: of the packs that the model was trained on, where known
    Raises ConfigError where `now` is of another family.
    """
    before = architecture(content, path)
    family = before.family
    _same_family(family, now, path)
    changed = dict(content)
    new = resolved(now, before.vocab_size, family)
    old = resolved(before.model, before.vocab_size, family)
    for ours, hf_key in family.keys.items():
        if new[ours] != old[ours]:
            changed |= dict.fromkeys(names_in(content, hf_key, family) or [hf_key], new[ours])
    if _effective_rope(now) != _effective_rope(before.model):
        is_new = "rope_parameters" in content or "rope_theta" not in content
        # Outside of the group these would override the values inside.
        outer = ("original_max_position_embeddings", *(("rope_theta", "rope_scaling") if is_new else ()))
        changed = {key: value for key, value in changed.items() if key not in outer} | written(now.rope, is_new=is_new)
    if seq_length is not None and isinstance(content.get(_LONGEST), int):
        changed[_LONGEST] = max(content[_LONGEST], seq_length)
    name = "dtype" if "dtype" in content else "torch_dtype"
    if name in content or dtype != "float32":
        changed[name] = dtype
    after = architecture(changed, path)
    assert resolved(after.model, after.vocab_size, family) == new and _effective_rope(after.model) == _effective_rope(
        now
    ), (
        after.model,
        now,
    )
    return changed


def resolved(model: ModelConfig, vocab_size: int, family: Family) -> dict[str, Any]:
    """Our keys with all derived values filled in.  vocab_size: used where the recipe gives none"""
    derived = {
        "num_query_groups": model.resolved_query_groups,
        "head_dim": model.resolved_head_dim,
        "vocab_size": model.vocab_size or vocab_size,
        "moe.ffn_hidden_size": model.resolved_expert_ffn,
    }
    if "moe.ffn_hidden_size" not in family.keys:  # such a family has one width only
        derived["ffn_hidden_size"] = model.resolved_expert_ffn
    return {key: derived[key] if key in derived else attrgetter(key)(model) for key in family.keys}


def _effective_rope(model: ModelConfig) -> dict[str, Any]:
    """`model.rope` without the keys that have no effect."""
    return written(model.rope, is_new=True)


def _same_family(family: Family, now: ModelConfig, path: str) -> None:
    """Raise ConfigError where `now` is a model that the family cannot be."""
    values = {key: attrgetter(key)(now) for key in family.implied}
    wrong = [
        f"model.{key} = {json.dumps(values[key])}, and it is {json.dumps(value)} in every {family.model_type} ({path})."
        for key, value in family.implied.items()
        if values[key] != value
    ]
    if "moe.num_experts" in family.keys and now.moe.num_experts is None:
        wrong.append(f"model.moe.num_experts = null, and every {family.model_type} has experts ({path}).")
    if wrong:
        raise ConfigError(listed(wrong))
