"""Extracts the language model's part of a config.json, for models with a vision tower, and writes changes back.

Most keys of the language model are in the group `text_config`.  transformers reads some keys from the top level
instead, and old files of Qwen2-VL and Qwen2.5-VL have all keys there.  `text_part` gives one flat group of keys to the
other modules.  `put_back` writes changed keys to the places where they came from.

mrope gives a token three positions: time, height and width.  For text these are equal, so mrope is the plain rotary
embedding, for any sections.  The flat group lacks the keys of mrope, and `put_back` keeps them in the file.
"""

from collections.abc import Mapping
from typing import Any

from sft.hf.family import Family

_GROUP = "text_config"
# Keys that transformers reads at the top level, if they are there.
_OUTER = (
    "tie_word_embeddings",
    "architectures",
    "auto_map",
    "quantization_config",
    "model_type",
    "dtype",
    "torch_dtype",
)
_MROPE = ("mrope_section", "mrope_interleaved")


def text_part(content: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The keys of the language model, as a config.json without a vision tower would have them.

    {"model_type": "qwen3_vl", "text_config": {"hidden_size": 64}} -> {"hidden_size": 64, "model_type": "qwen3_vl"}
    """
    inner = _inner(content) if family.text_config != "none" else None
    if inner is None:
        text = dict(content) if family.text_config != "required" else {}
    else:
        text = {key: value for key, value in inner.items() if key != "architectures"}
        text |= {key: content[key] for key in _OUTER if key in content}
    text = _without_mrope(text) if family.has_mrope else text
    return text if family.renewed is None else family.renewed(text)


def put_back(
    content: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any], family: Family
) -> dict[str, Any]:
    """The content of config.json after the keys of its language model changed.

    before: text_part(content, family); after: `before` with changed, new and removed keys
    """
    outer, inner = dict(content), dict(_inner(content) or {}) if family.text_config != "none" else {}
    mrope = _mrope(inner or content) if family.has_mrope else {}
    for key in {**before, **after}:
        if key in before and key in after and before[key] == after[key]:
            continue
        # Some files have a key of the language model at the top level and in text_config.
        groups = [group for group in (outer, inner) if key in group]
        for group in groups or [inner if inner and key not in _OUTER else outer]:
            if key not in after:
                del group[key]
            elif key in ("rope_scaling", "rope_parameters") and mrope:
                group[key] = (after[key] or {"rope_type": "default"}) | mrope
            else:
                group[key] = after[key]
    return outer | {_GROUP: inner} if inner else outer


def located(content: Mapping[str, Any], key: str, family: Family) -> str:
    """The dotted name of a key in config.json: with its group, as in "text_config.hidden_size", or alone."""
    if family.text_config == "none" or _inner(content) is None or (key in _OUTER and key in content):
        return key
    return f"{_GROUP}.{key}"


def _inner(content: Mapping[str, Any]) -> dict[str, Any] | None:
    group = content.get(_GROUP)
    return group if isinstance(group, dict) else None


def _mrope(text: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of mrope in the group of rotary settings."""
    groups = [text.get(key) for key in ("rope_parameters", "rope_scaling")]
    return {key: group[key] for group in groups if isinstance(group, dict) for key in _MROPE if key in group}


def _without_mrope(text: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the language model, `text`, without those of mrope.

    {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}} -> {"rope_scaling": {"type": "default"}}
    """
    plain = dict(text)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(group := text.get(name), dict):
            kept = {key: value for key, value in group.items() if key not in _MROPE}
            plain[name] = {key: "default" if value == "mrope" else value for key, value in kept.items()}
    return plain
