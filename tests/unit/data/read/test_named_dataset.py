"""Datasets by name, from local folders: rows equal those of `datasets.load_dataset`; names, stores and refusals."""

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft.config import NamedDataset
from sft.console import QUIET, Console
from sft.data.cache.corpus import Corpus, find_prepared, map_prepared
from sft.data.cache.loaded_datasets import open_inputs
from sft.data.cache.prepare import prepare
from sft.data.chat.tokenizer import ByteTokenizer
from sft.data.read.named_dataset import LoadedDataset, load_dataset
from sft.data.read.rows import index_rows, read_rows
from sft.errors import DataError
from tests.unit.corpora import ROW, corpus_of, write
from tests.unit.fixtures.folder import config

datasets = pytest.importorskip("datasets")


def chats(first: int, stop: int) -> list[dict[str, Any]]:
    """Chats of different lengths, with a column that does not belong to a chat."""
    return [
        {"messages": [{"role": "user", "content": "q" * i}, {"role": "assistant", "content": f"a{i}"}], "n": i}
        for i in range(first, stop)
    ]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Datasets are converted into a folder of this test, without progress bars and without network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hf")))
        datasets.disable_progress_bars()
        yield
        datasets.enable_progress_bars()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two splits, the first with two files of 12 and 11 rows."""
    home = tmp_path / "chats"
    home.mkdir()
    write(home / "train-00000-of-00002.jsonl", *chats(1, 13))
    write(home / "train-00001-of-00002.jsonl", *chats(13, 24))
    write(home / "test.jsonl", *chats(100, 105))
    return home


def loaded(*inputs: NamedDataset, cache: Path, log: list[str] | None = None) -> list[LoadedDataset]:
    said = io.StringIO()
    opened = open_inputs(inputs, cache, Console(0, said))
    if log is not None:
        log.extend(said.getvalue().splitlines())
    return [dataset for dataset in opened if isinstance(dataset, LoadedDataset)]


@pytest.mark.parametrize("split", ["train", "train[:10%]", "train[5:14]", "test+train[-2:]", "train[50%:75%]"])
def test_rows_are_those_of_load_dataset(folder: Path, split: str) -> None:
    """Any range of rows, across files of a split and across splits; a row is named by its position in the split."""
    reference = datasets.load_dataset(str(folder), split=split)
    found = load_dataset(NamedDataset(str(folder), split=split))
    rows = list(read_rows(found))
    assert [row for _, row in rows] == reference.to_list() and len(rows) > 0
    assert [number for number, _ in rows] == list(range(1, len(reference) + 1))
    index = index_rows(found)
    assert (index.num_rows, found.commit, str(found)) == (len(reference), None, f"{folder} {split}")
    for start in range(0, len(rows), 3):
        assert list(read_rows(found, index, start, start + 2)) == rows[start : start + 2]


def test_columns_get_our_names_and_hide_others(tmp_path: Path) -> None:
    """A column `tokens` beside messages would give a row two formats."""
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", *({"talk": row["messages"], "tokens": 7} for row in chats(1, 4)))
    named = NamedDataset(str(tmp_path / "data"), columns=(("messages", "talk"),))
    assert [row for _, row in read_rows(load_dataset(named))] == [{"messages": row["messages"]} for row in chats(1, 4)]
    with pytest.raises(DataError, match="has no column chat, which columns names.  Its columns are talk, tokens."):
        load_dataset(NamedDataset(str(tmp_path / "data"), columns=(("messages", "chat"),)))


def test_nested_features(tmp_path: Path) -> None:
    """A list of structs, a struct of lists (a Sequence of older versions), a class label, and nulls."""
    from datasets import ClassLabel, Dataset, Features, List, Value

    features = Features(
        {
            "messages": List({"role": Value("string"), "content": Value("string"), "weight": Value("float32")}),
            "label": ClassLabel(names=["good", "bad"]),
            "system": Value("string"),
        }
    )
    turns = [{"role": "user", "content": "a", "weight": None}, {"role": "assistant", "content": "b", "weight": 0.5}]
    (tmp_path / "lists").mkdir()
    rows = [{"messages": turns, "label": 1, "system": None}]
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "lists" / "train.parquet")
    (row,) = [row for _, row in read_rows(load_dataset(NamedDataset(str(tmp_path / "lists"))))]
    assert row == {"messages": [{"role": "user", "content": "a"}, turns[1]], "label": 1}
    columns = {"role": ["user", "assistant"], "content": ["a", "b"], "weight": [None, 0.5]}
    (tmp_path / "struct").mkdir()
    Dataset.from_list([{"messages": columns}]).to_parquet(tmp_path / "struct" / "train.parquet")
    corpora = [
        prepare([NamedDataset(str(tmp_path / name))], config(), ByteTokenizer(), tmp_path / "cache", QUIET)
        for name in ("lists", "struct")
    ]
    assert [corpus.sample(0).weights.max() for corpus in corpora] == [0.5, 0.5]
    assert corpora[0].digest == corpora[1].digest


def test_samples_and_digests_are_those_of_the_same_rows_in_a_file(folder: Path, tmp_path: Path) -> None:
    """So runs on both train on the same samples in the same order, and a run on one may resume on the other."""
    file = corpus_of(write(tmp_path / "same.jsonl", *chats(1, 24)))
    cache = tmp_path / "cache"
    found = prepare([NamedDataset(str(folder))], config(num_workers=2), ByteTokenizer(), cache, QUIET)
    assert found.digest == file.digest and len(found) == 23
    assert found.name(13) == f"{folder} train row 14" and found.sources == (f"{folder} train",)
    # A run finds the stores without `datasets`, also if the cache of `datasets` was removed.
    shutil.rmtree(datasets.config.HF_DATASETS_CACHE)
    again = run(NamedDataset(str(folder)), cache)
    assert (again.digest, again.name(13)) == (file.digest, found.name(13))


def run(dataset: NamedDataset, cache: Path) -> Corpus:
    """The corpus as a training run maps it."""
    prepared = find_prepared([dataset], config(), ByteTokenizer(), cache, command="sft data prepare a.yaml")
    return map_prepared(prepared, config(), command="sft data prepare a.yaml")


def test_a_run_refuses_what_is_not_prepared(folder: Path, tmp_path: Path) -> None:
    cache, named = tmp_path / "cache", NamedDataset(str(folder), split="test")
    with pytest.raises(DataError, match="test is not loaded into .*cache.  First run .* sft data prepare a.yaml"):
        run(named, cache)
    prepare([named], config(), ByteTokenizer(), cache, QUIET)
    assert len(run(named, cache)) == 5
    write(folder / "test.jsonl", *chats(100, 106))
    with pytest.raises(DataError, match="test has changed since it was loaded"):
        run(named, cache)
    assert len(prepare([named], config(), ByteTokenizer(), cache, QUIET)) == 6 == len(run(named, cache))


def test_stores_follow_rows_and_columns(folder: Path, tmp_path: Path) -> None:
    """A store does not depend on the dataset's name: the same rows under another name have the same store."""
    cache = tmp_path / "cache"
    columns = (("messages", "messages"),)
    wanted = [
        NamedDataset(str(folder)),
        NamedDataset(str(folder), split="train[:23]"),
        NamedDataset(str(folder), split="train[:22]"),
        NamedDataset(str(folder), split="train[1:]"),
        NamedDataset(str(folder), columns=columns),
        NamedDataset(str(folder), split="test"),
    ]
    digests = [dataset.digest for dataset in loaded(*wanted, cache=cache)]
    assert digests[0] == digests[1] and len(set(digests)) == 5
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert [dataset.digest for dataset in loaded(NamedDataset(str(moved)), cache=cache)] == digests[:1]


def test_a_folder_that_did_not_change_is_not_loaded_again(folder: Path, tmp_path: Path) -> None:
    log: list[str] = []
    for _ in range(2):
        loaded(NamedDataset(str(folder)), cache=tmp_path / "cache", log=log)
    assert log == [f"{folder} train: 23 rows"]


def test_bad_rows_are_named_and_counted(folder: Path, tmp_path: Path) -> None:
    write(folder / "test.jsonl", *chats(1, 20), {"messages": [{"role": "user", "content": "no answer"}], "n": 0})
    named = NamedDataset(str(folder), split="test")
    with pytest.raises(DataError, match=rf"^{folder} test row 20: no assistant turn"):
        prepare([named], config(), ByteTokenizer(), tmp_path / "cache", QUIET)
    corpus = prepare([named], config(on_bad_row="skip"), ByteTokenizer(), tmp_path / "cache", QUIET)
    report = next(iter(corpus.row_reports.values()))
    assert (report.rows, report.rows_skipped, report.skipped) == (20, 1, (20,))
    assert f"{folder} test: 19 samples" in corpus.summary() and "skipped 1 bad rows: row 20" in corpus.summary()


def save_to_disk(home: Path) -> None:
    datasets.Dataset.from_list([ROW]).save_to_disk(home)


def program(home: Path) -> None:
    (home / f"{home.name}.py").write_text("raise SystemExit('the code of a dataset ran')")


def images(home: Path) -> None:
    (home / "train.tar").write_bytes(b"")


@pytest.mark.parametrize(
    ("make", "named", "complaint"),
    [
        (None, {"split": "train_sft"}, "has no split train_sft.  Its splits are train, test; a part of one is written"),
        (None, {"split": "train[:"}, r"has no split train\[:.*Its splits are train, test"),
        (None, {"config": "fr"}, r"cannot be loaded: BuilderConfig 'fr' not found. Available: \['default'\]."),
        (None, {"revision": "main"}, "is a folder, which has no revision main.  Remove revision."),
        (save_to_disk, {}, "was written by save_to_disk.  Name the folder of one split with files: PATH"),
        (program, {}, r"is a program \(home.py\), and code of a dataset is not run.  .*refs/convert/parquet"),
        (images, {}, "holds files of format webdataset, which may be more than data."),
        (lambda home: None, {}, "cannot be loaded: The directory at .* doesn't contain any data files"),
        (lambda home: write(home / "train.jsonl", '{"a": 1}', '{"a": ['), {}, "cannot be loaded: .*at position 6"),
    ],
)
def test_refusals(folder: Path, tmp_path: Path, make: Any, named: dict[str, Any], complaint: str) -> None:
    """Each refusal is one paragraph, and leaves nothing in the cache."""
    if make is not None:
        folder = tmp_path / "home"
        folder.mkdir()
        make(folder)
    with pytest.raises(DataError) as caught:
        loaded(NamedDataset(str(folder), **named), cache=tmp_path / "cache")
    pytest.raises(DataError, load_dataset, NamedDataset(str(folder), **named)).match(complaint)
    assert "\n" not in str(caught.value) and not (tmp_path / "cache" / "datasets").exists()


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("./nowhere", "dataset ./nowhere does not exist .* and is no name of a dataset."),
        ("/data/a/b", "dataset /data/a/b does not exist"),
        ("a.jsonl", "dataset a.jsonl is a file.  Name it with files: a.jsonl instead of dataset."),
    ],
)
def test_paths_that_are_no_folder(name: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", ROW)
    with pytest.raises(DataError, match=complaint):
        load_dataset(NamedDataset(name))


def test_memory_does_not_grow_with_a_dataset(folder: Path) -> None:
    """Rows come in batches of 64 from one Arrow table: the first row of 5,000 is returned before the others become
    objects."""
    write(folder / "train-00001-of-00002.jsonl", *[json.loads(json.dumps(ROW))] * 5000)
    rows = read_rows(load_dataset(NamedDataset(str(folder), split="train[12:]")))
    assert next(rows)[1] == ROW and sum(1 for _ in rows) == 4999
