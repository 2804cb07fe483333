"""Lists the keys of a recipe, and describes the values that each key accepts.

Both are derived from the classes in `config/`.  So errors, `sft check --explain` and docs/reference/config.md always
agree with the accepted values.
"""

import difflib
import json
import re
import types
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from sft.config import Config, RowsConfig, Section, SourceConfig, foreign, yaml
from sft.config.megatron_fields import ALLOWED, in_words
from sft.config.section import UNREPORTED

OPEN = "model.megatron"  # the only mapping whose keys megatron-core defines
NAMED = "data.train"  # the key that is a list of files, or a mapping from names of sources to groups of keys
# Old and new names of keys.  Recipes and checkpoints may use the old name, with a warning.
RENAMED = {
    "run.step_timeout_s": "run.progress_timeout_s",
    "train.max_bad_steps": "train.max_nonfinite_steps",
}
# Names of values in other trainers and earlier versions, and their names in a recipe.
_CALLED = {"gpu": "cuda", "float32": "fp32", "bfloat16": "bf16", "truncate": "cut_turns"}
_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention", "flash", "sdpa")
_COUNT = re.compile(r"([1-9][0-9]{0,9}) ?([kKmM])")
_SHIFTS = {"K": 10, "M": 20}
_BYTES = re.compile(r"([1-9][0-9]{0,9}) ?([kKmM])i?[bB]")


@cache
def sections() -> dict[str, type[Section]]:
    """The class of each group of keys: {"run": RunConfig, "model": ModelConfig, "model.rope": RopeConfig, ...}"""
    return {key: kind for key, _, kind in _walk(Config, "") if kind is not None}


@cache
def leaves() -> dict[str, FieldInfo]:
    """The pydantic field of each key, in the order of the classes: {"run.dir": ..., "model.rope.base": ..., ...}"""
    return {key: info for key, info, kind in _walk(Config, "") if kind is None}


def _walk(model: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo, type[Section] | None]]:
    for name, info in model.model_fields.items():
        if info.exclude:
            continue
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield prefix + name, info, kind
            yield from _walk(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, info, None
        if prefix + name == NAMED:
            yield from _walk(SourceConfig, f"{NAMED}.NAME.")


def named(key: str) -> str | None:
    """The source name in a key: data.train.chat -> chat, data.train.chat.weight -> chat; None for all other keys."""
    group, name = key[: len(NAMED) + 1], key[len(NAMED) + 1 :].partition(".")[0]
    return name if group == f"{NAMED}." and name else None


def is_source(key: str) -> bool:
    """Whether `key` is a named source: data.train.chat, not data.train.chat.weight."""
    return key == f"{NAMED}.{named(key)}" and "[" not in key


def in_schema(key: str) -> str:
    """The name of a key in `leaves`: data.train.chat.weight -> data.train.NAME.weight; other keys do not change."""
    name = named(key)
    return key if name is None else f"{NAMED}.NAME{key[len(NAMED) + 1 + len(name) :]}"


def values(config: Config) -> dict[str, Any]:
    """The value of each key in `config`: {"run.dir": "runs/a", ..., "model.rope.base": 10000.0, ...}"""
    tree = config.model_dump()
    flat: dict[str, Any] = {}
    for key in leaves():
        if named(key):
            continue  # the value of NAMED contains this key
        value: Any = tree
        for part in key.split("."):
            value = value[part]
        flat |= {f"{key}.{name}": v for name, v in value.items()} if key == OPEN and value else {key: value}
    return flat


def is_reported(key: str) -> bool:
    """Whether a resumed run reports a change of `key`: false if the key or its group is UNREPORTED."""
    group: type[Section] = Config
    for name in key.split("."):
        info = group.model_fields.get(name)
        if info is None or info.json_schema_extra == UNREPORTED:
            return info is None
        if not (isinstance(info.annotation, type) and issubclass(info.annotation, Section)):
            break
        group = info.annotation
    return True


def takes_list(key: str) -> bool:
    """Whether the key holds a list.  A single value then means a list with this value."""
    kinds = types_of(key)
    return bool(kinds) and get_origin(kinds[0]) is list


def types_of(key: str) -> list[Any]:
    """The types of the values that a key accepts, without their bounds: [int, NoneType]"""
    info = leaves().get(in_schema(key))
    return [kind for kind, _ in _alternatives(info.annotation)] if info else []


def in_units(key: str, value: Any) -> Any:
    """The value of a key that holds a whole number, without a unit of 2^10 or 2^20: "64K" -> 65536, "1M" -> 1048576."""
    if int in types_of(key) and isinstance(value, str) and (match := _COUNT.fullmatch(value)):
        return int(match[1]) << _SHIFTS[match[2].upper()]
    return value


def expected(key: str) -> str:
    """The values that a key accepts: `a whole number of at least 1 or null`, `one of auto, cuda, cpu`."""
    info = leaves().get(in_schema(key))
    if info is None:
        return in_words(ALLOWED[key.rpartition(".")[2]])
    return _expected(info, alone=takes_list(key) and item_of(key) is None)


def item_of(key: str) -> type[Section] | None:
    """The class of the groups of keys that a key lists: optim.groups -> ParamGroup; None for all other keys."""
    (item,) = get_args(types_of(key)[0]) if takes_list(key) else (None,)
    return item if isinstance(item, type) and issubclass(item, Section) else None


def expected_in_item(item: type[Section], name: str) -> str:
    """The values that a key of a group in a list accepts."""
    return _expected(item.model_fields[name], alone=False)


def _expected(info: FieldInfo, *, alone: bool) -> str:
    words = [_in_words(kind, bounds, alone=alone) for kind, bounds in _alternatives(info.annotation, info.metadata)]
    return (", or " if words[0].endswith(", not empty") else " or ").join(words)


def _alternatives(annotation: Any, bounds: Sequence[Any] = ()) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yields each type of a union with its bounds: Annotated[int, Field(ge=1)] | None -> (int, [Ge(1)]), (NoneType,
    [])"""
    if get_origin(annotation) in (Union, types.UnionType):
        for choice in get_args(annotation):
            yield from _alternatives(choice)
    elif get_origin(annotation) is Annotated:
        kind, *marks = get_args(annotation)
        yield kind, [c for mark in marks for c in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
    else:
        yield annotation, bounds


def _in_words(kind: Any, bounds: Sequence[Any], *, alone: bool = False) -> str:
    """A type and its bounds in words.  `alone` means that a recipe may write a list of one element as the element."""
    limits = []
    for bound in bounds:
        match bound:
            case annotated_types.Ge(ge):
                limits.append(f"of at least {ge}")
            case annotated_types.Gt(gt):
                limits.append(f"above {gt}")
            case annotated_types.Le(le):
                limits.append(f"of at most {le:,}")
            case annotated_types.Lt(lt):
                limits.append(f"below {lt}")
    match get_origin(kind) or kind:
        case origin if origin is Literal:
            choices = get_args(kind)
            words = "one of " + ", ".join(choices) if len(choices) > 1 else choices[0]
        case origin if origin is list:
            ((kind, inner),) = _alternatives(*get_args(kind))
            noun = ("path" if inner else "name") if kind is str else ""  # the type Path of section.py has bounds
            if isinstance(kind, type) and issubclass(kind, Section):
                return f"a list, each a group of the keys {', '.join(kind.model_fields)}"
            item = f"a {noun}" if noun else _in_words(kind, inner)
            several = f"a list of {noun}s" if noun else "a list of such" if alone else f"a list, each {item}"
            return (f"{item} or " if alone else "") + several + (", not empty" if bounds else "")
        case origin if origin is dict:
            values = [value for value, _ in _alternatives(get_args(kind)[1])]
            groups = ["groups of keys"] if {RowsConfig, SourceConfig} & set(values) else []
            such = [] if SourceConfig in values else ["such" if alone else "values"]
            words = f"a mapping of names to {' or '.join([*such, *groups])}"
            bounds = ()
        case _:
            names = {bool: "true or false", int: "a whole number", float: "a number", str: "non-empty text"}
            words = names.get(kind, "null")
    return " ".join([words, " and ".join(limits)]).strip()


def show(value: Any) -> str:
    """The text of a value in an error: JSON of at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def unknown(key: str, where: str, advice: str | None = None) -> str:
    """The error message for an unknown key: "unknown key data.seq_lenght (a.yaml, line 12).  Did you mean ...?"

    where: the origin of the key; advice: None is that of `advice_for`
    """
    return f"unknown key {key if key.isprintable() and key else show(key)} ({where}).  {advice or advice_for(key)}"


def advice_for(key: str, value: Any = None) -> str:
    """Advice for an unknown key, to which the user gave `value`: "Did you mean data.seq_length?"."""
    other = _elsewhere(key)
    if ours := foreign.called_here(other):
        example = ", such as {chat: {dataset: OWNER/NAME}}" * (ours == NAMED)
        switch = hint(ours, value) if value is True else ""
        return f"It is called {ours} here, which takes {expected(ours)}{example}.{switch}"
    if ours := _of_another_group(other):
        return f"Did you mean {ours}?"
    if reason := foreign.why_not_here(other):
        return reason
    near = nearest(key)
    return f"Did you mean {near}?" if near else keys_of(key.rpartition(".")[0])


def _of_another_group(key: str) -> str | None:
    """The recipe key with the same name, if the group of `key` is not in a recipe: optimizer.lr -> optim.lr"""
    group, _, name = key.rpartition(".")
    is_theirs = group and group.partition(".")[0] not in sections()
    return next((ours for ours in leaves() if is_theirs and not named(ours) and ours.endswith(f".{name}")), None)


def _elsewhere(key: str) -> str:
    """The part of an unknown key that may be a setting of another trainer; the user's names of sources are left out."""
    return key.rpartition(".")[2] if is_source(key.rpartition(".")[0]) else key


def keys_of(group: str) -> str:
    """A sentence with the keys of a group: "Keys of attention: backend, ...".  If there is no such group, it has the
    groups of a recipe."""
    if group == OPEN:
        return f"Keys of {OPEN}: {', '.join(ALLOWED)}."
    if group in sections() or is_source(group):
        fields = SourceConfig.model_fields if is_source(group) else sections()[group].model_fields
        return f"Keys of {group}: {', '.join(fields)}."
    return f"Keys of a recipe: {', '.join(Config.model_fields)}."


def nearest(key: str) -> str | None:
    """The key that the user probably meant; None if no key is similar.

    It is the key that another trainer calls by this name; else a similar key of the same group; else a similar key of
    any group.
    """
    group, _, name = key.rpartition(".")
    if (ours := foreign.called_here(_elsewhere(key))) or group == OPEN:
        return ours
    if is_source(group):
        close = difflib.get_close_matches(name, SourceConfig.model_fields, n=1)
        return f"{group}.{close[0]}" if close else None
    known = [*sections(), *(k for k in leaves() if not named(k))]
    beside = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == group}
    anywhere = {k.rpartition(".")[2]: k for k in reversed(known)}
    if not group and name in anywhere:
        return anywhere[name]
    for names, cutoff in ((beside, 0.6), (anywhere, 0.75)):
        if close := difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
            return names[close[0]]
    close = [] if group in sections() else difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    return close[0] if close else None


def hint(key: str, value: Any) -> str:
    """Advice about a wrong `value`, such as `  Write 50000.`; empty if there is none."""
    kinds = types_of(key)
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if isinstance(value, float) and int in kinds and value.is_integer():
        return f"  Write {int(value)}."
    if isinstance(value, bool) and {"none", "full"} <= set(choices):  # train.recompute, a switch elsewhere
        return f"  Did you mean {'full' if value else 'none'}?"
    if (value is True or str(value).lower() in _FLASH) and key == "attention.backend":
        return "  Write auto, the fastest installed kernel; attention.kernels=[fa2] would choose one."
    if not isinstance(value, str):
        return ""
    if _CALLED.get(value.lower()) in choices:
        return f"  Did you mean {_CALLED[value.lower()]}?"
    if choices and (reason := foreign.NOT_HERE.get(value.lower())):
        return f"  {reason}."
    if close := difflib.get_close_matches(value.lower(), choices, n=1):
        return f"  Did you mean {close[0]}?"
    if value.lower() in ("none", "null") and type(None) in kinds:
        return "  Write null, without quotes."
    if bool in kinds and value.lower() in ("y", "yes", "on", "true", "n", "no", "off", "false"):
        return f"  Write {'true' if value.lower() in ('y', 'yes', 'on', 'true') else 'false'}."
    if int in kinds and (match := _BYTES.fullmatch(value)):
        return f"  Write {match[1]}{match[2].upper()}, without B."
    number = re.sub(r"^([-+]?)0+(?=[0-9])", r"\1", re.sub("[_,]", "", value))
    if (int in kinds and yaml.INT.fullmatch(number)) or (float in kinds and yaml.FLOAT.fullmatch(number)):
        return f"  Write {number}{', without quotes' * (number == value)}."
    return ""
