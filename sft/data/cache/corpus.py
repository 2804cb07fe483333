"""Gives every process the memory-mapped samples of stores: call `find_prepared`, `map_prepared`, then `Corpus.sample`.

Decides the ids and names of samples.  `prepare.py` makes the stores, and `sft/data/packing/` makes packs of samples.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sft.batch import Sample
from sft.config import DataConfig, Input
from sft.console import QUIET, Console
from sft.data.cache.folders import is_newer, store_folder
from sft.data.cache.loaded_datasets import find_inputs
from sft.data.cache.omissions import refusal
from sft.data.cache.remote_stores import RemoteStores
from sft.data.cache.store import Store, open_store
from sft.data.chat.tokenizer import ChatTokenizer
from sft.data.read.named_dataset import LoadedDataset
from sft.data.read.rows import DataFile, file_name, row_name
from sft.data.work import Work
from sft.errors import DataError, first_few
from sft.files.atomic_files import unusable
from sft.parallel.shapes import SampleSizes, Shapes, longest

_TOKENS_AT_ONCE = 1 << 24


class Corpus:
    """Samples of one or more files or datasets, memory-mapped, in the order of the files and their rows.

    names           argument: for each file, the name of its source.  Files with equal names are one source.  None:
                    every file is a source (`file_names`)
    files           the files and datasets
    sources         names of the sources, each once
    lengths         int64 [n], number of stored tokens of each sample
    num_supervised  int64 [n], number of supervised labels of each sample; a label counts for each text of a tree
    num_repeated    int64 [n], number of these labels that do not count with loss.shared = once
    row_reports     the row report of each file or dataset
    work            the work of tokenising each file that this process has prepared, not those that were in the cache
    digest          depends on tokens, weights and order of samples, not on file names or the cache folder
    """

    def __init__(self, paths: Sequence[DataFile], stores: Sequence[Store], names: Sequence[str] | None = None) -> None:
        self._lines = [np.flatnonzero(store.rows["tokens"] > 0) for store in stores]  # lines with a sample
        lengths = [store.rows["tokens"][lines] for store, lines in zip(stores, self._lines, strict=True)]
        self.lengths: np.ndarray = np.concatenate(lengths)
        self.num_supervised: np.ndarray = np.concatenate(
            [store.rows["supervised"][lines] for store, lines in zip(stores, self._lines, strict=True)]
        )
        self.num_repeated: np.ndarray = np.concatenate(
            [
                np.zeros(len(lines), np.int64) if store.trees is None else store.trees.repeated
                for store, lines in zip(stores, self._lines, strict=True)
            ]
        )
        self.digest = hashlib.sha256("".join(store.digest for store in stores).encode()).hexdigest()
        self.row_reports = {path: store.row_report for path, store in zip(paths, stores, strict=True)}
        self.files = list(paths)
        self.work: dict[DataFile, Work] = {}
        names = names or file_names(self.files)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self.sources: tuple[str, ...] = tuple(numbers)
        self._source_of = [numbers[name] for name in names]
        self._stores = list(stores)
        # For each file: the positions in `tokens` at which samples begin, and the end.
        self._starts = [np.concatenate([[0], np.cumsum(tokens)]) for tokens in lengths]
        self._first_rows = [
            None if store.teacher is None else np.append(0, np.cumsum(store.teacher.counts)) for store in stores
        ]
        self._first_ids = np.cumsum([0] + [len(lines) for lines in self._lines])

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, sample_id: int) -> Sample:
        """Sample `sample_id`; its tokens are a read-only view of the mapped file."""
        file, index = self._find(sample_id)
        start, stop = self._starts[file][index], self._starts[file][index + 1]
        store = self._stores[file]
        weights = store.weights[store.mask[start:stop]]
        tokens, source = store.tokens[start:stop], self._source_of[file]
        tree = None if store.trees is None else store.trees.tree(index)
        teacher, rows = None, self._first_rows[file]
        if store.teacher is not None and rows is not None and rows[index] < rows[index + 1]:
            teacher = store.teacher.rows[rows[index] : rows[index + 1]]
        return Sample(sample_id=sample_id, tokens=tokens, weights=weights, source=source, tree=tree, teacher=teacher)

    @cached_property
    def has_trees(self) -> bool:
        """Whether a sample has a tree."""
        return any(store.trees is not None and bool(store.row_report.trees) for store in self._stores)

    @cached_property
    def longest(self) -> int:
        """The number of tokens of the longest text of any sample, which is the largest position plus one."""
        return longest(self.shapes)

    @cached_property
    def shapes(self) -> SampleSizes:
        """The sizes of all samples, for plans: `lengths`, or with trees the lengths and depths of all documents."""
        if not self.has_trees:
            return self.lengths
        counts, lengths, depths = [], [], []
        for store, lines in zip(self._stores, self._lines, strict=True):
            if store.trees is None:
                counts.append(np.ones(len(lines), dtype=np.int64))
                lengths.append(store.rows["tokens"][lines])
                depths.append(np.zeros(len(lines), dtype=np.int64))
            else:
                tables = store.trees.tables
                counts.append(tables.trees["documents"])
                lengths.append(tables.documents["length"])
                depths.append(tables.documents["depth"])
        starts = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        return Shapes(starts, np.concatenate(lengths), np.concatenate(depths))

    def name(self, sample_id: int) -> str:
        """The name of a sample in messages to users: the file and the number of the row, then the document if the row
        is a packed row, and the window if the sample is one of several windows.

        chat.jsonl:1841        chat.jsonl:1841 window 2 of 3        tokens.jsonl:7 document 3 of 5 window 1 of 2
        """
        file, index = self._find(sample_id)
        table, at = self._stores[file].rows, int(self._lines[file][index])
        line = table[at]
        name = row_name(self.files[file], int(line["row"]))
        first, stop = bisect_left(table["row"], line["row"]), bisect_right(table["row"], line["row"])
        is_document = table["window"][first:stop] <= 1
        if (num_documents := int(is_document.sum())) > 1:
            name += f" document {is_document[: at - first + 1].sum()} of {num_documents}"
        return name if line["windows"] == 1 else f"{name} window {line['window']} of {line['windows']}"

    def location(self, sample_id: int) -> tuple[DataFile, int, int]:
        """The file of a sample, the number of its row, and its number among the samples of the row, counted from 0."""
        file, index = self._find(sample_id)
        rows, lines = self._stores[file].rows["row"], self._lines[file]
        row = int(rows[lines[index]])
        return self.files[file], row, index - int(np.searchsorted(lines, bisect_left(rows, row)))

    def first_beyond(self, num_ids: int) -> tuple[int, int] | None:
        """The id of the first sample with a token of id `num_ids` or above, and the token's index in the sample.

        None if no sample has such a token.
        Reads only stores that have such an id, and stores of older versions, which did not record the largest id.
        """
        for file, store in enumerate(self._stores):
            if store.largest_id is not None and store.largest_id < num_ids:
                continue
            for begin in range(0, len(store.tokens), _TOKENS_AT_ONCE):
                beyond = np.flatnonzero(store.tokens[begin : begin + _TOKENS_AT_ONCE] >= num_ids)
                if len(beyond):
                    position = begin + int(beyond[0])
                    index = int(np.searchsorted(self._starts[file], position, side="right")) - 1
                    return int(self._first_ids[file]) + index, position - int(self._starts[file][index])
        return None

    def first_taught_beyond(self, num_ids: int) -> tuple[int, int] | None:
        """The id of the first sample whose teacher's distributions have an id of `num_ids` or above, and this id.

        None if no sample has one.  Reads only stores that have such an id.
        """
        for file, store in enumerate(self._stores):
            rows = self._first_rows[file]
            if store.teacher is None or rows is None or store.largest_teacher_id < num_ids:
                continue
            for index in range(len(rows) - 1):
                ids = store.teacher.rows["ids"][rows[index] : rows[index + 1]]
                if (largest := int(ids.max(initial=-1))) >= num_ids:
                    return int(self._first_ids[file]) + index, largest
        return None

    @property
    def tables(self) -> list[np.ndarray]:
        """For each file, its table: LINE [lines], one line per sample and one per document without a sample."""
        return [store.rows for store in self._stores]

    @property
    def source_ids(self) -> np.ndarray:
        """int64 [n]: for each sample, the index of its source in `sources`."""
        return np.repeat(self._source_of, [len(lines) for lines in self._lines])

    def summary(self, explained: set[str] | None = None) -> str:
        """The row reports as text, one line per file.

        explained: reasons that an earlier summary gave, which are not given again; None: no summary came before
        """
        reasons = set() if explained is None else explained
        return "\n".join(
            f"{path}: {'; '.join([report.sizes, *report.findings(reasons)])}"
            for path, report in self.row_reports.items()
        )

    def report(self) -> dict[str, Any]:
        """The row reports in JSON's types: {"digest": "3f...", "files": {"chat.jsonl": {"rows": 60000, ...}}}"""
        return {
            "digest": self.digest,
            "files": {str(path): row_report.to_json() for path, row_report in self.row_reports.items()},
        }

    def check_omitted(self, data: DataConfig, tokenizer: ChatTokenizer) -> None:
        """Raises DataError with the name of the first row from which the chat template left text out, if
        data.on_omitted = error."""
        for path, row_report in self.row_reports.items() if data.on_omitted == "error" else ():
            if row_report.omitted:
                first = min(row_report.omitted, key=lambda omission: (omission.rows[0], omission.message))
                raise refusal(path, first.rows[0], first, tokenizer)

    def _find(self, sample_id: int) -> tuple[int, int]:
        assert 0 <= sample_id < len(self), f"sample {sample_id} of {len(self)}"
        file = int(np.searchsorted(self._first_ids, sample_id, side="right")) - 1
        return file, sample_id - int(self._first_ids[file])


def file_names(paths: Sequence[DataFile]) -> list[str]:
    """A name for each file: the file name up to its first dot, or the path or URL if two files share this name.  A
    dataset has the name that the recipe gives."""
    stems = [path.name if isinstance(path, LoadedDataset) else path.name.split(".")[0] for path in paths]
    counts = Counter(stems)
    return [stem if counts[stem] == 1 else file_name(path) for stem, path in zip(stems, paths, strict=True)]


def find_prepared(
    inputs: Sequence[Input],
    data: DataConfig,
    tokenizer: ChatTokenizer,
    cache_dir: Path,
    *,
    command: str,
    console: Console = QUIET,
) -> list[tuple[DataFile, Path]]:
    """Finds the files and datasets of `inputs`, and the folders of their stores.  Does not tokenise, and uses a network
    only for files in an object store and data.cache_remote.

    command: the command that makes missing stores, for error messages
    Reads all bytes of files whose digest is not remembered, so only one rank calls this function and broadcasts the
    folders.  Raises DataError if a file cannot be read or is not prepared, if no sample is left, or if the chat
    template left text out and data.on_omitted = error.
    """
    files = find_inputs(inputs, cache_dir, command=command)
    prepared = [(file, store_folder(cache_dir, file, data, tokenizer)) for file in files]
    fetch_prepared(prepared, data, console)
    map_prepared(prepared, data, command=command).check_omitted(data, tokenizer)
    return prepared


def fetch_prepared(prepared: Sequence[tuple[DataFile, Path]], data: DataConfig, console: Console) -> None:
    """Fetches the stores that this machine lacks from data.cache_remote.  Called by one process of each node."""
    if data.cache_remote is not None:
        RemoteStores(data.cache_remote, console).fetch(folder for _, folder in prepared)


def map_prepared(
    prepared: Sequence[tuple[DataFile, Path]], data: DataConfig, names: Sequence[str] | None = None, *, command: str
) -> Corpus:
    """The corpus of the stores that `find_prepared` found.

    Raises DataError if a store is missing or cannot be read, and StorageError if the disk fails.
    names: for each file, the name of its source; command: as for `find_prepared`
    """
    try:
        stores = [open_store(folder) for _, folder in prepared]
    except OSError as error:  # a disk fails, or too many files are open: the stores may be complete
        folder = prepared[0][1].parent
        raise unusable(f"the tokenised data in {folder} cannot be read", folder, error, DataError) from error
    missing = [file for (file, _), store in zip(prepared, stores, strict=True) if store is None]
    if missing:
        cache_dir = prepared[0][1].parent
        changed = [str(file) for file in missing if is_newer(file, cache_dir)]
        because = f"  Changed since data were tokenised there: {', '.join(first_few(changed))}." if changed else ""
        raise DataError(
            f"{', '.join(first_few(map(str, missing)))} {'is' if len(missing) == 1 else 'are'} not tokenised with "
            f"these settings in {cache_dir}.{because}  First run this command on a machine that sees these folders: "
            f"{command}"
        )
    return make_corpus([file for file, _ in prepared], [store for store in stores if store is not None], data, names)


def make_corpus(
    files: Sequence[DataFile], stores: Sequence[Store], data: DataConfig, names: Sequence[str] | None = None
) -> Corpus:
    """The corpus of these stores.  Raises DataError if the stores hold no sample."""
    corpus = Corpus(files, stores, names)
    if len(corpus) == 0:
        raise DataError(
            f"no samples remain from {', '.join(first_few(map(str, files)))} with data.over_long = {data.over_long} "
            f"and data.seq_length = {data.seq_length}.\n{corpus.summary()}"
        )
    return corpus
