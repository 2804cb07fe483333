"""Converts rows to arrays of tokens and weights, in one process.

Decides by data.on_bad_row whether an unusable row ends the preparation with an error that names the row, or is left out
and listed.  A chat whose label marks its answer as bad is always dropped.

`truncation.py` handles samples that are too long, `workers.py` assigns rows to processes, and `read/rows.py` reads
files.  Every tokenising process imports this module, so it does not import torch.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sft.batch import Tree
from sft.config import DataConfig
from sft.data import limited
from sft.data.cache.omissions import RowOmission, row_omissions
from sft.data.cache.row_report import LINE, Reject
from sft.data.cache.teacher_rows import TeacherReader, TeacherTable
from sft.data.cache.tree_samples import num_labels_of, split_tree
from sft.data.cache.tree_tables import TreeTables, to_tables
from sft.data.cache.truncation import NOTHING, excerpts
from sft.data.chat.encode_chat import Encoding, encode_row
from sft.data.chat.tokenizer import ChatTokenizer
from sft.data.chat.tree import Grown
from sft.data.read.rows import DataFile, Row, hint, row_name
from sft.data.read.strict_json import parse
from sft.data.rows.formats import Chat, UnwantedRow, read_row, unused_keys
from sft.data.rows.messages import as_unicode, shortened
from sft.data.teacher.inline import KEY
from sft.data.teacher.records import ORIGIN
from sft.data.template.chat_template import UnreadableTemplate
from sft.errors import DataError

_WAY_OUT = "  data.on_bad_row=skip leaves out such rows, up to a tenth of a file."
_READ = (KEY, *ORIGIN)  # keys of rows that are read if a teacher is
MAX_WEIGHTS = 256  # distinct weights that one byte per token can index; the first weight is 0


class EncodedRows(NamedTuple):
    """The samples of some consecutive rows of a file, and counts of these rows."""

    tokens: np.ndarray  # int32 [n], all samples concatenated
    mask: np.ndarray  # uint8 [n], the index in `weights` of each token's weight
    weights: np.ndarray  # float32 [at most 256], the distinct weights: 0, then rising
    lines: np.ndarray  # LINE [lines]: one per sample, and one per document without a sample
    rejects: Sequence[Reject]  # unusable rows, which data.on_bad_row = skip leaves out
    omitted: Sequence[RowOmission] = ()  # texts that the chat template left out, by row, role and kind
    num_chats: int = 0  # usable rows with messages
    unused: Sequence[tuple[str, int]] = ()  # (key of usable rows that nothing reads, number of rows with this key)
    unwanted: Sequence[int] = ()  # row numbers of the rows that are dropped because of their label
    spelled: Sequence[tuple[str, int]] = ()  # (control token that stayed text, with its role; number of such rows)
    variables: Sequence[str] = ()  # names of variables that rows give to the chat template
    num_padded: int = 0  # number of rows whose padding was dropped
    num_padding: int = 0  # number of tokens of this padding
    trees: TreeTables | None = None  # the trees of the samples; None unless data.turns = each
    teacher: TeacherTable | None = None  # distributions of a teacher; None without data.teacher.k


class RowSample(NamedTuple):
    """A sample of a row, and its line of the table (`LINE`).  A document without a sample has a line and no tokens.

    positions  int64 [m]: for each token of the sample, its index among the tokens of the row
    teacher    the distributions of the supervised tokens (`teacher_rows.py`); None: it has none
    """

    line: tuple[int, ...]
    tokens: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    tree: Tree | None = None
    teacher: np.ndarray | None = None


def encode_rows(rows: Iterable[Row], file: DataFile, data: DataConfig, tokenizer: ChatTokenizer) -> EncodedRows:
    """Tokenises rows of a file.

    Raises a DataError that begins with the row's name: for the first unusable row if data.on_bad_row = error, and for a
    sample that is too long if data.over_long = error.  Also raises DataError for more than 255 weights above 0.
    """
    reader = TeacherReader(data, tokenizer) if data.teacher.k is not None else None
    samples: list[RowSample] = []
    omitted: list[RowOmission] = []
    explained: set[tuple[str, str]] = set()
    unused: Counter[str] = Counter()
    spelled: Counter[str] = Counter()
    variables: set[str] = set()
    rejects, unwanted = list[Reject](), list[int]()
    num_chats = num_padded = num_padding = 0
    for number, content in limited.rows(rows, num_texts if data.turns == "each" else lambda content: 1):
        try:
            value = parse(content)
            row = read_row(value)
            encoded = encode_row(row, tokenizer, data)
            of_row = None if reader is None else reader.of_row(value, row, encoded.tokens)
        except UnwantedRow:
            unwanted.append(number)
            continue
        except UnreadableTemplate as error:  # it renders no row
            raise DataError(f"{error}.  Correct it, or give another template: data.chat_template=FILE.") from error
        except DataError as error:
            reason = f"{error}{(advice := hint(file, content))}"  # the advice is about the whole file
            if data.on_bad_row == "error":
                raise DataError(f"{row_name(file, number)}: {reason}{_way_out(reason, advice)}") from error
            rejects.append(Reject(number, as_unicode(reason)))  # errors may quote half a surrogate pair
            continue
        unused.update(as_unicode(shortened(key)) for key in unused_keys(value) if of_row is None or key not in _READ)
        num_chats += isinstance(row, Chat)
        variables |= row.variables.keys() if isinstance(row, Chat) else set()
        num_padded += encoded.num_padding > 0
        num_padding += encoded.num_padding
        spelled.update(as_unicode(f"{token} in {role} texts") for token, role in encoded.spelled)
        if encoded.rendered is not None:
            omitted += row_omissions(number, encoded.rendered, explained, encoded.omitted or ())
        try:
            for sample in _samples(number, encoded, data):
                if reader is not None and len(sample.tokens):
                    of_sample = sample.tokens, sample.weights, sample.tree, (of_row, sample.positions)
                    sample = sample._replace(teacher=reader.of_sample(number, *of_sample))
                samples.append(sample)
        except DataError as error:
            raise DataError(f"{row_name(file, number)}: {error}") from error
    tokens = np.concatenate([np.empty(0, dtype=np.int32), *(sample.tokens for sample in samples)])
    palette, mask = to_palette(np.concatenate([np.empty(0, np.float32), *(sample.weights for sample in samples)]))
    check_palette(palette, file)
    table = np.array([sample.line for sample in samples], dtype=LINE)
    samples = [sample for sample in samples if len(sample.tokens)]
    trees = [sample.tree for sample in samples]
    return EncodedRows(
        *(tokens, mask, palette, table, rejects, omitted, num_chats),
        *([*unused.items()], unwanted, [*spelled.items()], sorted(variables), num_padded, num_padding),
        to_tables(trees, [len(sample.tokens) for sample in samples]) if data.turns == "each" else None,
        None if reader is None else reader.table([sample.teacher for sample in samples]),
    )


def _way_out(reason: str, advice: str) -> str:
    """The advice on bad rows; empty if the reason names a key that helps, or if `advice` is about the whole file."""
    return "" if advice or "data." in reason else _WAY_OUT


def _samples(number: int, row: Encoding, data: DataConfig) -> Iterator[RowSample]:
    """Yields the samples of a row.

    A document without a sample yields a line of 0 tokens.  Raises DataError if a document is too long and over_long =
    error.
    """
    documents = row.documents()
    for k, (first, document) in enumerate(zip(row.starts, documents, strict=True), start=1):
        try:
            fit = _fit if document.tree is None else _fit_tree
            for sample in fit(number, document, data):
                yield sample._replace(positions=sample.positions + first)
        except DataError as error:
            if len(documents) == 1:
                raise
            raise DataError(f"document {k} of {len(documents)}: {error}") from error


def _fit_tree(number: int, row: Encoding, data: DataConfig) -> Iterator[RowSample]:
    """Yields the samples of a row that is a tree: the tree if it fits, else several samples (`tree_samples.py`)."""
    assert row.tree is not None
    parts = list(split_tree(Grown(row.tokens, row.weights, row.tree), data))
    full = len(row.tokens), num_labels_of(row.tree)
    if not parts:
        yield RowSample((number, 0, 0, 0, 0, 0, *full), row.tokens[:0], row.weights[:0], NOTHING.positions)
    is_held = np.zeros(len(row.tokens), dtype=bool)  # tokens that an earlier sample of the row contains
    for window, part in enumerate(parts, start=1):
        num_new = int(np.count_nonzero(~is_held[part.positions]))
        is_held[part.positions] = True
        line = (number, window, len(parts), len(part.tokens), part.labels, num_new, *full)
        yield RowSample(line, part.tokens, part.weights, part.positions, part.tree)


def _fit(number: int, row: Encoding, data: DataConfig) -> Iterator[RowSample]:
    """Yields the samples of a document.

    A document without supervised labels has no sample, whatever its length.
    """
    full = row.weights
    parts = (
        []
        if not num_labels(full)
        else excerpts(
            full,
            seq_length=data.seq_length,
            doc_multiple=data.doc_multiple,
            over_long=data.over_long,
            num_before=row.num_before,
        )
    )
    is_held = np.zeros(len(full), dtype=bool)  # tokens that an earlier sample of the document contains
    for window, (positions, weights) in enumerate(parts or [NOTHING], start=1 if parts else 0):
        num_new = int(np.count_nonzero(~is_held[positions]))
        is_held[positions] = True
        counts = (len(positions), num_labels(weights), num_new, len(full), num_labels(full))
        yield RowSample((number, window, len(parts), *counts), row.tokens[positions], weights, positions)


def num_texts(content: object) -> int:
    """Estimates the number of assistant turns of a row, at least 1, by counting roles and keys in its JSON."""
    text = content if isinstance(content, bytes) else repr(content).replace("'", '"').encode()
    return max(1, sum(text.count(role) for role in (b'"assistant"', b'"gpt"', b'"completions"')))


def num_labels(weights: np.ndarray) -> int:
    """The number of supervised labels.  The first token of a sample is never a label."""
    return int(np.count_nonzero(weights[1:] > 0))


def to_palette(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct weights, float32, rising from 0, and for each token the index of its weight, uint8 [n].

    weights 0 0 1 0.5 0.5  ->  distinct weights 0 0.5 1, indices 0 0 2 1 1
    """
    starts = np.concatenate([[0], np.flatnonzero(weights[1:] != weights[:-1]) + 1])[: len(weights)]
    palette = np.union1d(0, weights[starts]).astype(np.float32)
    index = np.searchsorted(palette, weights[starts]).astype(np.uint8)
    return palette, np.repeat(index, np.diff(starts, append=len(weights)))


def check_palette(palette: np.ndarray, file: DataFile) -> None:
    """Raises DataError if there are more than 256 distinct weights, because a byte per token indexes them."""
    if len(palette) > MAX_WEIGHTS:
        raise DataError(
            f"{file}: more than {MAX_WEIGHTS - 1} different weights above 0, such as {palette[1]:g}, {palette[2]:g} "
            f"and {palette[3]:g}; a data file can have {MAX_WEIGHTS - 1}.  Round them."
        )
