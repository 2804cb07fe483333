"""The cost of reading a file until it is refused, counted as work and never timed; and bounds on error messages about a
file."""

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from sft.checkpoint import folders, held_out_pass
from sft.checkpoint.train_state import TrainState
from sft.config import yaml
from sft.console import Console
from sft.data.packing import plan_files
from sft.data.read import rows
from sft.errors import CheckpointError, ConfigError, DataError, first_few
from sft.estimate import constants
from sft.files.folder_files import CONFIG_BYTES, LIST_BYTES, WORD_BYTES, UnsafeFileError, read_file
from sft.hf import architecture
from sft.hf.tensor_check import Shape, check_tensors, fold_by_layer
from sft.mcore.checkpoint_io import metadata_index
from sft.metrics import writers
from sft.metrics.writers import JsonLines
from sft.recipe.load import parse_recipe
from sft.run import status
from sft.run.sample_log import SampleLog
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


def test_a_comparison_of_tensors_names_some_of_each_kind() -> None:
    """10,000 extra tensors, a missing one, shapes of 1,000 axes, and layer numbers that do not form ranges."""
    stored: dict[str, Shape] = {f"surplus_{i:06}": (1,) for i in range(10_000)} | {"a": (1,) * 1000}
    with pytest.raises(CheckpointError) as refused:
        check_tensors(stored, {"a": (2,), "b": (1,)}, "folder", other=[f"other {i}" for i in range(22)])
    lines = str(refused.value).split("\n  ")
    assert lines[:3] == ["folder does not hold the expected tensors:", "missing: b", "surplus: surplus_000000"]
    assert lines[21:24] == [
        "surplus: surplus_000019",
        "... and 9,980 more",
        "different shape: a is 1 x 1 x 1 x 1 x 1 x ... and 995 more, expected 2",
    ]
    assert lines[24:] == [*(f"other {i}" for i in range(20)), "... and 2 more"]
    [folded] = fold_by_layer(f"model.layers.{i}.a" for i in range(0, 10_000, 2))
    assert folded == f"model.layers.*.a (layers {', '.join(str(i) for i in range(0, 40, 2))}, ... and 4,980 more)"


# --- the index of a checkpoint ---------------------------------------------------------------------------------------


def nested(depth: int) -> bytes:
    """A pickled tuple with 2**depth leaves, in about five bytes for each level."""
    out = b"K\x01"
    for level in range(depth):
        out += b"q" + bytes([level]) + b"0h" + bytes([level]) + b"h" + bytes([level]) + b"\x86"
    return out


def read_index(folder: Path, content: bytes) -> None:
    (folder / ".metadata").write_bytes(content)
    metadata_index.read_index(folder)


@pytest.mark.parametrize("operation", [b"}%sK\x01s.", b"}(%sK\x01u.", b"(%sK\x01d."])
def test_a_key_of_an_index_is_a_text_or_a_record(operation: bytes, tmp_path: Path) -> None:
    """Hashing this key would visit 2**20 parts; with three more bytes for each level, it would never end."""
    with pytest.raises(CheckpointError, match="a key is of the type tuple"):
        read_index(tmp_path, b"\x80\x04" + operation.replace(b"%s", nested(20)))


def test_a_set_is_not_in_an_index(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not the index"):
        read_index(tmp_path, b"\x80\x04(" + nested(20) + b"\x91.")


def test_nested_tuples_are_read_in_linear_work(tmp_path: Path) -> None:
    """With ten times the levels, at most about ten times the calls, and a message of the same length."""

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


@pytest.mark.parametrize(
    "text", [r'{"\ud83d\ude80": "a \ud83d\ude80 b"}', r'"\U0001f680": "a \U0001f680 b"', "🚀: a 🚀 b"]
)
def test_a_recipe_as_json_may_escape_an_emoji_as_a_pair(text: str) -> None:
    assert yaml.plain(yaml.read(text, "a.yaml")) == {"🚀": "a 🚀 b"}


@pytest.mark.parametrize("text", [r'"\ud83d"', r'"\ude80\ud83d"', r'a: "\ud83d"', r'"\ud83d": a'])
def test_half_a_pair_in_a_recipe_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a.yaml, line 1: half a surrogate pair, which is not valid text"):
        yaml.read(text, "a.yaml")


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


# --- small files -----------------------------------------------------------------------------------------------------


def calibration(path: Path) -> None:
    with pytest.raises(ConfigError, match="is no file of constants of this version: .* sft plan --calibrate"):
        constants.read(path)


def state(path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the state of a run: .*  Remove it, and the run starts"):
        status.read(path.parent)


def pointer(path: Path) -> None:
    assert folders.read_pointer(path.parent) is None


def wandb_id(path: Path) -> None:
    with pytest.raises(ConfigError, match="does not hold the id of a run: .*  Remove it to begin a new one"):
        writers._kept_id(path)


def sample_log(path: Path) -> None:
    with pytest.raises(ConfigError, match="not a regular file.  Remove it; the run then begins a new log"):
        SampleLog(path, 0, "")


def held_out_pass_file(path: Path) -> None:
    assert held_out_pass.added(path.parent, TrainState(step=7)) == TrainState(step=7)


def plan(path: Path) -> None:
    with pytest.raises(DataError, match="the plan .* cannot be read: |is not a plan"):
        list(plan_files._rows(path))


def saved_dataset(path: Path) -> None:
    with pytest.raises(DataError, match="state.json does not describe a saved dataset: "):
        rows.data_files(path.parent)


SMALL_FILES = {
    "h100.json": (calibration, CONFIG_BYTES),
    "run_state.json": (state, CONFIG_BYTES),
    "latest_checkpointed_iteration.txt": (pointer, WORD_BYTES),
    "wandb_id": (wandb_id, WORD_BYTES),
    "held_out_pass.json": (held_out_pass_file, CONFIG_BYTES),
    "state.json": (saved_dataset, LIST_BYTES),
    "seen.jsonl": (sample_log, None),
    "plan.jsonl": (plan, None),
}


@pytest.mark.parametrize("name", SMALL_FILES)
def test_a_small_file_is_refused_before_it_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe, a link to an endless device, a folder, and a file that exceeds the bound by one byte.  No byte is
    read."""
    refuse, most = SMALL_FILES[name]
    path = tmp_path / name
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("the file was read"))
    os.mkfifo(path)
    refuse(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    refuse(path)
    path.unlink()
    path.mkdir()
    refuse(path)
    path.rmdir()
    if most is not None:
        path.touch()
        os.truncate(path, most + 1)
        refuse(path)


@pytest.mark.parametrize("name", ["h100.json", "run_state.json", "held_out_pass.json", "state.json", "plan.jsonl"])
@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"null", b"[1]", b"{"])
def test_a_small_file_of_another_content_is_refused_in_a_sentence(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    SMALL_FILES[name][0](tmp_path / name)


def test_a_line_of_the_sample_log_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a line never ends, memory holds no more of it than the bound."""
    path, line = tmp_path / "seen.jsonl", b'{"step": 1, "epoch": 0, "batch": 0, "samples": [0], "chain": "c"}\n'
    path.write_bytes(line + b"x" * 1000)
    monkeypatch.setattr("sft.run.sample_log.LIST_BYTES", 100)
    lengths = []
    original = json.loads
    monkeypatch.setattr(json, "loads", lambda text: lengths.append(len(text)) or original(text))
    SampleLog(path, 1, "c").close()
    assert lengths == [66, 100] and path.read_bytes() == line


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_refused_file_leaves_no_open_handle(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "a")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(UnsafeFileError, match="not a regular file"):
            read_file(tmp_path / "a", 100)
    assert len(os.listdir("/proc/self/fd")) == before
