"""Defines the files of `sft score`, and finds the record of a sample in them by the digest of its tokens.

A file is parquet with one record for each sample, in the order of the samples in the data:

    file            string, the data file or dataset
    row             int64, the number of the row in the file, as in messages
    part            int32, the number of the sample among those of the row, from 0
    input_ids       list<int32>, the tokens of the sample; null if it is a tree, whose tokens are no single text
    loss_mask       list<float>, the weight of each token, above 0 for supervised tokens; null as input_ids
    teacher         struct, the key `teacher` of a row (`inline.py`):
        tokenizer       string, the digest of everything that determines the ids of a text
        digest          string, the digest of the sample's tokens (`inline.token_digest`)
        positions       list<int32>, the supervised tokens except the first token, which no token predicts
        ids             list<list<int32>>, for each of them the k most likely tokens, most likely first
        logprobs        list<list<float>>, their log-probabilities over the whole vocabulary
        label_logprobs  list<float>, the log-probability of the supervised token itself

The metadata of the schema have `sft_score`: JSON with format, k, the weights and the digest of the data.  Names of
columns and their meaning do not change within a format.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sft.data.teacher.distributions import Entries
from sft.data.teacher.inline import check_tokenizer
from sft.errors import DataError, first_few

FORMAT = "sft score 1"
METADATA = b"sft_score"
_DIGEST = np.dtype("S32")
ORIGIN = ("file", "row", "part")  # columns that say where a sample came from; training does not read them
_FIELDS = ("tokenizer", "digest", "positions", "ids", "logprobs", "label_logprobs")


def schema(facts: dict[str, Any]) -> Any:
    """The Arrow schema of a file.  facts: the further entries of its metadata"""
    import pyarrow as pa

    numbers, ids = pa.list_(pa.float32()), pa.list_(pa.int32())
    kinds = pa.string(), pa.string(), ids, pa.list_(ids), pa.list_(numbers), numbers
    teacher = pa.struct(list(zip(_FIELDS, kinds, strict=True)))
    origin = zip(ORIGIN, (pa.string(), pa.int64(), pa.int32()), strict=True)
    columns = [*origin, ("input_ids", ids)]
    content = json.dumps({"format": FORMAT, **facts}, sort_keys=True)
    return pa.schema([*columns, ("loss_mask", numbers), ("teacher", teacher)], metadata={METADATA: content})


class ScoredSample(NamedTuple):
    """The scores of a sample: arrays of n tokens, m supervised tokens and k likely tokens each."""

    file: str
    row: int
    part: int
    tokens: np.ndarray | None
    weights: np.ndarray | None
    digest: str
    positions: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray
    label_logprobs: np.ndarray

    @property
    def num_bytes(self) -> int:
        """The bytes of the arrays."""
        return sum(part.nbytes for part in self if isinstance(part, np.ndarray))


def to_batch(samples: Sequence[ScoredSample], tokenizer: str, kind: Any) -> Any:
    """The Arrow record batch of some samples.  tokenizer: digest; kind: the schema"""
    import pyarrow as pa

    def lists(arrays: list[np.ndarray | None], of: Any) -> Any:
        ends = np.cumsum([0, *(0 if array is None else len(array) for array in arrays)]).astype(np.int32)
        present = [array for array in arrays if array is not None]
        flat = pa.array(np.concatenate([np.zeros(0, of.to_pandas_dtype()), *present]), of)
        return pa.ListArray.from_arrays(ends, flat, mask=pa.array([array is None for array in arrays]))

    def nested(arrays: list[np.ndarray], of: Any) -> Any:
        outer = np.cumsum([0, *map(len, arrays)]).astype(np.int32)
        width = arrays[0].shape[1]
        inner = (np.arange(outer[-1] + 1) * width).astype(np.int32)
        flat = pa.array(np.concatenate([array.ravel() for array in arrays]), of)
        return pa.ListArray.from_arrays(outer, pa.ListArray.from_arrays(inner, flat))

    columns = [*zip(*samples, strict=True)]
    file, row, part, tokens, weights, digest, positions, ids, logprobs, labels = map(list, columns)
    teacher = pa.StructArray.from_arrays(
        [
            pa.array([tokenizer] * len(samples)),
            pa.array(digest),
            lists(positions, pa.int32()),
            nested(ids, pa.int32()),
            nested(logprobs, pa.float32()),
            lists(labels, pa.float32()),
        ],
        fields=list(kind.field("teacher").type),
    )
    return pa.RecordBatch.from_arrays(
        [
            *(pa.array(file), pa.array(row, pa.int64()), pa.array(part, pa.int32())),
            *(lists(tokens, pa.int32()), lists(weights, pa.float32()), teacher),
        ],
        schema=kind,
    )


class Records:
    """The records of some files.  Keeps one row group of each file in memory, and 40 bytes for each record.

    Raises DataError if a file cannot be read, was not written by `sft score`, or with another tokenizer or a smaller k.
    """

    def __init__(self, files: Sequence[Path], ids_digest: str, k: int) -> None:
        self._files = [_File(file, ids_digest, k) for file in files]
        digests = [file.digests() for file in self._files]
        self._starts = np.cumsum([0, *map(len, digests)])
        joined = np.concatenate([np.empty(0, _DIGEST), *digests])
        self._order = np.argsort(joined, kind="stable")  # of equal records, the first is used
        self._sorted = joined[self._order]

    def find(self, digest: str) -> Entries | None:
        """The record of the sample with these tokens, or None if there is none.  Raises DataError if it is damaged."""
        wanted = np.array(digest.encode(), _DIGEST)
        index = int(np.searchsorted(self._sorted, wanted))
        if index == len(self._sorted) or self._sorted[index] != wanted:
            return None
        record = int(self._order[index])
        number = int(np.searchsorted(self._starts, record, side="right")) - 1
        return self._files[number].entries(record - int(self._starts[number]))

    def why_missing(self, row: int) -> str:
        """Why a sample of the row has no record, for a message.  row: the number of the row"""
        names = ", ".join(f"{file.path} (scores of {', '.join(first_few(file.sources()))})" for file in self._files)
        others = [other for file in self._files for other in file.digests(row)]
        if others:
            return (
                f"{names} has row {row:,} with other tokens (digest {others[0].decode()[:12]}).  They follow from "
                "the text, the tokenizer, the chat template, data.turns, data.over_long and data.seq_length"
            )
        return f"{names} has no record of row {row:,}"


class _File:
    """One file of `sft score`."""

    def __init__(self, path: Path, ids_digest: str, k: int) -> None:
        from pyarrow import parquet

        self.path = path
        self._group: tuple[int, Any] = -1, None
        with _guarded(path):
            self._table = parquet.ParquetFile(path)
            facts = json.loads((self._table.schema_arrow.metadata or {}).get(METADATA, b"{}"))
            sizes = [self._table.metadata.row_group(i).num_rows for i in range(self._table.num_row_groups)]
            self._starts = np.cumsum([0, *sizes]).tolist()
        if facts.get("format") != FORMAT:
            raise DataError(
                f"data.teacher.files: {path} is no file of {FORMAT} (its metadata say {facts.get('format')}).  Give a "
                "file that `sft score` wrote; rows of other programs may have the key teacher instead."
            )
        check_tokenizer(facts["tokenizer"], ids_digest, f"data.teacher.files: {path}: ")
        if facts["k"] < k:
            raise DataError(
                f"data.teacher.files: {path} was scored with --top-k {facts['k']}, fewer tokens than data.teacher.k = "
                f"{k}.  Set data.teacher.k to at most {facts['k']}, or score the data again."
            )

    def sources(self) -> list[str]:
        """The names of the data files of which this file has records."""
        with _guarded(self.path):
            groups = range(self._table.num_row_groups)
            return sorted(
                {n for i in groups for n in self._table.read_row_group(i, columns=["file"])["file"].to_pylist()}
            )

    def digests(self, row: int | None = None) -> np.ndarray:
        """The digest of the tokens of each record, or of the records of one row of the data: _DIGEST [n]."""
        with _guarded(self.path):
            parts = [np.empty(0, _DIGEST)]
            from pyarrow import compute as pc

            for group in range(self._table.num_row_groups):
                table = self._table.read_row_group(group, columns=["row", "teacher.digest"])
                of_group = pc.struct_field(table["teacher"], "digest").to_numpy().astype(_DIGEST)
                parts.append(of_group if row is None else of_group[table["row"].to_numpy() == row])
            return np.concatenate(parts)

    def entries(self, index: int) -> Entries:
        """The distributions of a record."""
        with _guarded(self.path):
            number = bisect_right(self._starts, index) - 1
            if self._group[0] != number:
                names = [f"teacher.{field}" for field in _FIELDS if field != "tokenizer"]
                self._group = -1, None  # before the next one is read
                self._group = number, self._table.read_row_group(number, columns=names).column("teacher")
            fields = self._group[1][index - self._starts[number]]
            ids, logprobs = fields["ids"].values, fields["logprobs"].values
            if not ids.value_lengths().equals(logprobs.value_lengths()):
                raise ValueError("ids and logprobs have different lengths")
            return Entries(
                fields["positions"].values.to_numpy().astype(np.int64),
                ids.value_lengths().to_numpy().astype(np.int64),
                ids.flatten().to_numpy().astype(np.int64),
                logprobs.flatten().to_numpy().astype(np.float64),
                fields["label_logprobs"].values.to_numpy().astype(np.float64),
            )


class _guarded:
    """A context that turns every error of pyarrow into a DataError with the name of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, DataError):
            reason = str(error).strip().splitlines()
            raise DataError(
                f"data.teacher.files: {self._path} cannot be read as parquet: "
                f"{reason[0].rstrip('.') if reason else type(error).__name__}.  Score the data again."
            ) from error
