"""Gives every process the samples of stores, memory-mapped: `find_prepared`, `map_prepared`, then `Corpus.sample`.

Decides how samples are numbered and what they are called.  Does not tokenise (`prepare.py`) or know packs or layouts.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sft.batch import Sample
from sft.config import DataConfig
from sft.data.cache.folders import store_folder
from sft.data.cache.omissions import refusal
from sft.data.cache.store import Store, open_store
from sft.data.chat.tokenizer import ChatTokenizer
from sft.data.read.rows import check_file, row_name
from sft.errors import DataError


class Corpus:
    """Samples of one or more files, memory-mapped, in the order of the files and their rows.

    names           which source each file belongs to; None: every file is one
    lengths         int64 [n], tokens of each sample
    num_supervised  int64 [n], supervised labels of each sample
    digest          changes when any token, weight or order changes; not with file names or the cache's place
    """

    def __init__(self, paths: Sequence[Path], stores: Sequence[Store], names: Sequence[str] | None = None) -> None:
        self._lines = [np.flatnonzero(store.rows["tokens"] > 0) for store in stores]  # those that are samples
        lengths = [store.rows["tokens"][lines] for store, lines in zip(stores, self._lines, strict=True)]
        self.lengths: np.ndarray = np.concatenate(lengths)
        self.num_supervised: np.ndarray = np.concatenate(
            [store.rows["supervised"][lines] for store, lines in zip(stores, self._lines, strict=True)]
        )
        self.digest = hashlib.sha256("".join(store.digest for store in stores).encode()).hexdigest()
        self.row_reports = {path: store.row_report for path, store in zip(paths, stores, strict=True)}
        self._paths = list(paths)
        names = names or file_names(self._paths)
        self.sources: tuple[str, ...] = tuple(dict.fromkeys(names))
        self._source_of = [self.sources.index(name) for name in names]
        self._stores = list(stores)
        self._starts = [np.concatenate([[0], np.cumsum(tokens)]) for tokens in lengths]  # tokens, per file
        self._first_ids = np.cumsum([0] + [len(lines) for lines in self._lines])

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, sample_id: int) -> Sample:
        """Sample `sample_id`; its tokens are a view of the mapped file and read-only."""
        file, index = self._find(sample_id)
        start, stop = self._starts[file][index], self._starts[file][index + 1]
        store = self._stores[file]
        weights = store.weights[store.mask[start:stop]]
        tokens, source = store.tokens[start:stop], self._source_of[file]
        return Sample(sample_id=sample_id, tokens=tokens, weights=weights, source=source)

    def name(self, sample_id: int) -> str:
        """File and line of a sample, for users: `chat.jsonl:1841`, `chat.jsonl:1841 window 2 of 3`."""
        file, index = self._find(sample_id)
        line = self._stores[file].rows[self._lines[file][index]]
        name = row_name(self._paths[file], int(line["row"]))
        return name if line["windows"] == 1 else f"{name} window {line['window']} of {line['windows']}"

    @property
    def tables(self) -> list[np.ndarray]:
        """LINE [lines] of each file: its samples in the order of their numbers, and its rows without a sample."""
        return [store.rows for store in self._stores]

    @property
    def source_ids(self) -> np.ndarray:
        """int64 [n]: index in `sources` of each sample's."""
        return np.repeat(self._source_of, [len(lines) for lines in self._lines])

    def summary(self) -> str:
        """One line per file."""
        return "\n".join(f"{path}: {row_report}" for path, row_report in self.row_reports.items())

    def report(self) -> dict[str, Any]:
        """The row reports as JSON holds them: {"digest": "3f...", "files": {"chat.jsonl": {"rows": 60000, ...}}}"""
        return {
            "digest": self.digest,
            "files": {str(path): asdict(row_report) for path, row_report in self.row_reports.items()},
        }

    def check_omitted(self, data: DataConfig, tokenizer: ChatTokenizer) -> None:
        """Raises DataError, naming the first row, where the chat template left something out, and data.on_omitted is
        error."""
        for path, row_report in self.row_reports.items() if data.on_omitted == "error" else ():
            if row_report.omitted:
                first = min(row_report.omitted, key=lambda omission: (omission.rows[0], omission.message))
                raise refusal(path, first.rows[0], first, tokenizer)

    def _find(self, sample_id: int) -> tuple[int, int]:
        assert 0 <= sample_id < len(self), f"sample {sample_id} of {len(self)}"
        file = int(np.searchsorted(self._first_ids, sample_id, side="right")) - 1
        return file, sample_id - int(self._first_ids[file])


def file_names(paths: Sequence[Path]) -> list[str]:
    """A name for each file: its name without the ending, or its path where two share that."""
    stems = [path.name.split(".")[0] for path in paths]
    return [stem if stems.count(stem) == 1 else str(path) for stem, path in zip(stems, paths, strict=True)]


def find_prepared(
    paths: Sequence[str], data: DataConfig, tokenizer: ChatTokenizer, cache_dir: Path, *, command: str
) -> list[Path]:
    """The store of each file.  Tokenises and writes nothing; errors name `command`, which does that.

    Reads all bytes of the files, so one rank calls it and broadcasts the folders.  Raises DataError where a file
    cannot be read or is not prepared, when no sample is left, and for what data.on_omitted refuses.
    """
    for path in paths:
        check_file(Path(path))
    folders = [store_folder(cache_dir, Path(path), data, tokenizer) for path in paths]
    map_prepared(paths, folders, data, command=command).check_omitted(data, tokenizer)
    return folders


def map_prepared(
    paths: Sequence[str], folders: Sequence[Path], data: DataConfig, names: Sequence[str] | None = None, *, command: str
) -> Corpus:
    """The corpus of the stores that `find_prepared` found; `names` are those of each file's source."""
    stores = [open_store(folder) for folder in folders]
    missing = [path for path, store in zip(paths, stores, strict=True) if store is None]
    if missing:
        raise DataError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not tokenised for these settings in "
            f"{folders[0].parent}.  Run this first, on any machine that sees the same folders: {command}"
        )
    return make_corpus([Path(path) for path in paths], [store for store in stores if store is not None], data, names)


def make_corpus(
    files: Sequence[Path], stores: Sequence[Store], data: DataConfig, names: Sequence[str] | None = None
) -> Corpus:
    """The corpus of these stores.  Raises DataError when it holds no sample."""
    corpus = Corpus(files, stores, names)
    if len(corpus) == 0:
        raise DataError(
            f"no sample is left of {', '.join(map(str, files))} with data.over_long = {data.over_long} and "
            f"data.seq_length = {data.seq_length}.\n{corpus.summary()}"
        )
    return corpus
