"""Counts and lists the texts that chat templates left out of the rows of a file, by role and kind.

    {"row": 3, "message": 1, "role": "system", "kind": "content", "num": 1}      a line of omitted.jsonl

Decides how omissions are described, and the error text for data.on_omitted = error.  Does not decide which texts are
left out (`chat/omitted.py`).
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import NamedTuple

from sft.data.chat.omitted import OmittedText, why_omitted
from sft.data.chat.render import RenderedChat
from sft.data.chat.tokenizer import ChatTokenizer, template_name
from sft.data.read.rows import DataFile, row_name
from sft.data.rows.messages import as_unicode
from sft.errors import DataError

_ROWS_LISTED = 100
_SHOWN = 60
_NUM_CHARACTERS = 200  # number of characters that are stored of an omitted text


class RowOmission(NamedTuple):
    """Texts of one role and kind that the template left out of a row.

    said  the beginning of the first of these texts
    why   the reason for the omission
    A part of a file gives `said` and `why` for its first omission of each role and kind; otherwise, both are "".
    """

    row: int
    message: int  # number of the first message, or tool for a tool schema; counts from 1
    role: str
    kind: str
    num: int  # number of messages from which such a text was left out
    said: str = ""
    why: str = ""

    def as_line(self) -> str:
        """A line of omitted.jsonl."""
        return json.dumps(dict(zip(self._fields[:5], self[:5], strict=True))) + "\n"

    def file_omission(self) -> "FileOmission":
        """This omission as a FileOmission with one row."""
        row, message, role, kind, num, said, why = self
        return FileOmission(role=role, kind=kind, count=num, chats=1, rows=(row,), message=message, said=said, why=why)


@dataclass(frozen=True, kw_only=True)
class FileOmission:
    """Texts of one role and kind that the template left out of a file.

    said  the beginning of the first of these texts
    why   the reason for its omission, and a setting that would keep the text
    """

    role: str
    kind: str
    count: int  # number of messages from which such a text was left out
    chats: int  # number of chats with such messages
    rows: tuple[int, ...]  # rows of the first 100 of these chats
    message: int  # number of the first message in the first of the rows; counts from 1
    said: str
    why: str

    @property
    def name(self) -> str:
        """The kind of text in words, such as "system content", "assistant reasoning", "tool result"."""
        return named(self.role, self.kind)

    def describe(self, num_chats: int) -> str:
        """A phrase for reports, such as "the assistant reasoning of 3 of 10 chats (7 messages)"."""
        messages = f" ({self.count:,} {'tools' if self.role == 'tools' else 'messages'})"
        shown = messages if self.count != self.chats else ""
        return f"the {self.name} of {self.chats:,} of {num_chats:,} {'chat' if num_chats == 1 else 'chats'}{shown}"


def named(role: str, kind: str) -> str:
    """The words for texts of a role and kind: "assistant reasoning"; for tools the kind alone, "tool result"."""
    return kind if role in ("tool", "tools") else f"{role} {kind}"


def row_omissions(
    row: int, chat: RenderedChat, explained: set[tuple[str, str]], texts: Sequence[OmittedText]
) -> Iterator[RowOmission]:
    """Yields the omissions of a chat, one for each role and kind of text.

    row        number of the chat's row
    explained  the (role, kind) pairs for which an earlier row of the part gave a reason; this function adds its pairs
    texts      the omitted texts
    """
    for kind, num in Counter((text.role, text.kind) for text in texts).items():
        first = next(text for text in texts if (text.role, text.kind) == kind)
        said, why = ("", "") if kind in explained else (first.text, why_omitted(chat, first))
        explained.add(kind)
        yield RowOmission(row, first.number, *kind, num, as_unicode(said[:_NUM_CHARACTERS]), why)


def add_up(omissions: Iterable[FileOmission], *, rows_listed: int = _ROWS_LISTED) -> tuple[FileOmission, ...]:
    """Adds up omissions of the same role and kind.  The result begins with the omission of the most chats.

    rows_listed  maximum number of rows in each result; 0 for several files, because row numbers belong to one file
    """
    by_kind: dict[tuple[str, str], list[FileOmission]] = {}
    for omission in omissions:
        by_kind.setdefault((omission.role, omission.kind), []).append(omission)
    totals = [
        replace(
            same[0],
            count=sum(omission.count for omission in same),
            chats=sum(omission.chats for omission in same),
            rows=tuple(islice(chain.from_iterable(omission.rows for omission in same), rows_listed)),
        )
        for same in by_kind.values()
    ]
    return tuple(sorted(totals, key=lambda total: (-total.chats, total.role, total.kind)))


def refusal(file: DataFile, row: int, first: RowOmission | FileOmission, tokenizer: ChatTokenizer) -> DataError:
    """The error for data.on_omitted = error.  first: the first omission of the file; row: the number of its row"""
    source = "tool" if first.role == "tools" else "message"
    text = json.dumps(first.said if len(first.said) < _SHOWN else first.said[: _SHOWN - 3] + "...", ensure_ascii=False)
    return DataError(
        f"{row_name(file, row)}: {source} {first.message}: chat template {template_name(tokenizer)} leaves out the "
        f"{named(first.role, first.kind)} {text}, and data.on_omitted is error.  {first.why}  With data.on_omitted = "
        "report, the trainer counts omitted texts and continues."
    )
