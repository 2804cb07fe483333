"""The table of growth: what each reader does for 1, 10 and 100 times the input.  Work is counted as calls, never timed.

Ten times the input may cost at most 11 times the calls.  A loop over all pairs of its parts would cost 100 times.  What
one call in C does is not counted.
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

TURN = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "r"}]


def object_with_keys(count: int, folder: Path) -> Callable[[], Any]:
    """The last key occurs twice."""
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
    """Every other line of the metrics is damaged, and removed."""
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
    """Half of them are in tokenizer.json, and all in tokenizer_config.json, twice."""
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
    """Modules that are trained whole: half of the weights have no name, and half of the names have no weight."""
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


READERS = [
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

    work(1)  # what is imported or compiled at the first use
    few, more, most = (work(count) for count in (20, 200, 2000))
    assert more <= 11 * few and most <= 11 * more, (few, more, most)
