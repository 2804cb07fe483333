"""Gives samples their teacher's distributions, from the key `teacher` of a row or from the files of `sft score`.

Only distributions of supervised tokens are kept, one row each (`distributions.row_dtype`), in the order of the tokens.
The first token of a sample has none, because no token predicts it.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sft.batch import Tree
from sft.config import DataConfig
from sft.data.chat.tokenizer import ByteTokenizer, ChatTokenizer
from sft.data.rows.formats import Chat, PlainText
from sft.data.rows.token_rows import Tokenized
from sft.data.teacher.distributions import Distributions, distributions, row_dtype
from sft.data.teacher.inline import KEY, Spans, read_inline, token_digest
from sft.data.teacher.records import Records
from sft.errors import DataError


class TeacherTable(NamedTuple):
    """The distributions of consecutive samples: their number for each sample, int64 [samples], and all of them."""

    counts: np.ndarray
    rows: np.ndarray


class TeacherReader:
    """Finds the distributions of the samples of a data file.

    Raises DataError if a file of data.teacher.files cannot be used.
    """

    def __init__(self, data: DataConfig, tokenizer: ChatTokenizer) -> None:
        self._teacher, self._tokenizer = data.teacher, tokenizer
        self._records = (
            None
            if data.teacher.files is None
            else _records(tuple(data.teacher.files), tokenizer.ids_digest, data.teacher.k or 0)
        )

    def of_row(self, value: Any, row: Chat | PlainText | Tokenized, tokens: np.ndarray) -> Distributions | None:
        """The distributions of the key `teacher` of a row; None if they come from files, or if they are missing and
        may be.

        value: the row; tokens: int32 [n], the tokens of the row without padding
        Raises DataError if they are invalid or missing.
        """
        if self._records is not None:
            return None
        teacher = value.get(KEY)
        if teacher is None:
            if self._teacher.missing == "error":
                raise DataError(
                    f"the row has no key {KEY}, which data.teacher.k asks for.  Add it, give data.teacher.files, or "
                    "set data.teacher.missing = labels, which learns such rows from their labels only."
                )
            return None
        if isinstance(row, Chat):
            raise DataError(
                f"a chat has the key {KEY}, but its tokens follow from a template.  Give its distributions with "
                "data.teacher.files, or write the chat as input_ids."
            )
        if isinstance(row, Tokenized) and row.num_padding:
            raise DataError(f"the row has padding beside the key {KEY}.  Remove the padding.")
        spans = _spans(row.text, tokens, self._tokenizer) if isinstance(row, PlainText) else None
        return read_inline(teacher, tokens, spans, self._tokenizer.ids_digest, self._teacher)

    def of_sample(
        self, number: int, tokens: np.ndarray, weights: np.ndarray, tree: Tree | None, of_row: tuple[Any, np.ndarray]
    ) -> np.ndarray | None:
        """The distributions of a sample's supervised tokens; None if they are missing and may be.

        number  the number of the row
        of_row  the result of `of_row`, and for each token of the sample its index among the tokens of the row
        """
        labels = np.flatnonzero(weights[1:] > 0) + 1
        inline, positions = of_row
        if self._records is None:
            return None if inline is None else inline.at(positions[labels])
        entries = self._records.find(token_digest(tokens, tree))
        if entries is None:
            if self._teacher.missing == "labels":
                return None
            raise DataError(
                f"a sample of this row has no distributions: {self._records.why_missing(number)}.  Name the "
                "file with its scores, score this data with the same settings, or set data.teacher.missing = labels."
            )
        return distributions(entries, tokens, self._teacher).at(labels)

    def table(self, rows: Sequence[np.ndarray | None]) -> TeacherTable:
        """The table of some samples.  rows: the distributions of each sample; None: the sample has none"""
        present = [array for array in rows if array is not None]
        counts = np.array([0 if array is None else len(array) for array in rows], dtype=np.int64)
        return TeacherTable(counts, np.concatenate([np.zeros(0, dtype=row_dtype(self._teacher)), *present]))


@lru_cache(maxsize=1)
def _records(files: tuple[str, ...], ids_digest: str, k: int) -> Records:
    """The records of files.  A process that makes several parts reads their digests once."""
    return Records([Path(file) for file in files], ids_digest, k)


def _spans(text: str, tokens: np.ndarray, tokenizer: ChatTokenizer) -> Spans:
    """The characters that each token of a plain text covers; none for BOS and EOS."""
    if isinstance(tokenizer, ByteTokenizer):
        starts = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
        return starts, starts + 1
    encoded, before = tokenizer.encode(text), len(tokenizer.files.around_text[0])
    after = [len(text)] * (len(tokens) - before - len(encoded.ids))
    return (
        np.concatenate([[0] * before, encoded.starts, after]).astype(np.int64),
        np.concatenate([[0] * before, encoded.ends, after]).astype(np.int64),
    )
