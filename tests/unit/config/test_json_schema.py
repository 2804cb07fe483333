"""The JSON Schema of a recipe accepts what `sft check` accepts, and refuses what it refuses for a type or a name."""

import copy
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sft.cli import main
from sft.config import yaml
from sft.config.json_schema import json_schema
from sft.config.keys import NAMED, OPEN, expected, is_source, leaves, named, sections
from sft.errors import ConfigError
from sft.recipe.load import parse_recipe

SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)
RECIPES = sorted((Path(__file__).resolve().parents[3] / "recipes").rglob("*.yaml"))
TREE = {
    "run": {"dir": "runs/a"},
    "model": {
        **{"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4},
        "init_from": "random",
    },
    "data": {"train": ["a.jsonl"], "seq_length": 64},
    "train": {"num_steps": 1, "global_batch_size": 1},
    "optim": {"lr": 1e-3},
}
# Values of every type, at and beyond bounds, but no whole float such as 1.0: JSON Schema counts it as an integer.
VALUES: tuple[Any, ...] = (
    *(None, True, "word", "", "auto", "all", 0, 1, -1, 5000, 0.5, 1.5, -0.5),
    *([], [0], [1], ["word"], [""], {}, {"a": "word"}, {"a b": 1}),
)
BATCH = 20  # keys of one recipe: an error lists at most 50 mistakes


def faults(tree: Any) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(tree)]


def test_it_is_a_schema_with_the_docstrings() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    lr = SCHEMA["properties"]["optim"]["properties"]["lr"]
    assert lr == {
        "description": "Peak learning rate: often 1e-5 for all weights, and 2e-4 for LoRA.",
        "exclusiveMinimum": 0.0,
        "type": "number",
    }
    described = [key for key in leaves() if not named(key) and not _at(key).get("description")]
    assert described == []


def _at(key: str) -> dict[str, Any]:
    node = SCHEMA
    for name in key.split("."):
        node = node["properties"][name]
    return node


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert yaml.plain(yaml.read(capsys.readouterr().out, "schema")) == SCHEMA


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid(path: Path) -> None:
    assert faults(yaml.plain(yaml.read(path.read_text(), path.name))) == []


@pytest.mark.parametrize(
    "group, keys, fault",
    [
        ("run", {"dir": None}, "None is not of type 'string'"),
        ("optim", {"learning_rate": 1e-5}, "Additional properties are not allowed ('learning_rate' was unexpected)"),
        ("parallel", {"cp": 0}, "0 is less than the minimum of 1"),
        ("parallel", {"cp": "4"}, "'4' is not of type 'integer'"),
        ("train", {"recompute": "some"}, "'some' is not one of ['none', 'selective', 'attention_kept', 'full']"),
        ("model", {"megatron": {"fp4": 3}}, "Additional properties are not allowed ('fp4' was unexpected)"),
        ("model", {"megatron": {"moe_permute_fusion": True}}, "True is not one of [False]"),
        ("trian", {}, "Additional properties are not allowed ('trian' was unexpected)"),
    ],
)  # fmt: skip
def test_wrong_recipes_are_refused(group: str, keys: dict[str, Any], fault: str) -> None:
    tree: dict[str, Any] = copy.deepcopy(TREE)
    tree[group] = {**tree.get(group, {}), **keys}
    assert faults(tree) == [fault]
    with pytest.raises(ConfigError):
        parse_recipe(_text(tree), "a.yaml")


def test_what_a_recipe_needs() -> None:
    assert faults(TREE) == []
    without = {**TREE, "model": {"init_from": "random"}}
    sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
    assert faults(without) == [f"'{name}' is a required property" for name in sizes]
    assert faults({**TREE, "model": {"hf": "models/tiny"}}) == []
    assert faults({**TREE, "model": {"hf": None, "init_from": "random"}}) == faults(without)
    assert faults({}) == [f"'{name}' is a required property" for name in ("run", "model", "data", "train", "optim")]


def test_sources_and_old_names() -> None:
    sources = {"chat": {"files": "a.jsonl", "weight": 2}, "code": {"dataset": "org/name", "split": "train[:10%]"}}
    tree: dict[str, Any] = {**TREE, "data": {"train": sources, "eval": {"chat": "b.jsonl"}, "seq_length": 64}}
    assert faults(tree) == []
    for wrong in ({"chat": {"files": "a.jsonl", "weight": 0}}, {"a b": {"files": "a.jsonl"}}, {"a": "b.jsonl"}, {}):
        assert len(faults({**TREE, "data": {"train": wrong, "seq_length": 64}})) == 1
    old = {**TREE, "train": {**TREE["train"], "max_bad_steps": 1}}
    assert faults(old) == []
    assert _at("train.max_bad_steps")["deprecated"] is True


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_it_agrees_with_the_reader_of_recipes(value: Any) -> None:
    """For every key: the schema refuses a value if and only if the reader says that it expected something else.

    The reader names the source, not the key, if a mapping in data.train is wrong.
    """
    keys = [key for key in leaves() if not named(key) and key != OPEN and not (key == NAMED and type(value) is dict)]
    differing = {}
    for first in range(0, len(keys), BATCH):
        batch = keys[first : first + BATCH]
        text = _told(batch, value)
        for key in batch:
            is_refused = f"; expected {expected(key)}." in _part(text, key)
            if is_refused != bool(list(jsonschema.Draft7Validator(_at(key)).iter_errors(value))):
                differing[key] = (is_refused, expected(key))
    assert differing == {}


def _part(text: str, key: str) -> str:
    """The lines of a message that are about `key`."""
    return "\n".join(line for line in text.split("\n") if f"{key} = " in line)


def _told(keys: list[str], value: Any) -> str:
    """What the reader says about a recipe with `value` as the value of all keys."""
    tree: dict[str, Any] = copy.deepcopy(TREE)
    for key in keys:
        *groups, name = key.split(".")
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[name] = value
    try:
        parse_recipe(_text(tree), "a.yaml")
    except ConfigError as error:
        return str(error)
    return ""


def _text(tree: dict[str, Any]) -> str:
    return "\n".join(f"{group}: {yaml.write(keys) if keys else '{}'}" for group, keys in tree.items())


def test_every_group_and_key_is_there() -> None:
    for key in sections():
        assert _at(key)["properties"], key
    sources = next(kind for kind in _at("data.train")["anyOf"] if "patternProperties" in kind)
    (source,) = sources["patternProperties"].values()
    written = {key.rpartition(".")[2] for key in leaves() if is_source(key.rpartition(".")[0])}
    assert source["properties"].keys() == written
