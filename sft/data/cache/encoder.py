"""From rows to blocks of tokens and weights, in one process.

Decides that a row that cannot be used ends the work with its name, or is left out and listed.  What becomes of a
sample that is too long is `fit.py`'s; who encodes which rows, and how many at once, is `parts.py`'s.  Does not read
files (`rows.py`) or write them.  Importable without torch, since every tokenising process imports it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from sft.data.cache.omissions import Omission
from sft.data.cache.row_report import LINE, Reject
from sft.data.cache.truncation import NOTHING, OverLong, pieces
from sft.data.chat.chat import Encoding, Supervise, encode, why_omitted
from sft.data.chat.formats import Chat, Tokenized, check_ids, read_row
from sft.data.chat.omitted import Missing
from sft.data.chat.tokenizer import ChatTokenizer
from sft.data.read.rows import Row, parse, row_name
from sft.errors import DataError

_SAID = 200  # characters kept of a text that is left out
MAX_WEIGHTS = 256  # what a byte can tell apart; the first is 0


class Block(NamedTuple):
    """Some consecutive rows, tokenised.

    tokens   int32 [n], all samples end to end
    mask     uint8 [n], which weight each token has
    weights  float32 [at most 256], the distinct weights: 0, then rising
    lines    LINE [samples and dropped rows]
    rejects  rows that cannot be used
    omitted  what the chat template left out, by row, role and kind
    chats    rows with messages that can be used
    """

    tokens: np.ndarray
    mask: np.ndarray
    weights: np.ndarray
    lines: np.ndarray
    rejects: tuple[Reject, ...]
    omitted: tuple[Omission, ...] = ()
    chats: int = 0


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """All that turns the rows of one file into blocks."""

    path: Path
    tokenizer: ChatTokenizer
    seq_length: int
    doc_multiple: int
    over_long: OverLong
    on_bad_row: Literal["error", "skip"]
    supervise: Supervise

    def block(self, rows: Iterable[Row]) -> Block:
        """Tokenises rows.  Raises DataError beginning with the row's name, for the first that cannot be used."""
        tokens = [np.empty(0, dtype=np.int32)]
        weights = [np.empty(0, dtype=np.float32)]
        lines: list[tuple[int, ...]] = []
        rejects = []
        omitted: list[Omission] = []
        chats = 0
        for number, content in rows:
            try:
                row = read_row(parse(content))
                ids, full, missing = self._encoded(row)
            except DataError as error:
                if self.on_bad_row == "error":
                    raise DataError(f"{row_name(self.path, number)}: {error}") from error
                reason = str(error).encode("utf-8", "backslashreplace").decode()  # it may quote half a surrogate pair
                rejects.append(Reject(number, reason))
                continue
            chats += isinstance(row, Chat)
            if missing:
                assert isinstance(row, Chat)
                omitted += self._omissions(number, row, missing, {(one.role, one.kind) for one in omitted})
            for line, positions, learnt in self._fit(number, full):
                tokens.append(ids[positions])
                weights.append(learnt)
                lines.append(line)
        try:
            palette, mask = to_palette(np.concatenate(weights))
        except DataError as error:
            raise DataError(f"{self.path}: {error}") from error
        table = np.array(lines, dtype=LINE)
        return Block(np.concatenate(tokens), mask, palette, table, tuple(rejects), tuple(omitted), chats)

    def _encoded(self, row: Chat | Tokenized) -> Encoding:
        """Tokens and weights of a row, however long."""
        if isinstance(row, Tokenized):
            check_ids(row, self.tokenizer.vocab_size)
            return Encoding(row.tokens, row.weights, [])
        return encode(row, self.tokenizer, self.supervise)

    def _omissions(
        self, number: int, chat: Chat, missing: list[Missing], told: set[tuple[str, str]]
    ) -> Iterator[Omission]:
        """What is missing, by role and kind; for those not yet told also why, which takes renderings to find."""
        counts = Counter((one.role, one.kind) for one in missing)
        for kind, count in counts.items():
            first = next(one for one in missing if (one.role, one.kind) == kind)
            said, why = ("", "") if kind in told else (first.said, why_omitted(chat, self.tokenizer, first))
            begin = said[:_SAID].encode("utf-8", "backslashreplace").decode()
            yield Omission(number, first.number, *kind, count, begin, why)

    def _fit(self, number: int, full: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray, np.ndarray]]:
        """For each sample made of a row: its line of the table, which tokens it holds and what they weigh.

        One of no tokens where nothing is left of the row.
        """
        try:
            found = pieces(full, seq_length=self.seq_length, doc_multiple=self.doc_multiple, over_long=self.over_long)
        except DataError as error:
            raise DataError(f"{row_name(self.path, number)}: {error}") from error
        seen = np.zeros(len(full), dtype=bool)
        for window, (positions, weights) in enumerate(found or [NOTHING], start=1 if found else 0):
            new = int(np.count_nonzero(~seen[positions]))
            seen[positions] = True
            counts = (len(positions), num_labels(weights), new, len(full), num_labels(full))
            yield (number, window, len(found), *counts), positions, weights


def num_labels(weights: np.ndarray) -> int:
    """Labels with a loss: a sample's first token is never a label."""
    return int(np.count_nonzero(weights[1:] > 0))


def to_palette(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct weights, 0 among them, and which of them each token has.

    0 0 1 0.5 0.5  ->  palette 0 0.5 1, mask 0 0 2 1 1

    Raises DataError for more than 255 besides 0.
    """
    starts = np.concatenate([[0], np.flatnonzero(weights[1:] != weights[:-1]) + 1])[: len(weights)]
    palette = np.unique(np.concatenate([[np.float32(0)], weights[starts]])).astype(np.float32)
    check_palette(palette)
    index = np.searchsorted(palette, weights[starts]).astype(np.uint8)
    return palette, np.repeat(index, np.diff(starts, append=len(weights)))


def check_palette(palette: np.ndarray) -> None:
    """Raises DataError where there are too many weights for a byte."""
    if len(palette) > MAX_WEIGHTS:
        raise DataError(
            f"more than {MAX_WEIGHTS - 1} distinct weights above 0, among them {palette[1]:g}, {palette[2]:g} and "
            f"{palette[3]:g}; a data file can have {MAX_WEIGHTS - 1}.  Round them."
        )
