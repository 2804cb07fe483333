"""Makes the JSON Schema of a recipe, for editors and programs that write recipes.

pydantic makes the schema of `Config`.  This module changes what a recipe writes in another way than `Config` holds it:
a list of one text may be the text, `model.hf` gives the sizes of the model, and old names of keys are allowed.  The
schema knows types, bounds and names.  It does not know which values exclude each other; `sft check` does.
"""

from collections.abc import Mapping
from typing import Any

from sft.config import Config
from sft.config.keys import OPEN, RENAMED, leaves, sections
from sft.config.megatron_fields import ALLOWED

_UNUSED = ("title", "unreported")
_DATA = ("default", "enum", "const", "required")  # values of the schema that are no schemas


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 7) of a recipe, without references, so that every editor reads it."""
    whole = Config.model_json_schema()
    schema: dict[str, Any] = _plain(whole, whole["$defs"])
    for key, info in leaves().items():
        if info.is_required() and key.startswith("model."):
            _move_behind_hf(_at(schema, "model"), key.removeprefix("model."))
    del _at(schema, "model")["properties"]["pretrained"]
    _at(schema, OPEN).update(
        properties={
            name: {"enum": list(field.values), "description": field.meaning} for name, field in ALLOWED.items()
        },
        additionalProperties=False,
    )
    for old, new in RENAMED.items():
        group, _, name = old.rpartition(".")
        note: dict[str, Any] = {"deprecated": True, "description": f"Old name of {new}."}
        _at(schema, group)["properties"][name] = {**_at(schema, new), **note}
    for key in (*sections(), OPEN):
        part = _at(schema, key)
        part.pop("default", None)  # an editor would write all keys of the group
        if not {"required", "then"} & part.keys():
            part["type"] = ["object", "null"]  # a group without keys: `parallel:`
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Recipe of sft",
        "description": "What `sft train` trains.  `sft check` also finds values that exclude each other.",
        **schema,
    }


def _at(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """The schema of a key or a group: model.rope -> schema["properties"]["model"]["properties"]["rope"]"""
    for name in key.split("."):
        schema = schema["properties"][name]
    return schema


def _move_behind_hf(model: dict[str, Any], name: str) -> None:
    """Require the key `name` of the model only in a recipe without model.hf."""
    model["required"].remove(name)
    has_hf = {"required": ["hf"], "properties": {"hf": {"type": "string"}}}
    model.setdefault("if", {"not": has_hf})
    model.setdefault("then", {"required": []})["required"].append(name)
    if not model["required"]:
        del model["required"]


def _plain(node: Any, definitions: Mapping[str, Any]) -> Any:
    """A part of pydantic's schema with the definitions in place of references, and without what editors cannot use."""
    if isinstance(node, list):
        return [_plain(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    node = {**definitions.get(node.get("$ref", "").rpartition("/")[2], {}), **node}
    plain: dict[str, Any] = {}
    for name, value in node.items():
        if name in _UNUSED or name.startswith("$"):
            continue
        if name in ("properties", "patternProperties"):
            plain[name] = {key: _writable(_plain(child, definitions)) for key, child in value.items()}
        elif name == "description":
            plain[name] = " ".join(value.split())
        else:
            plain[name] = value if name in _DATA else _plain(value, definitions)
    if "patternProperties" in plain:
        plain["additionalProperties"] = False
    return plain


def _writable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a key that a recipe may give as one text, if the key holds a list of texts."""
    first, *others = schema.get("anyOf", [schema])
    item = first.get("items", {})
    if item.get("type") != "string":
        return schema
    kinds = {name: value for name, value in schema.items() if name in ("description", "default")}
    listed = {name: value for name, value in first.items() if name not in kinds}
    return {**kinds, "anyOf": [item, listed, *others]}
