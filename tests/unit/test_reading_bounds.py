"""What a file costs before it is refused: work is counted, never timed.  And what a message of a file may show."""

import io
import json
import pickle
from pathlib import Path

import pytest

from sft.config import yaml
from sft.console import Console
from sft.errors import CheckpointError, ConfigError, DataError, first_few
from sft.hf import architecture
from sft.mcore.checkpoint_io import metadata_index
from sft.metrics.writers import JsonLines
from sft.recipe.load import parse_recipe
from tests.unit.fixtures import hf
from tests.unit.fixtures.calls import calls

# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\r", "\x7f", "\x9b", "\u2028", "\u202e", "\ud800"])
def test_no_control_character_reaches_a_terminal(character: str) -> None:
    said = io.StringIO()
    Console(0, said).say(f"tensor {character}[2J")
    assert character not in said.getvalue() and "[2J" in said.getvalue()
    assert character not in str(DataError(f"key {character}[2J"))


def test_escapes_are_readable() -> None:
    assert str(DataError("\x1b]0;title\x07 a\tb\nc ä 你")) == r"\x1b]0;title\x07 a" + "\tb\nc ä 你"


def test_a_message_has_at_most_4000_characters() -> None:
    assert str(DataError("x" * 4000)) == "x" * 4000
    message = str(DataError("x" * 1_000_000))
    assert len(message) <= 4000 and message.endswith("xx ... and 996,060 more characters")


def test_lists_are_shortened_where_they_are_made() -> None:
    assert first_few("abcdef") == ["a", "b", "c", "d", "e", "f"]
    assert first_few(str(i) for i in range(300_000))[4:] == ["4", "... and 299,995 more"]


# --- the index of a checkpoint ---------------------------------------------------------------------------------------


def nested(depth: int) -> bytes:
    """A pickled tuple of 2**depth parts in some five bytes for each level."""
    out = b"K\x01"
    for level in range(depth):
        out += b"q" + bytes([level]) + b"0h" + bytes([level]) + b"h" + bytes([level]) + b"\x86"
    return out


def read_index(folder: Path, content: bytes) -> None:
    (folder / ".metadata").write_bytes(content)
    metadata_index.read_index(folder)


@pytest.mark.parametrize("operation", [b"}%sK\x01s.", b"}(%sK\x01u.", b"(%sK\x01d."])
def test_a_key_of_an_index_is_a_text_or_a_record(operation: bytes, tmp_path: Path) -> None:
    """The hash of this key would visit 2**20 parts; with three more bytes for each level, it would never end."""
    with pytest.raises(CheckpointError, match="a key is of the type tuple"):
        read_index(tmp_path, b"\x80\x04" + operation.replace(b"%s", nested(20)))


def test_a_set_is_not_in_an_index(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not the index"):
        read_index(tmp_path, b"\x80\x04(" + nested(20) + b"\x91.")


def test_nested_tuples_are_read_in_linear_work(tmp_path: Path) -> None:
    """Ten times the levels: at most some ten times the calls, and a message of the same length."""

    def refuse(depth: int) -> int:
        content = b"\x80\x04" + b")" + b"\x85" * depth + b"."

        def work() -> None:
            with pytest.raises(CheckpointError, match="it holds a tuple"):
                read_index(tmp_path, content)

        return calls(work)

    few, more, most = (refuse(depth) for depth in (1_000, 10_000, 100_000))
    assert more < 11 * few and most < 11 * more


def test_a_shape_of_an_index_has_few_axes() -> None:
    with pytest.raises(ValueError, match="is not a shape") as refused:
        metadata_index._sizes((1,) * 100_000)
    assert len(str(refused.value)) < 200


def test_an_index_is_read_by_allowed_operations_only(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not the index"):
        read_index(tmp_path, pickle.dumps(bytearray(5), protocol=5))


# --- recipes and config.json -----------------------------------------------------------------------------------------


def refuse_recipe(text: str) -> int:
    def work() -> None:
        with pytest.raises(ConfigError) as refused:
            parse_recipe(text, "a.yaml")
        assert len(str(refused.value)) <= 4000

    return calls(work)


def test_a_recipe_of_many_unknown_keys_is_refused_in_linear_work() -> None:
    few, more = (refuse_recipe("".join(f"k{i}: 1\n" for i in range(n))) for n in (400, 4_000))
    assert more < 11 * few


def test_a_recipe_of_90000_keys_is_refused_before_it_is_read() -> None:
    with pytest.raises(ConfigError, match="a.yaml, line 10000: more than 20,000 keys and values"):
        yaml.read("".join(f"k{i}: 1\n" for i in range(90_000)), "a.yaml")


def test_a_key_that_occurs_often_is_counted_once_for_each_time() -> None:
    assert yaml.repeated(yaml.Pairs([("a", 1, 1)] * 4 + [("b", 5, 1)])) == ["a", "a", "a"]


@pytest.mark.parametrize("layers", [4097, 10**7, 10**18])
def test_a_model_of_too_many_layers_is_refused_at_once(layers: int) -> None:
    content = {**hf.config("qwen2").to_dict(), "num_hidden_layers": layers, "layer_types": None}
    with pytest.raises(ConfigError, match=f"num_hidden_layers = {layers}; at most 4,096 are supported"):
        architecture.architecture(content, "config.json")


def test_steps_have_a_bound() -> None:
    with pytest.raises(ConfigError, match="train.num_steps = 1000000000000000000 .* of at most 100,000,000"):
        parse_recipe("train: {num_steps: 1000000000000000000}", "a.yaml")


# --- metrics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damaged", [b"\xff\xfe", b'{"kind": "train"}', b"[1]", b"5", b'{"kind": "train", "step": "2"}', b"[" * 100_000]
)
def test_a_damaged_line_of_metrics_is_removed_with_a_sentence(damaged: bytes, tmp_path: Path) -> None:
    path, said = tmp_path / "metrics.jsonl", io.StringIO()
    one, two = (json.dumps({"kind": "train", "step": step}).encode() for step in (1, 2))
    path.write_bytes(one + b"\n" + damaged + b"\n" + two + b'\n{"kind": "tr')
    JsonLines(path, 1, is_evaluated=True, console=Console(0, said)).close()
    assert path.read_bytes() == one + b"\n"
    assert said.getvalue() == f"WARNING: {path} had lines that are no records, which were removed: line 2\n"
