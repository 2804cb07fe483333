"""Counts the rows of a file that were kept whole, cut, windowed, dropped or skipped, and their samples and tokens.

The report shows every lost row and token.  `truncation.py` and `encoder.py` decide which rows are cut, windowed,
dropped or skipped.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sft.data.cache.omissions import FileOmission
from sft.data.cache.tree_tables import TreeCounts
from sft.data.cache.unused_keys import KeyCounter, describe_spelled, describe_unused
from sft.data.rows.messages import shortened

# One line per sample, in file order.  A document without a sample has one line with window 0 of 0 and 0 tokens.  A row
# is one document; a packed row of tokens has several.  The first line of a document has window 0 or 1.
LINE = np.dtype(
    [
        ("row", np.int64),  # number in the file
        ("window", np.int64),  # number of the window; counts from 1
        ("windows", np.int64),  # number of samples of the same document
        ("tokens", np.int64),
        ("supervised", np.int64),  # number of supervised labels
        ("new", np.int64),  # number of tokens that no earlier window of the document contains
        ("full_tokens", np.int64),  # number of tokens of the uncut document
        ("full_supervised", np.int64),  # number of supervised labels of the uncut document
    ]
)
# Fields of a report that a store has only with data.turns = each
OF_TREES = ("trees", "texts", "tokens_rendered", "tokens_of_trees", "supervised_repeated")
_ROWS_LISTED = 100
_REASONS_LISTED = 20
_PARTICULARS = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|\d[\d,.]*')


class Reject(NamedTuple):
    """A row that cannot be used, and the reason."""

    row: int
    reason: str


@dataclass(kw_only=True)
class RowCounts:
    """Counts of a file's rows that its table of samples does not show.  Lists are in the order of the file."""

    rejects: list[Reject] = field(default_factory=list)
    omitted: tuple[FileOmission, ...] = ()
    chats: int = 0  # usable rows with messages
    unused: KeyCounter = field(default_factory=KeyCounter)
    unwanted: list[int] = field(default_factory=list)  # rows that are dropped by their label
    spelled: Counter[str] = field(default_factory=Counter)  # control tokens that stayed text, with roles
    variables: set[str] = field(default_factory=set)  # names of variables that rows give to the chat template
    padded: int = 0  # rows whose padding was dropped
    padding: int = 0  # tokens of this padding
    trees: TreeCounts = TreeCounts()
    largest_teacher_id: int = -1  # the largest id of a teacher's distribution


@dataclass(frozen=True, kw_only=True)
class RowReport:
    """The counts of the rows of one file.

    rows - rows_packed + documents
        = rows_whole + rows_cut + rows_windowed + rows_dropped + rows_skipped + rows_unwanted + documents_unsupervised
    tokens of the rows neither skipped nor unwanted
        = tokens_kept - tokens_repeated + tokens_cut + tokens_dropped + tokens_unsupervised
    supervised labels of these rows
        = supervised_kept + supervised_cut + supervised_dropped

    The words in the names of the fields:
    cut           rows shortened to one sample by over_long = cut_turns, or by over_long = windows if one window is
                  enough
    windowed      rows made into several samples by over_long = windows.  Windows repeat tokens as context.  Tokens that
                  no window contains count as cut.
    packed        rows of tokens that other programs packed.  Each is split into several documents; rows_whole,
                  rows_cut, rows_windowed and rows_dropped count each of these documents as a row.
    unsupervised  documents that are dropped, because they have no supervised token after the first token
    padded        rows of tokens from which padding was dropped.  No other field counts tokens_padding.
    dropped       rows that are too long, so no sample was made of them
    skipped       rows that are unusable, and left out by on_bad_row = skip
    unwanted      chats whose label marks the answer as bad
    chats         rows that are chats and were used
    omitted       texts of these chats that the template left out
    unused        keys of used rows that nothing reads, with their numbers of rows, most frequent first.
                  unused_others: the sum of the numbers of rows of all keys that are not listed
    spelled       control tokens that stayed text in chats, with the role of the text and the number of rows
    variables     names of variables that rows give to the chat template
    trees         samples with several texts (data.turns = each).  A tree that does not fit into a pack is made into
                  several samples, which count as windows.
    supervised_repeated  labels beyond the first of a token, which further texts of the row supervise.  supervised_kept
                  includes them.  They have no loss if loss.shared = once.
    Lists of rows name at most the first 100 rows.
    """

    rows: int
    rows_whole: int
    rows_cut: int
    rows_windowed: int
    rows_dropped: int
    rows_skipped: int
    samples: int
    samples_windowed: int  # number of samples that are windows
    tokens_kept: int
    tokens_repeated: int  # included in tokens_kept
    tokens_cut: int
    tokens_dropped: int
    supervised_kept: int
    supervised_cut: int
    supervised_dropped: int
    longest: int  # tokens of the longest sample
    cut: tuple[int, ...]
    windowed: tuple[int, ...]
    dropped: tuple[int, ...]
    skipped: tuple[int, ...]
    reasons: tuple[tuple[str, int], ...]  # reasons of skipped rows, most frequent first, without numbers and texts
    chats: int = 0
    omitted: tuple[FileOmission, ...] = ()
    rows_unwanted: int = 0
    unwanted: tuple[int, ...] = ()
    unused: tuple[tuple[str, int], ...] = ()
    unused_others: int = 0
    spelled: tuple[tuple[str, int], ...] = ()
    variables: tuple[str, ...] = ()
    rows_packed: int = 0
    documents: int = 0  # number of documents of all packed rows
    documents_unsupervised: int = 0
    tokens_unsupervised: int = 0
    rows_padded: int = 0
    tokens_padding: int = 0
    trees: int = 0
    texts: int = 0  # number of texts of all trees
    tokens_rendered: int = 0  # tokens of all texts of all trees, as if each text were stored by itself
    tokens_of_trees: int = 0  # stored tokens of all trees
    supervised_repeated: int = 0

    @property
    def supervised_tokens(self) -> int:
        """Number of stored tokens that a text supervises; of a token that samples of a tree repeat, one counts."""
        return self.supervised_kept - self.supervised_repeated

    @property
    def supervised_share(self) -> float:
        """Share of the stored tokens that a text supervises."""
        return self.supervised_tokens / max(1, self.tokens_kept)

    def __str__(self) -> str:
        return "; ".join([self.sizes, *self.findings(set())])

    @property
    def sizes(self) -> str:
        """The numbers of samples and tokens: "12 samples, 4,096 tokens (31.0% supervised), longest 512"."""
        share = f"{100 * self.supervised_share:.1f}% supervised"
        if self.supervised_repeated:
            share += f"; {self.supervised_tokens:,} tokens have {self.supervised_kept:,} labels"
        text = f"{self.samples:,} samples, {self.tokens_kept:,} tokens ({share}), longest {self.longest:,}"
        if self.trees:
            return f"{text}; {describe_trees(self.trees, self.texts, self.tokens_rendered, self.tokens_of_trees)}"
        return text

    def findings(self, explained: set[str]) -> Iterator[str]:
        """Phrases about rows that are not whole samples.  explained: reasons that are not repeated; adds those given"""
        if self.rows_packed:
            without_label = self.documents_unsupervised, self.tokens_unsupervised
            yield describe_packed(self.rows_packed, self.documents, *without_label)
        if self.tokens_padding:
            yield describe_padding(self.tokens_padding, self.rows_padded)
        if self.rows_cut:
            yield f"cut {self.rows_cut:,} samples: {_rows(self.cut, self.rows_cut)}"
        if self.rows_windowed:
            made = f"made {self.samples_windowed:,} windows of {self.rows_windowed:,} rows, and windows repeat"
            yield f"{made} {self.tokens_repeated:,} tokens: {_rows(self.windowed, self.rows_windowed)}"
        if self.tokens_cut:
            yield f"left out {self.tokens_cut:,} tokens of these rows ({self.supervised_cut:,} supervised)"
        if self.rows_dropped:
            lost = f"{self.tokens_dropped:,} tokens ({self.supervised_dropped:,} supervised)"
            yield f"dropped {self.rows_dropped:,} samples of {lost}: {_rows(self.dropped, self.rows_dropped)}"
        if self.rows_skipped:
            reasons = "; ".join(f"{count:,} x {reason}" for reason, count in self.reasons[:3])
            yield f"skipped {self.rows_skipped:,} bad rows: {_rows(self.skipped, self.rows_skipped)} ({reasons})"
        if self.rows_unwanted:
            yield f"dropped {self.rows_unwanted:,} rows by label: {_rows(self.unwanted, self.rows_unwanted)}"
        if self.unused:
            yield describe_unused(self.unused, self.unused_others)
        if self.spelled:
            yield describe_spelled(self.spelled)
        for omission in self.omitted:
            reason = "" if omission.why in explained else f" ({omission.why.rstrip('.')})"
            explained.add(omission.why)
            where = _rows(omission.rows, omission.chats)
            yield f"the chat template leaves out {omission.describe(self.chats)}: {where}{reason}"

    def to_json(self) -> dict[str, Any]:
        """The fields by name.  Fields that count trees are left out if they are 0, as in stores of older versions."""
        return {name: value for name, value in asdict(self).items() if value or name not in OF_TREES}

    @classmethod
    def from_json(cls, counts: dict[str, Any]) -> "RowReport":
        """The report from the result of its `to_json`.  Raises TypeError or KeyError for other fields."""
        pairs = {
            name: tuple((text, count) for text, count in counts[name]) for name in ("reasons", "unused", "spelled")
        }
        listed = {name: tuple(value) for name, value in counts.items() if isinstance(value, list)}
        omitted = tuple(FileOmission(**{**fields, "rows": tuple(fields["rows"])}) for fields in counts["omitted"])
        return cls(**{**counts, **listed, **pairs, "omitted": omitted})


def count_rows(lines: np.ndarray, counts: RowCounts | None = None) -> RowReport:
    """The report of a table of samples.  counts: counts of the file's rows that the table does not show; None: all 0

    row  window  tokens  supervised  new  full_tokens  full_supervised
      1  1 of 1      10           4   10           10                4     whole
      2  1 of 1      10           4   10           25                9     cut by 15 tokens, 5 supervised
      3  0 of 0       0           0    0           99                9     dropped
      4  1 of 2      10           4   10           17                9     in 2 windows that repeat 3 tokens
      4  2 of 2      10           5    7           17                9
    """
    counts = counts or RowCounts()
    rejects, unwanted = counts.rejects, counts.unwanted
    first, has_sample, windowed = lines["window"] <= 1, lines["windows"] > 0, lines["windows"] > 1
    unsupervised = (lines["windows"] == 0) & (lines["full_supervised"] == 0)
    dropped = (lines["windows"] == 0) & ~unsupervised
    cut = (lines["windows"] == 1) & (lines["tokens"] < lines["full_tokens"])
    full, full_supervised = lines["full_tokens"], lines["full_supervised"]
    tokens, supervised, new = (int(lines[name].sum()) for name in ("tokens", "supervised", "new"))
    reasons = Counter(_kind(reject.reason) for reject in rejects)
    _, documents = np.unique(lines["row"][first], return_counts=True)  # number of documents of each row
    packed = documents[documents > 1]
    return RowReport(
        rows=len(documents) + len(rejects) + len(unwanted),
        rows_whole=int((first & has_sample & ~windowed & ~cut).sum()),
        rows_cut=int(cut.sum()),
        rows_windowed=int((windowed & first).sum()),
        rows_dropped=int(dropped.sum()),
        rows_skipped=len(rejects),
        samples=int(has_sample.sum()),
        samples_windowed=int(windowed.sum()),
        tokens_kept=tokens,
        tokens_repeated=tokens - new,
        tokens_cut=int(full[first & has_sample].sum()) - new,
        tokens_dropped=int(full[dropped].sum()),
        supervised_kept=supervised,
        supervised_cut=int(full_supervised[first & has_sample].sum()) - supervised,
        supervised_dropped=int(full_supervised[dropped].sum()),
        longest=int(lines["tokens"].max(initial=0)),
        cut=_listed(lines["row"][cut]),
        windowed=_listed(lines["row"][windowed & first]),
        dropped=_listed(lines["row"][dropped]),
        skipped=tuple(reject.row for reject in rejects[:_ROWS_LISTED]),
        reasons=tuple(sorted(reasons.most_common(_REASONS_LISTED), key=lambda item: (-item[1], item[0]))),
        chats=counts.chats,
        omitted=counts.omitted,
        rows_unwanted=len(unwanted),
        unwanted=tuple(unwanted[:_ROWS_LISTED]),
        unused=counts.unused.listed,
        unused_others=counts.unused.others,
        variables=tuple(sorted(counts.variables)),
        spelled=tuple(sorted(counts.spelled.items(), key=lambda item: (-item[1], item[0]))),
        rows_packed=len(packed),
        documents=int(packed.sum()),
        documents_unsupervised=int(unsupervised.sum()),
        tokens_unsupervised=int(full[unsupervised].sum()),
        rows_padded=counts.padded,
        tokens_padding=counts.padding,
        **dict(zip(OF_TREES, counts.trees, strict=True)),
    )


def describe_trees(trees: int, texts: int, rendered: int, stored: int) -> str:
    """A phrase such as "stores 30 texts of 462,000 tokens as 1 tree of 51,000 tokens (9.1 times fewer)"."""
    return (
        f"stores {texts:,} texts of {rendered:,} tokens as {_counted(trees, 'tree')} of {_counted(stored, 'token')} "
        f"({rendered / stored:.1f} times fewer)"
    )


def describe_packed(rows: int, documents: int, unsupervised: int, tokens: int) -> str:
    """A phrase such as "cut 2 packed rows into 7 documents, of which 1 of 5 tokens has no supervised token and is
    dropped".

    unsupervised, tokens: number of documents without a supervised token, and the number of their tokens
    """
    text = f"cut {_counted(rows, 'packed row')} into {documents:,} documents"
    if not unsupervised:
        return text
    are = "has no supervised token and is" if unsupervised == 1 else "have none supervised and are"
    return f"{text}, of which {unsupervised:,} of {tokens:,} tokens {are} dropped"


def describe_padding(tokens: int, rows: int) -> str:
    """A phrase such as "dropped 24 tokens of padding of 1 row"."""
    return f"dropped {_counted(tokens, 'token')} of padding of {_counted(rows, 'row')}"


def _counted(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def _kind(reason: str, limit: int = 100) -> str:
    """Replaces numbers and quoted texts, so that reasons of one kind become equal.

    message 3 has role "assitant"; expected ...  ->  message N has role "..."; expected ...
    """
    text = _PARTICULARS.sub(lambda match: "N" if match.group()[0].isdigit() else '"..."', reason)
    return shortened(text, limit)


def _listed(numbers: np.ndarray) -> tuple[int, ...]:
    """The first 100 distinct row numbers, rising."""
    return tuple(int(number) for number in np.unique(numbers)[:_ROWS_LISTED])


def _rows(numbers: Sequence[int], count: int, shown: int = 8) -> str:
    listed = ", ".join(str(number) for number in numbers[:shown])
    return f"row {listed}" if count == 1 else f"rows {listed}{', ...' if len(numbers) > shown else ''}"
