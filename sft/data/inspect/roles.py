"""One pass over the rows as written: messages of each role, empty user turns, chats that end without an answer.

Rows of ready tokens have no messages and are only counted; rows that were skipped are passed over.

Decides what counts as a message's text: its content, and tool calls as JSON; not the header and the end of turn that
the template writes around it.  With the byte tokenizer its tokens are counted.  With any other, characters are counted
and the messages of some rows are tokenised, spread evenly: tokenising all of them would double the work of `prepare`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sft.console import Console
from sft.data.chat.encode_chat import Supervise, weights_of_turns
from sft.data.chat.formats import Chat, Tokenized, read_row
from sft.data.chat.messages import ROLES, Message, to_json
from sft.data.chat.tokenizer import ByteTokenizer, ChatTokenizer
from sft.data.inspect.counts import DataSet
from sft.data.inspect.findings import NUM_EXAMPLES, Finding, finding
from sft.data.read.rows import read_rows, row_name
from sft.data.read.strict_json import parse

_TOKENISED_ROWS = 2000
_TOKENISED_AT_LEAST = 100  # messages of each role, so that a rare one is not missed


@dataclass(frozen=True, kw_only=True)
class Role:
    """Messages of one role.  Tokens are of their texts alone, and supervised_share is of these."""

    role: str
    messages: int
    tokens: int
    mean_tokens: float
    supervised_share: float


class Messages(NamedTuple):
    """is_exact: the tokens of roles were counted, not estimated from characters."""

    roles: tuple[Role, ...]
    is_exact: bool
    num_tokenised: int  # rows of ready tokens
    findings: list[Finding]


def count_messages(data: DataSet, tokenizer: ChatTokenizer, supervise: Supervise, console: Console) -> Messages:
    """Counts over all rows of the files, also those that data.over_long drops.

    user "hé", assistant "yes", byte tokenizer -> user: 1 message, 3 tokens; assistant: 1 message, 3 tokens, all of
    them supervised
    """
    counters = {role: _RoleCounter() for role in ROLES}
    empty, unanswered = _Rows(), _Rows()
    stride = max(1, sum(map(len, data.rows)) // _TOKENISED_ROWS)
    num_chats = num_tokenised = 0
    for path, number, chat in _rows(data, console):
        if isinstance(chat, Tokenized):
            num_tokenised += 1
            continue
        weights = weights_of_turns(chat, supervise)
        for i, message in enumerate(chat.messages):
            role, text = message["role"], _text(message)
            is_trained = weights.get(i, float(supervise == "all")) > 0
            counters[role].add(text, tokenizer, is_trained=is_trained, is_chosen=num_chats % stride == 0)
            if role == "user" and not text.strip():
                empty.add(path, number)
        if chat.messages[-1]["role"] != "assistant":
            unanswered.add(path, number)
        num_chats += 1
    return Messages(
        roles=tuple(counter.role(name) for name, counter in counters.items() if counter.messages),
        is_exact=isinstance(tokenizer, ByteTokenizer),
        num_tokenised=num_tokenised,
        findings=[
            finding("empty_user_turns", empty.count, counters["user"].messages, empty.names),
            finding("unanswered_ends", unanswered.count, num_chats, unanswered.names),
        ],
    )


@dataclass
class _Rows:
    """How many rows have a finding, and the names of the first of them."""

    count: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, path: Path, number: int) -> None:
        self.count += 1
        if len(self.names) < NUM_EXAMPLES:
            self.names.append(row_name(path, number))


@dataclass(kw_only=True)
class _RoleCounter:
    """Sizes are in bytes with the byte tokenizer, in characters with any other."""

    messages: int = 0
    size: int = 0
    trained_size: int = 0
    tokenised: int = 0  # messages
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


def _rows(data: DataSet, console: Console) -> Iterator[tuple[Path, int, Chat | Tokenized]]:
    """The rows of the files but those that were skipped."""
    with console.track("reading rows", sum(map(len, data.rows)), "rows") as progress:
        for path, rows in zip(data.paths, data.rows, strict=True):
            wanted = iter(rows["row"].tolist())  # they rise
            next_wanted = next(wanted, None)
            for number, content in read_rows(path):
                if number == next_wanted:
                    yield path, number, read_row(parse(content))
                    progress.advance(1)
                    next_wanted = next(wanted, None)


def _text(message: Message) -> str:
    calls = [to_json(call) for call in message.get("tool_calls") or []]
    return "\n".join([message.get("content") or "", *calls]) if calls else message.get("content") or ""
