"""The keys and values of a recipe while its file and overrides are read, before they are validated."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from sft.config import Config, Conflict, RowsConfig, Section, keys, listed, yaml
from sft.config.keys import NAMED, OPEN, leaves, named, sections, show
from sft.config.pretrained import Pretrained
from sft.config.yaml import Pairs
from sft.errors import ConfigError, in_one_line
from sft.hf.pretrained import model_keys, read_pretrained
from sft.recipe.resolved import Origin

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_KEY = re.compile(r"[a-z]\w*(?:\.\w+)+")
# Keys of model.rope that a recipe may not change.
_NOT_POSITIONS = ("fraction", "skip_layers", "query_scale_beta", "window_base", "window_fraction")
# Advice for a key that the recipe must not set, because config.json decides its value.
_MORE = {"model.vocab_size": "  data.add_tokens gives the model rows for more tokens."}
_MAX_ADVISED = 50  # unknown keys for which similar keys are looked up, which takes up to a millisecond each


@dataclass
class Draft:
    """Values of a recipe that are not validated yet, and the problems found in them."""

    path: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    problems: list[tuple[Origin, str]] = field(default_factory=list)
    meant: set[str] = field(default_factory=set)  # keys suggested for unknown keys; these are not reported as missing
    advised: dict[str, str] = field(default_factory=dict)  # advice -> the first unknown key that got it
    names: dict[str, dict[str, Origin]] = field(default_factory=dict)  # by current key: the names that the user gave
    replaced: list[str] = field(default_factory=list)  # a line for each override that a later override replaces
    pretrained: Pretrained | None = None  # the model that model.hf names

    def take(self, prefix: str, pairs: Pairs, origin_of: Callable[[int], Origin]) -> None:
        """Add the keys and values of `pairs`, which are below `prefix`.  origin_of: the origin of the value in a
        line"""
        first: dict[str, int] = {}
        for name, line, value in pairs:
            origin = origin_of(line)
            if name in first:
                self.meant.add(prefix + name)
                self._note(origin, f"{prefix}{name} is given twice ({origin}; first in line {first[name]}).  Keep one.")
                continue
            first[name] = line
            key = self._current_name(prefix + name, origin)
            is_source = keys.is_source(key)
            if key == NAMED:
                self._forget(NAMED)
            if prefix == f"{NAMED}." and not _NAME.fullmatch(name):
                self.meant.add(NAMED)
                rule = f"is not a valid name of a source in {NAMED}; use letters, digits, - and _."
                self._note(origin, f"{show(name)} ({origin}) {rule}")
            elif key in sections() or key == OPEN or is_source or (key == NAMED and isinstance(value, Pairs)):
                if key == NAMED or is_source:
                    self.origins[key] = origin
                if isinstance(value, Pairs) and (value or not is_source):
                    self.take(f"{key}.", value, origin_of)
                elif value is not None or is_source:
                    self.meant.add(NAMED)
                    wanted = f"expected a group of keys.  {keys.keys_of(key)}"
                    self._note(origin, f"{key} = {show(yaml.plain(value))} ({origin}); {wanted}")
            elif named(key) and isinstance(self.values.get(NAMED), list):
                files = f"{NAMED} is a list of files ({self.origins[NAMED]})"
                self._note(origin, f"{key} ({origin}): {files}, without named sources.")
            elif keys.in_schema(key) in leaves() or (prefix == f"{OPEN}." and name.isidentifier()):
                listable = keys.takes_list(key) and isinstance(value, str)
                self._set(key, [value] if listable else keys.in_units(key, yaml.plain(value)), origin)
                for repeated in yaml.repeated(value):
                    self._note(origin, f"{key}.{repeated} is given twice ({origin}).  Keep one.")
            elif len(self.problems) < _MAX_ADVISED:
                self._refuse_unknown(key, origin, yaml.plain(value))
            else:
                self._note(origin, f"unknown key {show(key)} ({origin}).")

    def _set(self, key: str, value: Any, origin: Origin) -> None:
        """Give `key` a value in place of an earlier one.  Notes if both values are of the command line."""
        earlier = self.origins.get(key, Origin("default"))
        if earlier.kind == origin.kind == "command line" and self.values[key] != value:
            self.replaced.append(f"{key} is given twice ({earlier}; {origin}); the last, {show(value)}, is used")
        self.values[key], self.origins[key] = value, origin

    def _note(self, origin: Origin, problem: str) -> None:
        self.problems.append((origin, problem))

    def _refuse_unknown(self, key: str, origin: Origin, value: Any = None) -> None:
        """Notes an unknown key.  Keys that the advice names are not reported as missing; it is given once."""
        advice = keys.advice_for(key, value)
        self.meant |= {keys.nearest(key) or "", *_KEY.findall(advice)}
        first = self.advised.setdefault(advice, key)
        self._note(origin, keys.unknown(key, str(origin), advice if first == key else f"See {first}."))

    def _current_name(self, name: str, origin: Origin) -> str:
        """The current name of the key `name`.  Notes a problem if the key is given by its old and its new name."""
        key = keys.RENAMED.get(name, name)
        if key in keys.RENAMED.values():
            origins = self.names.setdefault(key, {})
            origins[name] = origin
            if len(origins) > 1:
                both = " and ".join(f"{name} ({where})" for name, where in origins.items())
                self._note(origin, f"{both} are names of the same key, which is now called {key}.  Keep only {key}.")
        return key

    def warnings(self) -> list[str]:
        """One line for each old name of a key, and for each override that a later one replaces."""
        return self.replaced + [
            f"{name} ({origin}) is now called {key}; the old name still works"
            for key, origins in self.names.items()
            for name, origin in origins.items()
            if name != key
        ]

    def _forget(self, group: str) -> None:
        """Remove the values of `group` and of all keys below it, because a later setting replaces them."""
        for known in (self.values, self.origins):
            for key in [key for key in known if key == group or key.startswith(f"{group}.")]:
                del known[key]

    def take_override(self, override: str) -> None:
        """Add `key=value`.  A value that begins with [, { or a quote is read as YAML, any other as one scalar."""
        origin = Origin("command line", text=in_one_line(override))
        key, equals, text = override.partition("=")
        group, dot, name = key.rpartition(".")
        if not equals or not text:
            self._note(origin, f"override {show(override)} has no value; write KEY=VALUE, or KEY=null to unset KEY.")
        elif group and group not in sections() and group not in (OPEN, NAMED) and not keys.is_source(group):
            self._refuse_unknown(key, origin)
        else:
            try:
                is_text = set(keys.types_of(key)) <= {str, type(None)} and key in leaves()
                is_yaml = text[0] in ("\"'" if is_text else "[{\"'")
                value = yaml.read(text, str(origin)) if is_yaml else yaml.scalar(text)
            except ConfigError as unreadable:
                self._note(origin, str(unreadable))
                return
            if value is None and key in sections():  # unsets the group
                self._forget(key)
            else:
                self.take(group + dot, Pairs([(name, 0, value)]), lambda _: origin)

    def take_architecture(self) -> None:
        """Add the values of config.json in the folder model.hf.  A recipe may change only its rotary positions."""
        if not isinstance(folder := self.values.get("model.hf"), str):
            return
        try:
            keeps_low_bits = self.values.get("model.base_dtype") == "as_stored"
            self.pretrained, described = read_pretrained(folder, has_format=keeps_low_bits)
        except ConfigError as wrong:
            self.meant.add("model")
            self.problems.append(
                (self.origins["model.hf"], f"model.hf = {folder} ({self.origins['model.hf']}): {wrong}")
            )
            return
        architecture = model_keys(self.pretrained, described)
        kind = self.values.get("model.rope.scaling", architecture["model.rope.scaling"][0])
        for key, (value, where) in architecture.items():
            own = self.values.get(key)
            is_position = key.startswith("model.rope.") and key.removeprefix("model.rope.") not in _NOT_POSITIONS
            if is_position and key != "model.rope.base" and kind != architecture["model.rope.scaling"][0]:
                continue  # config.json has numbers of a scaling that the recipe replaces
            if own is None and not (is_position and key in self.values):
                self.values[key], self.origins[key] = value, Origin("derived", text=where)
            elif not is_position and own != value:
                problem = f"{key} = {show(own)} ({self.origins[key]}), but {where} says {show(value)}.  Remove {key}."
                self._note(self.origins[key], problem + _MORE.get(key, ""))

    def take_mtp(self) -> None:
        """Give the model a block for multi-token prediction if train.mtp trains one."""
        if self.values.get("train.mtp", "off") != "off" and "model.has_mtp" not in self.values:
            self.values["model.has_mtp"], self.origins["model.has_mtp"] = True, Origin("derived", text="train.mtp")

    def validate(self) -> Config:
        """The Config.  Raises one ConfigError with problems of the file, of the command line, and missing keys."""
        tree: dict[str, Any] = {}
        for key in [*sections(), *self.values]:
            *groups, name = key.split(".")
            branch = tree
            for group in groups:
                branch = branch.setdefault(group, {})
            branch[name] = {} if key in sections() else self.values[key]
        tree["model"]["pretrained"] = self.pretrained
        try:
            config = Config.model_validate(tree)
        except ValidationError as invalid:
            for error in invalid.errors(include_url=False):
                self.refuse(error["type"], error["loc"], error.get("ctx", {}).get("error"))
        if not self.problems:
            return config
        kinds = ("file", "command line", "default", "derived")
        ordered = sorted(self.problems, key=lambda p: (kinds.index(p[0].kind), p[0].line or 0))
        raise ConfigError(listed(list(dict.fromkeys(text for _, text in ordered))))

    def refuse(self, kind: str, location: Sequence[str | int], cause: object) -> None:
        """Adds one pydantic error to `problems`, as a text with the recipe key and the origin of its value.

        kind, location: type and loc of the error; cause: the exception of a validator, or None
        """
        if tuple(location[:2]) == ("data", "eval") and isinstance(sets := self.values["data.eval"], dict):
            groups = {name: rows for name, rows in sets.items() if isinstance(rows, dict)}
            if len(location) > 3 and location[3] in groups:
                if "RowsConfig" in str(location[4]):
                    self.refuse_held_out(kind, str(location[3]), [str(part) for part in location[5:6]], cause)
                return
            if len(location) == 3 and groups:
                return  # pydantic also reports that a mapping is no list
        form = "list" if NAMED in self.values else "dict"
        if ".".join(map(str, location[:2])) == NAMED and len(location) > 2 and not str(location[2]).startswith(form):
            return  # pydantic also reports the form that the user did not choose
        key = ""
        for part in location:
            longer = f"{key}.{part}".lstrip(".")
            source = form == "dict" and keys.is_source(longer)
            if longer in sections() or keys.in_schema(longer) in leaves() or key == OPEN or source:
                key = longer
        item, below = keys.item_of(key), location[key.count(".") + 1 :]
        if item is not None and len(below) > 1:
            self.refuse_in_item(kind, key, item, int(below[0]), str(below[1]))
        elif isinstance(cause, Conflict):
            if key and any(meant.rpartition(".")[0] == key for meant in self.meant):
                return  # an unknown key of this group may be what is missing
            for name, why in cause.problems:
                self.refuse_value(f"{key}.{name}".lstrip("."), why + ".")
        elif kind != "missing":
            self.refuse_value(key, f"; expected {keys.expected(key)}.{keys.hint(key, self.values[key])}")
        elif not self.meant & {key, key.split(".")[0], key.rpartition(".")[0]} and not self._lacks_model(key):
            about = (leaves()[keys.in_schema(key)].description or "").replace("\n", " ")
            self._note(
                Origin("default"),
                f"{key} is missing from {self.path}; expected {keys.expected(key)}.  {about}",
            )

    def _lacks_model(self, key: str) -> bool:
        """Whether `key` is a size of a model that the recipe does not describe at all; one problem says so."""
        if not key.startswith("model.") or any(name.startswith("model.") for name in self.values):
            return False
        if "model.hf" not in self.meant:
            problem = (
                f"model.hf is missing from {self.path}; expected a folder or a name on the hub, such as Qwen/Qwen3-8B"
            )
            sizes = "(A new model without files gives its sizes instead: model.num_layers, model.hidden_size, ...)"
            self._note(Origin("default"), f"{problem}.  {sizes}")
        return True

    def refuse_held_out(self, kind: str, name: str, field: Sequence[str], cause: object) -> None:
        """Adds an error in a held-out set that is a group of keys: {chat: {dataset: OWNER/NAME}}."""
        origin, group, written = self.origins["data.eval"], f"data.eval.{name}", self.values["data.eval"][name]
        problems = cause.problems if isinstance(cause, Conflict) else [(part, "") for part in field]
        for key, why in problems:
            value = f"{group}.{key} = {show(written.get(key))} ({origin})"
            if kind == "extra_forbidden":
                fields = ", ".join(RowsConfig.model_fields)
                self._note(origin, f"unknown key {group}.{key} ({origin}).  Keys of {group}: {fields}.")
            elif why:
                self._note(origin, f"{value} {why}.")
            else:
                self._note(origin, f"{value}; expected {keys.expected(f'{NAMED}.{name}.{key}')}.")

    def refuse_in_item(self, kind: str, key: str, item: type[Section], number: int, name: str) -> None:
        """Adds an error in a group of a list: optim.groups[0].lr_ratio."""
        group, origin = f"{key}[{number}]", self.origins[key]
        if kind == "extra_forbidden":
            fields = ", ".join(item.model_fields)
            close = [field for field in item.model_fields if field.startswith(name)]
            advice = f"Did you mean {close[0]}?  {item.model_fields[close[0]].description}" if close else ""
            self._note(origin, f"unknown key {group}.{name} ({origin}).  {advice or f'Keys of {group}: {fields}.'}")
            return
        is_given = "is missing" if kind == "missing" else f"= {show(self.values[key][number].get(name))}"
        self._note(origin, f"{group}.{name} {is_given} ({origin}); expected {keys.expected_in_item(item, name)}.")

    def refuse_value(self, key: str, why: str) -> None:
        """Adds a problem with the value of a key.  why: the end of the sentence after the value and its origin"""
        source = self.origins.get(key.rpartition(".")[0]) if named(key) else None
        origin = self.origins.get(key, source or Origin("default"))
        value = self.values[key] if key in self.values else leaves()[keys.in_schema(key)].default
        written = next((f"{name} (now called {key})" for name in self.names.get(key, ()) if name != key), key)
        self._note(origin, f"{written} = {show(value)} ({origin}){'' if why.startswith(';') else ' '}{why}")
