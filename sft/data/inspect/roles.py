"""Counts messages of each role, empty user turns, and chats that end without an answer, in one pass over the rows.

Plain texts and rows that already are token ids have no messages; only their number is counted.  Skipped rows are
ignored.

The text of a message is its content and its tool calls as JSON, without the turn delimiters that the template adds.
With the byte tokenizer, all tokens of a text are counted.  With other tokenizers, tokens are estimated from the number
of all characters, and from the tokens of the messages of about 2,000 evenly spaced chats.  Tokenising all rows would
double the work of `prepare`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sft.console import Console
from sft.data.chat.supervised import Supervise, weights_of_turns
from sft.data.chat.tokenizer import ByteTokenizer, ChatTokenizer
from sft.data.inspect.counts import DataSet
from sft.data.inspect.findings import NUM_EXAMPLES, Finding, finding
from sft.data.read.rows import DataFile, read_rows, row_name
from sft.data.read.strict_json import parse
from sft.data.rows.formats import Chat, PlainText, read_row
from sft.data.rows.messages import ROLES, Message, text_of, to_json, with_arguments
from sft.data.rows.token_rows import Tokenized

_TOKENISED_ROWS = 2000
_TOKENISED_AT_LEAST = 100  # messages of each role, so rare roles have an estimate too


@dataclass(frozen=True, kw_only=True)
class Role:
    """Counts of the messages of one role.

    tokens            tokens of the texts of messages, without turn delimiters
    supervised_share  share of these texts that is supervised, in characters (with the byte tokenizer in bytes)
    """

    role: str
    messages: int
    tokens: int
    mean_tokens: float
    supervised_share: float


class MessageCounts(NamedTuple):
    """Counts of messages.  is_exact: whether tokens were counted; False: they were estimated from characters"""

    roles: tuple[Role, ...]
    is_exact: bool
    num_texts: int  # number of rows that are plain texts
    num_tokenised: int  # number of rows that already are token ids
    findings: list[Finding]


def count_messages(data: DataSet, tokenizer: ChatTokenizer, supervise: Supervise, console: Console) -> MessageCounts:
    """Counts messages over all rows of the files, including rows that data.over_long drops.

    user "hé", assistant "yes", byte tokenizer -> user: 1 message, 3 tokens; assistant: 1 message, 3 tokens, all of
    them supervised
    """
    counters = {role: _RoleCounter() for role in ROLES}
    empty, unanswered = _Rows(), _Rows()
    stride = max(1, sum(map(len, data.rows)) // _TOKENISED_ROWS)
    num_chats = num_texts = num_tokenised = 0
    for path, number, chat in _rows(data, console):
        if not isinstance(chat, Chat):
            num_texts += isinstance(chat, PlainText)
            num_tokenised += isinstance(chat, Tokenized)
            continue
        for answered in (chat, *chat.others):
            weights = weights_of_turns(answered, supervise)
            for i, message in enumerate(answered.messages):
                if answered is not chat and message in chat.messages[i : i + 1]:
                    continue  # this message of the prompt was counted with the first completion
                role, text = message["role"], _text(message)
                is_trained = weights.get(i, float(supervise == "all")) > 0
                counters[role].add(text, tokenizer, is_trained=is_trained, is_chosen=num_chats % stride == 0)
                if role == "user" and not text.strip():
                    empty.add(path, number)
        if chat.messages[-1]["role"] != "assistant":
            unanswered.add(path, number)
        num_chats += 1
    return MessageCounts(
        roles=tuple(counter.role(name) for name, counter in counters.items() if counter.messages),
        is_exact=isinstance(tokenizer, ByteTokenizer),
        num_texts=num_texts,
        num_tokenised=num_tokenised,
        findings=[
            finding("empty_user_turns", empty.count, counters["user"].messages, empty.names),
            finding("unanswered_ends", unanswered.count, num_chats, unanswered.names),
        ],
    )


@dataclass
class _Rows:
    """The number of rows with a finding, and the names of the first few of these rows."""

    count: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, path: DataFile, number: int) -> None:
        self.count += 1
        if len(self.names) < NUM_EXAMPLES:
            self.names.append(row_name(path, number))


@dataclass(kw_only=True)
class _RoleCounter:
    """Counts of one role.  Sizes are in bytes with the byte tokenizer, in characters with other tokenizers."""

    messages: int = 0
    size: int = 0
    trained_size: int = 0
    tokenised: int = 0  # number of tokenised messages
    tokenised_size: int = 0
    tokenised_tokens: int = 0

    def add(self, text: str, tokenizer: ChatTokenizer, *, is_trained: bool, is_chosen: bool) -> None:
        size = len(text.encode()) if isinstance(tokenizer, ByteTokenizer) else len(text)
        self.messages += 1
        self.size += size
        self.trained_size += size if is_trained else 0
        if isinstance(tokenizer, ByteTokenizer):
            self.tokenised_size, self.tokenised_tokens = self.size, self.size
        elif is_chosen or self.tokenised < _TOKENISED_AT_LEAST:
            self.tokenised += 1
            self.tokenised_size += size
            self.tokenised_tokens += len(tokenizer.encode(text).ids)

    def role(self, name: str) -> Role:
        tokens = round(self.size * self.tokenised_tokens / max(1, self.tokenised_size))
        return Role(
            role=name,
            messages=self.messages,
            tokens=tokens,
            mean_tokens=tokens / self.messages,
            supervised_share=self.trained_size / max(1, self.size),
        )


def _rows(data: DataSet, console: Console) -> Iterator[tuple[DataFile, int, Chat | PlainText | Tokenized]]:
    """Yields path, row number and content of every row of the files that is in the store."""
    numbers = [np.unique(rows["row"]) for rows in data.rows]  # rising; a packed row has several lines
    with console.track("reading rows", sum(map(len, numbers)), "rows") as progress:
        for path, used in zip(data.paths, numbers, strict=True):
            wanted = iter(used.tolist())
            next_wanted = next(wanted, None)
            for number, content in read_rows(path):
                if number == next_wanted:
                    yield path, number, read_row(parse(content))
                    progress.advance(1)
                    next_wanted = next(wanted, None)


def _text(message: Message) -> str:
    [message] = with_arguments([message], as_text=False)
    calls = [to_json(call) for call in message.get("tool_calls") or []]
    return "\n".join([text_of(message), *calls]) if calls else text_of(message)
