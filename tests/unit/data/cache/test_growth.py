"""The work of each reader for 1, 10 and 100 times the input, counted as calls and never timed.

Ten times the input may cost at most 11 times the calls; a loop over all pairs of its parts would cost 100 times. Work
inside a single C call is not counted.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from sft.checkpoint import manifest
from sft.config import yaml
from sft.console import QUIET
from sft.data.cache import digests
from sft.data.cache.corpus import file_names, find_prepared, map_prepared
from sft.data.cache.prepare import prepare
from sft.data.chat.tokenizer import ByteTokenizer
from sft.data.read.named_dataset import LoadedDataset
from sft.data.read.strict_json import parse_json
from sft.data.rows.formats import read_row
from sft.data.tokenizer import reading
from sft.errors import CheckpointError, SftError
from sft.hf.safetensors_files import SafetensorsFolder
from sft.hf.tensor_check import check_tensors
from sft.metrics.results.records import read_records
from sft.metrics.writers import JsonLines
from sft.recipe.load import parse_recipe
from sft.recipe.needs import check_paths
from sft.run.sample_log import SampleLog
from sft.weights.lora.peft.folder import read as read_adapter
from tests.builders import RECIPE
from tests.unit.fixtures.calls import calls
from tests.unit.fixtures.folder import config

TURN = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "r"}]


def object_with_keys(count: int, folder: Path) -> Callable[[], Any]:
    """An object whose last key occurs twice."""
    text = "{" + "".join(f'"k{i}":1,' for i in range(count)) + '"z":1,"z":2}'
    return lambda: parse_json(text)


def chat(count: int, folder: Path) -> Callable[[], Any]:
    row = {"messages": TURN * count}
    return lambda: read_row(row)


def user_turns(count: int, folder: Path) -> Callable[[], Any]:
    row = {"messages": TURN[:1] * count + TURN[1:]}
    return lambda: read_row(row)


def recipe_list(count: int, folder: Path) -> Callable[[], Any]:
    text = "data:\n  train:\n" + "".join(f"    - a{i}.jsonl\n" for i in range(count))
    return lambda: yaml.read(text, "a.yaml")


def key_given_often(count: int, folder: Path) -> Callable[[], Any]:
    text = "run: {dir: x}\n" * count
    return lambda: yaml.repeated(yaml.read(text, "a.yaml"))


def surplus_tensors(count: int, folder: Path) -> Callable[[], Any]:
    stored: dict[str, tuple[int, ...]] = {f"layers.{i}.experts.{i}.w{i}": (1,) for i in range(count)}
    return lambda: check_tensors(stored, {"w": (1,)}, "folder")


def index_of_files(count: int, folder: Path) -> Callable[[], Any]:
    """An index of shards that do not exist."""
    names = {f"w{i}": f"model-{i}.safetensors" for i in range(count)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return lambda: SafetensorsFolder(folder)


def header(count: int, folder: Path) -> Callable[[], Any]:
    save_file({f"w{i}": torch.zeros(1) for i in range(count)}, folder / "model.safetensors")
    return lambda: SafetensorsFolder(folder)


def files_of_a_manifest(count: int, folder: Path) -> Callable[[], Any]:
    """A manifest of files that do not exist."""
    files = {f"__{i}_0.distcp": {"bytes": 1, "sha256": "0"} for i in range(count)}
    (folder / "manifest.json").write_text(json.dumps({"format": "sft checkpoint 1", "files": files}))

    def read() -> None:
        held = manifest.read(folder)
        assert held is not None
        manifest.refuse(folder, manifest.damage(folder, held, verify="size"))

    return read


def records(count: int, folder: Path) -> Callable[[], Any]:
    """Metrics in which every other line is damaged, and so removed."""
    path = folder / "metrics.jsonl"
    path.write_text("".join(f'{{"kind": "train", "step": {step}}}\n[1]\n' for step in range(count)))
    return lambda: JsonLines(path, count, is_evaluated=True, console=QUIET).close()


def records_to_show(count: int, folder: Path) -> Callable[[], Any]:
    path = folder / "metrics.jsonl"
    path.write_text("".join(f'{{"kind": "train", "step": {step}}}\n' for step in range(count)))
    return lambda: read_records(path)


def sample_log(count: int, folder: Path) -> Callable[[], Any]:
    path = folder / "seen.jsonl"
    path.write_text("".join(f'{{"step": {step}, "chain": "c"}}\n' for step in range(count)))
    return lambda: SampleLog(path, count, "c").close()


def added_tokens(count: int, folder: Path) -> Callable[[], Any]:
    """Half of the tokens are in tokenizer.json, and all of them are in tokenizer_config.json, twice."""
    backend = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokens = [f"<t{i}>" for i in range(count)]
    backend.add_tokens(tokens[::2])
    backend.save(str(folder / "tokenizer.json"))
    decoder = {str(i + 2): {"content": token, "special": i % 3 == 0} for i, token in enumerate(tokens)}
    settings = {"added_tokens_decoder": decoder, "additional_special_tokens": tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    def read() -> None:
        assert len(reading._read("t", folder).added_ids) == count

    return read


def missing_data_files(count: int, folder: Path) -> Callable[[], Any]:
    names = ", ".join(f"{folder}/a{i}.jsonl" for i in range(count))
    return lambda: check_paths(parse_recipe(RECIPE, "tests", [f"data.train=[{names}]"]))


def data_files(count: int, folder: Path) -> Callable[[], Any]:
    names = [f"{folder}/a{i}.jsonl" for i in range(count)]
    for name in names:
        Path(name).touch()
    return lambda: check_paths(parse_recipe(RECIPE, "tests", [f"data.train=[{', '.join(names)}]", "data.eval=null"]))


def weights_of_an_adapter(count: int, folder: Path) -> Callable[[], Any]:
    """An adapter with modules that are trained whole: half of the weights have no name, and half of the names have no
    weight."""
    save_file(
        {f"base_model.model.m{i}.weight": torch.zeros(1) for i in range(count)}, folder / "adapter_model.safetensors"
    )
    names = [f"m{i}" for i in range(count // 2, count + count // 2)]
    content = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "modules_to_save": names}
    (folder / "adapter_config.json").write_text(json.dumps(content))

    def read() -> None:
        with pytest.raises(CheckpointError, match="is an adapter that cannot be continued"):
            read_adapter(folder)

    return read


class Name(str):
    """A name whose comparisons are calls.  Searching a list for a plain text is a single call, however long the list
    is."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


def names_of_files(count: int, folder: Path) -> Callable[[], Any]:
    names = [Name(f"a{i}") for i in range(count)]
    datasets = [LoadedDataset(name=name, commit=None, slices=(), columns=None) for name in names]
    return lambda: file_names(datasets)


def prepared_files(count: int, folder: Path) -> Callable[[], Any]:
    """Files with the same content, which share one store; each file is a source of its own."""
    row = '{"tokens": [1, 2], "loss_mask": [1, 1]}\n'
    files = [folder / f"a{i}.jsonl" for i in range(count)]
    for file in files:
        file.write_text(row)
    names = [Name(f"source {i}") for i in range(count)]
    data, tokenizer, inputs = config(), ByteTokenizer(), [str(file) for file in files]
    prepare(inputs[:1], data, tokenizer, folder / "cache", QUIET)

    def read() -> None:
        corpus = prepare(inputs, data, tokenizer, folder / "cache", QUIET, names)
        assert len(corpus) == count and corpus.sample(count - 1).source == count - 1
        corpus.summary(), corpus.report(), corpus.name(count - 1)
        prepared = find_prepared(inputs, data, tokenizer, folder / "cache", command="")
        assert len(map_prepared(prepared, data, names, command="")) == count

    return read


READERS = [
    names_of_files,
    prepared_files,
    added_tokens,
    missing_data_files,
    data_files,
    weights_of_an_adapter,
    object_with_keys,
    chat,
    user_turns,
    recipe_list,
    key_given_often,
    surplus_tensors,
    index_of_files,
    header,
    files_of_a_manifest,
    records,
    records_to_show,
    sample_log,
]


@pytest.fixture(autouse=True)
def digests_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest is remembered once its file is two seconds old, but the counted work must not depend on time."""
    monkeypatch.setattr(digests, "_RECENT_NS", 1 << 60)


def test_the_work_of_tokenising_grows_with_the_files(tmp_path: Path) -> None:
    """Each file has different rows, so each has a store of its own."""

    def work(count: int) -> int:
        folder = tmp_path / str(count)
        folder.mkdir()
        files = [folder / f"a{i}.jsonl" for i in range(count)]
        for i, file in enumerate(files):
            file.write_text(f'{{"tokens": [1, {i % 250}, {i // 250}], "loss_mask": [1, 1, 1]}}\n')
        inputs = [str(file) for file in files]
        return calls(lambda: prepare(inputs, config(), ByteTokenizer(), folder / "cache", QUIET))

    work(1)
    few, more = work(20), work(200)
    assert more <= 11 * few, (few, more)


@pytest.mark.parametrize("reader", READERS)
def test_the_work_of_a_reader_grows_with_its_input(
    reader: Callable[[int, Path], Callable[[], Any]], tmp_path: Path
) -> None:
    def work(count: int) -> int:
        folder = tmp_path / str(count)
        folder.mkdir()
        read = reader(count, folder)

        def read_or_refuse() -> None:
            with suppress(SftError):
                read()

        return calls(read_or_refuse)

    work(1)  # imports and compiles everything that the first call needs
    few, more, most = (work(count) for count in (20, 200, 2000))
    assert more <= 11 * few and most <= 11 * more, (few, more, most)
