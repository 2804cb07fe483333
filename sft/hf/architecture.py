"""Converts the keys of config.json, as transformers reads them, to the keys `model.*` of a recipe, and back.

One error lists all values that our model does not support.  An export copies the original config.json and changes only
the keys whose values changed in the model, the type of the weights, and max_position_embeddings if packs were longer.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sft.config import Conflict, ModelConfig, listed
from sft.config.model import MOST_LAYERS
from sft.config.moe import MOST_EXPERTS
from sft.errors import ConfigError
from sft.files.folder_files import CONFIG_BYTES, read_json
from sft.hf.families import family_of
from sft.hf.families.unsupported import unsupported
from sft.hf.families.windows import FULL
from sft.hf.family import Family
from sft.hf.hub import CONFIG
from sft.hf.nested_config import located, put_back, text_part
from sft.hf.quantization import Quantised, scheme_of
from sft.hf.rotary import by_layer_type, rope_of, written

_WRONG = (TypeError, KeyError, IndexError, AttributeError, ArithmeticError)  # raised for values of a wrong type
_LARGE = 1 << 63  # no float can hold some larger integers
_MOST = {"num_layers": MOST_LAYERS, "moe.num_experts": MOST_EXPERTS}
_REQUIRED = (  # keys that config.json must have if the family has them
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size"),
    *("moe.num_experts", "moe.top_k", "moe.ffn_hidden_size", "moe.normalize_top_k", "moe.shared_ffn_hidden_size"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The model that a config.json describes."""

    family: Family
    model: ModelConfig
    values: dict[str, Any]  # values that config.json determines, by dotted key below `model`
    sources: dict[str, str]  # for each value, the key of config.json that gives it
    scheme: Quantised | None  # how weights are dequantised; None: the weights are not quantised

    @property
    def vocab_size(self) -> int:
        assert self.model.vocab_size is not None
        return self.model.vocab_size


def read(folder: Path) -> dict[str, Any]:
    """The content of config.json.  Raises ConfigError if the file cannot be read."""
    path = folder / CONFIG
    try:
        content = read_json(folder, CONFIG, CONFIG_BYTES)
    except (OSError, ValueError, RecursionError) as error:
        why = f"{path} cannot be read ({error})" if folder.exists() else f"{folder} does not exist in {Path.cwd()}"
        raise ConfigError(f"{why}; a folder that save_pretrained wrote has {CONFIG} beside the weights.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not a model configuration.")
    return content


def architecture(content: Mapping[str, Any], path: str) -> Architecture:
    """The model that config.json describes.  Errors name the file as `path`.

    {"model_type": "qwen2", "num_hidden_layers": 24, ...} -> .values {"num_layers": 24, "qkv_bias": True, ...}

    Raises ConfigError that lists everything that our model does not support.
    """
    family, whole = family_of(content), content
    if family is None:
        raise ConfigError(f"{path}: {unsupported(content)}")
    content = text_part(whole, family)
    scheme, unsupported_weights = scheme_of(content)
    problems = [*_options(content, family), *unsupported_weights]
    values, sources = family.fixed, dict.fromkeys(family.fixed, "model_type")
    for key, hf_key in family.keys.items():
        names = _names_in(content, hf_key, family)
        present = [content[name] for name in names]
        value, sources[key] = (present or [family.defaults.get(hf_key)])[0], (names or [hf_key])[0]
        if any(other != value for other in present[1:]):
            both = " and ".join(f"{name} = {_shown(content[name])}" for name in names)
            problems.append(f"{both} are two names of one setting but differ; remove the wrong name")
        elif value is not None:
            if key in _MOST and type(value) is int and value > _MOST[key]:  # some rules below make a list of the layers
                raise ConfigError(f"{path}: {sources[key]} = {_shown(value)}; at most {_MOST[key]:,} are supported.")
            values[key] = value
        elif key in _REQUIRED:
            problems.append(f"{hf_key} is missing")
    for key, conversion in family.computed.items():
        sources[key] = conversion.source
        with _reported(content, conversion.source, problems):
            values[key] = conversion.read(content)
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if type(heads) is int:  # transformers derives absent or null sizes in the same way
        values.setdefault("num_query_groups", heads)
        if type(hidden) is int and heads > 0:
            values.setdefault("head_dim", hidden // heads)
            sources.setdefault("head_dim", "hidden_size")  # some families have no key for head_dim
    rope: dict[str, Any] = {"base": None}
    with _reported(content, "rope_parameters" if "rope_parameters" in content else "rope_scaling", problems):
        rope = _rope(content, family, problems)
    if values.get("sliding_window") is None:
        rope = {name: value for name, value in rope.items() if not name.startswith("window_")}
    values |= {f"rope.{name}": value for name, value in rope.items()}
    sources |= {f"rope.{name}": "rope_parameters" if "rope_parameters" in content else "rope_scaling" for name in rope}
    sources["rope.base"] = sources["rope.base"] if "rope_parameters" in content else "rope_theta"
    sources = {key: located(whole, name, family) for key, name in sources.items()}
    model = None if problems else _model(values, sources, problems)
    if model is None:
        raise ConfigError(listed([f"{path}: {problem}." for problem in dict.fromkeys(problems)]))
    return Architecture(family=family, model=model, values=values, sources=sources, scheme=scheme)


@contextmanager
def _reported(content: Mapping[str, Any], source: str, problems: list[str]) -> Iterator[None]:
    """A context manager that appends errors of code that reads the key `source` of config.json to `problems`."""
    try:
        yield
    except ValueError as wrong:
        problems.append(str(wrong))
    except _WRONG as wrong:
        problems.append(
            f"{source} = {_shown(content.get(source))} cannot be read; it, or a key that it depends on, is missing or "
            f"has a wrong type or size ({type(wrong).__name__}: {wrong}); restore the value that the model came with"
        )


def _shown(value: Any) -> str:
    """The value as JSON, shortened to 80 characters."""
    try:
        shown = json.dumps(value)
    except ValueError:  # json limits the digits of an integer, but a product may have more
        return f"a {type(value).__name__} that is too large to print"
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _rope(content: Mapping[str, Any], family: Family, problems: list[str]) -> dict[str, Any]:
    """The values of the keys below `model.rope`.  Appends a line to `problems` for each unsupported setting."""
    has_rope = content.get("rope_scaling") or content.get("rope_parameters")
    positions = content if has_rope else {**content, "rope_parameters": family.defaults.get("rope_parameters")}
    base = family.defaults.get("rope_theta", 10000.0)
    if family.rope_by_layer_type:
        key, window_base = family.window_theta or ("rope_theta", base)
        fraction = _default_fraction(content, family)
        positions, of_windows, wrong = by_layer_type(positions, key, window_base, fraction)
        problems += wrong
    rope, wrong = rope_of(positions, family, base, _default_fraction(content, family))
    problems += wrong
    if family.rope_by_layer_type:
        rope |= of_windows
    if rope.get("scaling", family.scalings[0]) not in family.scalings:
        problems.append(_unscalable(family, f"rope_type = {json.dumps(rope['scaling'])}"))
    return rope


def _default_fraction(content: Mapping[str, Any], family: Family) -> float | None:
    """The rotated fraction of a head without partial_rotary_factor; None: the family always rotates whole heads."""
    width, head = family.rope_width and content.get(family.rope_width), content.get(
        "head_dim", family.defaults.get("head_dim")
    )
    return width / head if type(width) is int and type(head) is int and head > 0 else family.rope_fraction


def write_back(
    content: Mapping[str, Any], now: ModelConfig, path: str, *, dtype: str | None, seq_length: int | None
) -> dict[str, Any]:
    """The content of config.json for the model `now`, made from the original `content`.

    dtype: type of the weights, such as `bfloat16`, None: as in `content`
    seq_length: length of packs in training, None if unknown
    Raises ConfigError if `now` belongs to another family.
    """
    before = architecture(content, path)
    family, whole = before.family, content
    _same_family(family, now, path)
    content = text_part(whole, family)
    changed = dict(content)
    new = _resolved(now, before.vocab_size, family)
    old = _resolved(before.model, before.vocab_size, family)
    for ours, hf_key in family.keys.items():
        if new[ours] != old[ours]:
            changed |= dict.fromkeys(_names_in(content, hf_key, family) or [hf_key], new[ours])
    for ours, conversion in family.computed.items():
        if new[ours] != old[ours]:
            changed |= conversion.write(new[ours], now.num_layers)
    if new["rope"] != old["rope"]:
        is_new = "rope_parameters" in content or "rope_theta" not in content
        # Outside of rope_parameters, these keys would override the values inside it.
        outer = ("original_max_position_embeddings", *(("rope_theta", "rope_scaling") if is_new else ()))
        changed = {key: value for key, value in changed.items() if key not in outer}
        changed |= written(now.rope, family, is_new=is_new)
    if seq_length is not None and isinstance(content.get(family.longest), int):
        changed[family.longest] = max(content[family.longest], seq_length)
    name = "dtype" if "dtype" in content else "torch_dtype"
    if dtype is not None and (name in content or dtype != "float32"):
        changed[name] = dtype
    changed = put_back(whole, content, changed, family)
    after = architecture(changed, path)
    assert _resolved(after.model, after.vocab_size, family) == new, (after.model, now)
    return changed


def _names_in(content: Mapping[str, Any], name: str, family: Family) -> list[str]:
    """The names under which `content` has the key `name`: this name, the family's alias of it, both, or none."""
    return [key for key in dict.fromkeys((name, family.aliases.get(name, name))) if key in content]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted keys into groups: {"num_layers": 2, "rope.base": 1e6} -> {"num_layers": 2, "rope": {"base": 1e6}}"""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        (tree.setdefault(group, {}) if group else tree)[name] = value
    return tree


def _options(content: Mapping[str, Any], family: Family) -> list[str]:
    """One line for each option with a value that our model does not support."""
    problems = []
    for name, allowed in family.options.items():
        if name == "partial_rotary_factor" and family.rope_fraction is not None:
            continue
        value = content.get(name, family.defaults.get(name, allowed[0]))
        if not any(value == option and isinstance(value, bool) == isinstance(option, bool) for option in allowed):
            absent = "" if name in content else " (the default of transformers)"
            absent += f", {family.lacks[name]}," if name in family.lacks else ""
            problems.append(
                f"{name} = {_shown(value)}{absent} is not supported, only "
                f"{' or '.join(json.dumps(option) for option in allowed)}"
            )
    kinds = content.get("layer_types") or []
    read = (computed.layer_types for computed in family.computed.values())
    supported = next(filter(None, read), (FULL,))
    other = sorted({str(kind) for kind in kinds if kind not in supported}) if isinstance(kinds, list) else [kinds]
    if other:
        problems.append(f"layer_types has {other[0]}; only {' and '.join(supported)} is supported")
    names = content.get("architectures")
    # The code in a model's repository may spell the class otherwise than transformers: KimiK25... for Kimi_K25...,
    # ExaoneMoE... for ExaoneMoe...
    if names and _plain(names) != _plain([family.class_name]):
        problems.append(f"architectures = {_shown(names)}, but only {family.class_name} is supported")
    return problems


def _plain(class_names: Any) -> str:
    return json.dumps(class_names).replace("_", "").lower()


def _model(values: dict[str, Any], sources: Mapping[str, str], problems: list[str]) -> ModelConfig | None:
    large = [key for key, value in values.items() if type(value) is int and abs(value) >= _LARGE]
    problems += [f"{sources.get(key, key)} = {_shown(values[key])} ({key}) is too large" for key in large]
    if large:
        return None
    try:
        return ModelConfig.model_validate(nested(values))
    except ValidationError as invalid:
        for error in invalid.errors(include_url=False):
            group = ".".join(map(str, error["loc"]))
            cause = error.get("ctx", {}).get("error")
            reasons = cause.problems if isinstance(cause, Conflict) else [("", error["msg"].lower())]
            for name, reason in reasons:
                key = ".".join(part for part in (group, name) if part)
                problems.append(f"{sources.get(key, key)} = {_shown(values.get(key))} ({key}) {reason}")
        return None


def _resolved(model: ModelConfig, vocab_size: int, family: Family) -> dict[str, Any]:
    """The values of `model` for the keys that the family has in config.json.

    Keys that a recipe may omit have their derived values.  "rope" has the rotary keys as config.json writes them.
    vocab_size: the size of the vocabulary if `model` has none
    """
    derived = {
        "num_query_groups": model.resolved_query_groups,
        "head_dim": model.resolved_head_dim,
        "vocab_size": model.vocab_size or vocab_size,
        "moe.ffn_hidden_size": model.resolved_expert_ffn,
    }
    keys = (*family.keys, *family.computed)
    if "moe.ffn_hidden_size" not in keys:  # a family without this key has one MLP width only
        derived["ffn_hidden_size"] = model.resolved_expert_ffn
    own = {key: derived[key] if key in derived else attrgetter(key)(model) for key in keys}
    return own | {"rope": written(model.rope, family, is_new=True)}


def _same_family(family: Family, now: ModelConfig, path: str) -> None:
    """Raise ConfigError if the family cannot express the model `now`."""
    wrong = [
        f"model.{key} = {json.dumps(own)}, but it must be {json.dumps(value)} for {family.model_type} ({path})."
        for key, value in family.fixed.items()
        if (own := attrgetter(key)(now)) != value
    ]
    by_key: dict[str, tuple[str, Any]] = {}  # key of config.json -> our first key of this meaning, and its value
    for key, hf_key in family.keys.items():
        value = attrgetter(key)(now)
        first, expected = by_key.setdefault(hf_key, (key, value))
        if value != expected:
            wrong.append(
                f"model.{first} = {json.dumps(expected)} and model.{key} = {json.dumps(value)} differ, but {hf_key} is "
                f"one key for both in {path}."
            )
    if "moe.num_experts" in family.keys and now.moe.num_experts is None:
        wrong.append(f"model.moe.num_experts = null, but {family.model_type} models have experts ({path}).")
    if now.rope.scaling not in family.scalings:
        wrong.append(f"{_unscalable(family, f'model.rope.scaling = {now.rope.scaling}')} ({path}).")
    if wrong:
        raise ConfigError(listed(wrong))


def _unscalable(family: Family, value: str) -> str:
    return f"{value}, but transformers computes a {family.model_type} model only with {', '.join(family.scalings)}"
