"""Converts the rotary positions of config.json to `model.rope` and back.

transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and `rope_scaling`.  This module reads both
forms as transformers 5 does, and writes changes in the form that the file already has.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sft.config import RopeConfig
from sft.hf.families.windows import FULL, SLIDING
from sft.hf.family import Family

_KINDS = {"default": "none", **{kind: kind for kind in ("linear", "llama3", "yarn", "proportional")}}
_ORIGINAL, _FRACTION = "original_max_position_embeddings", "partial_rotary_factor"
_READ: dict[str, tuple[str, ...]] = {  # kind of scaling -> keys that have the same name in a recipe
    "none": (),
    "proportional": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}
_REQUIRED = {"none": (), "proportional": (), "linear": ("factor",), "llama3": _READ["llama3"], "yarn": ("factor",)}
# Keys -> values with which they have no effect, so that they are accepted where the key is not read.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    _FRACTION: (None, 1.0),
    "truncate": (None, True),
    "mscale": (None,),
    "mscale_all_dim": (None,),
}
_ALL_DIM = "mscale_all_dim"
_MSCALE = ("mscale", _ALL_DIM)  # with yarn, both together give the attention factor


def rope_of(
    content: Mapping[str, Any], family: Family, default_base: float, fraction: float | None
) -> tuple[dict[str, Any], list[str]]:
    """The values of the keys below `model.rope`, and a list of problems.

    default_base: the base if config.json has none
    fraction: partial_rotary_factor if config.json has none; None: the family always rotates whole heads

    {"rope_theta": 500000.0, "rope_scaling": None} -> {"base": 500000.0, "scaling": "none"}, []
    """
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    group = content.get(key) or {}
    if not isinstance(group, dict):
        return {"base": default_base}, [f"{key} = {json.dumps(group)} is not a group of values"]
    base = _first(group.get("rope_theta"), content.get("rope_theta"), default_base)
    named = _first(group.get("rope_type"), group.get("type"), "default")
    kind = _KINDS.get(named) if isinstance(named, str) else None
    if kind is None:
        return {"base": base}, [f"rope_type = {json.dumps(named)} is not supported, only {', '.join(_KINDS)}"]
    problems, names = [], family.rope_keys
    same = _READ[kind]  # keys that have the same name in a recipe
    if family.has_latents and kind == "yarn":  # the attention scale of latent attention also depends on it
        same += (_ALL_DIM,)
    known = {*same, "rope_type", "type", "rope_theta", "max_position_embeddings", *names}
    known |= {_FRACTION} if fraction is not None or _is_of_latents(content, family, group.get(_FRACTION)) else set()
    known |= {_ORIGINAL} if kind in ("llama3", "yarn") or names else set()
    mscale = [number for name in _MSCALE if isinstance(number := group.get(name), (int, float)) and number > 0]
    if kind == "yarn" and len(mscale) == len(_MSCALE):
        known |= {*_MSCALE}
    for name, value in group.items():
        if name not in known and value not in _NEUTRAL.get(name, ()):
            problems.append(f"{name} = {json.dumps(value)} is not supported with rope_type = {named}")
    rope = {name: group[name] for name in same if group.get(name) is not None}
    if kind in ("llama3", "yarn"):
        outer, inner = content.get(_ORIGINAL), group.get(_ORIGINAL)
        if outer is not None and inner is not None and outer != inner:  # transformers versions use different ones
            problems.append(f"{_ORIGINAL} is {json.dumps(inner)} in {key}, but {json.dumps(outer)} outside it")
        rope["original_max_position"] = _first(outer, inner, content.get("max_position_embeddings"))
    if kind == "yarn" and group.get("truncate", True) is None:
        rope["truncate"] = False  # transformers treats null as false
    if kind == "yarn" and "factor" not in rope:
        longest, original = content.get("max_position_embeddings"), rope["original_max_position"]
        if isinstance(longest, int) and isinstance(original, int) and original > 0:
            rope["factor"] = longest / original
    problems += [f"{name} is missing from rope_type = {named}" for name in _REQUIRED[kind] if name not in rope]
    problems += [f"{name} is missing from {key}" for name in names if group.get(name) is None]
    if known.issuperset(_MSCALE) and "attention_factor" not in rope:
        rope |= _ratio(rope.get("factor"), mscale)
    if rope.get("factor") == 1.0 and rope.get("attention_factor", 1.0) == 1.0:
        kind, rope = "none", {}  # a factor of 1 changes nothing
    own = {ours: group[name] for name, ours in names.items() if name in group}
    if own:
        rope["original_max_position"] = _first(content.get(_ORIGINAL), group.get(_ORIGINAL))
    if fraction is not None:
        own["fraction"] = _first(group.get(_FRACTION), content.get(_FRACTION), fraction)
    return {"base": base, "scaling": kind, **rope, **own}, problems


def _is_of_latents(content: Mapping[str, Any], family: Family, fraction: Any) -> bool:
    """Whether `fraction` is the rotated part of a query of latent attention, which its sizes already give.

    {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128}, 1 / 3 -> True
    """
    sizes = [content.get(name, family.defaults.get(name)) for name in ("qk_rope_head_dim", "qk_nope_head_dim")]
    return family.has_latents and all(type(size) is int for size in sizes) and fraction == sizes[0] / sum(sizes)


def _ratio(factor: Any, mscale: Sequence[float]) -> dict[str, float]:
    """The attention factor that yarn computes from mscale and mscale_all_dim: 40, [1, 1] -> {"attention_factor": 1.0}

    factor: factor of the scaling; {} if it is missing or at most 1
    """
    if not isinstance(factor, (int, float)) or factor <= 1:
        return {}
    above, below = (0.1 * number * math.log(factor) + 1.0 for number in mscale)
    return {"attention_factor": above / below}


def by_layer_type(
    content: Mapping[str, Any], window_key: str, default_base: float, fraction: float | None
) -> tuple[dict[str, Any], dict[str, float], list[str]]:
    """Split rope_parameters that has one group for each type of layer.

    Returns the content of config.json with the group of full attention as rope_parameters, the keys of `model.rope`
    for layers with a sliding window, and a list of problems.  Without groups, a scaling applies to full attention only.
    window_key: key of the base of layers with a sliding window, in a config.json without groups
    default_base: the base of these layers if that key is absent
    fraction: see `rope_of`
    """
    groups = content.get("rope_parameters")
    if not isinstance(groups, dict) or not {FULL, SLIDING} & groups.keys():
        group = groups if isinstance(groups, dict) else {}
        return {**content}, {"window_base": _first(group.get(window_key), content.get(window_key), default_base)}, []
    full, sliding = (groups.get(kind) or {} for kind in (FULL, SLIDING))
    if not isinstance(full, dict) or not isinstance(sliding, dict):
        return {}, {"window_base": default_base}, [f"rope_parameters.{FULL} or .{SLIDING} is not a group of values"]
    problems = []
    if sliding.get("rope_type", "default") != "default":
        problems.append(f"rope_type = {json.dumps(sliding['rope_type'])} of {SLIDING} is not supported, only default")
    own = {"window_base": _first(sliding.get("rope_theta"), content.get(window_key), default_base)}
    if fraction is not None and full.get("rope_type") != "proportional":
        parts = [_first(group.get(_FRACTION), fraction) for group in (sliding, full)]
        own |= {"window_fraction": parts[0]} if parts[0] != parts[1] else {}
    return {**content, "rope_parameters": {"rope_type": "default", **full}}, own, problems


def written(rope: RopeConfig, family: Family, *, is_new: bool) -> dict[str, Any]:
    """The keys of config.json for `rope`.  is_new: whether to use the form of transformers 5

    base 1e6, yarn with factor 4 -> {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, ...}}
    """
    kind = {ours: hf_name for hf_name, ours in _KINDS.items()}[rope.scaling]
    scaling: dict[str, Any] = {"rope_type": kind}
    scaling |= {name: value for name in _READ[rope.scaling] if (value := getattr(rope, name)) is not None}
    if rope.truncate:
        scaling.pop("truncate", None)  # the default
    scaling |= {name: getattr(rope, ours) for name, ours in family.rope_keys.items()}
    if rope.mscale_all_dim is not None:
        scaling |= {"mscale": rope.mscale, _ALL_DIM: rope.mscale_all_dim}  # some readers ignore attention_factor
    if rope.scaling in ("llama3", "yarn") or family.rope_keys:
        scaling[_ORIGINAL] = rope.original_max_position
    part = {} if family.rope_fraction is None else {_FRACTION: rope.fraction}
    if is_new and family.rope_by_layer_type:
        sliding = {"rope_type": "default", "rope_theta": rope.window_base or rope.base}
        if part and not rope.is_proportional:
            sliding[_FRACTION] = rope.window_fraction or rope.fraction
        return {"rope_parameters": {FULL: {"rope_theta": rope.base, **scaling, **part}, SLIDING: sliding}}
    if is_new:
        return {"rope_parameters": {"rope_theta": rope.base, **scaling, **part}}
    return {**part, "rope_theta": rope.base, "rope_scaling": None if rope.scaling == "none" else scaling}


def _first(*values: Any) -> Any:
    """The first value that is not null."""
    return next((value for value in values if value is not None), None)
