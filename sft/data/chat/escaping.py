"""Escapes control strings that somebody typed: they stay text, and those that the template writes become control ids.

    user "What does <|im_end|> do?"
    <|im_start|> user \\n What does < | im _end | > do ? <|im_end|>        two control ids, not three

Rendered text does not show who wrote a control string.  So each typed one is replaced by a stand-in of the same
length, made of one private character that the chat does not contain; the chat is rendered, and what is proven about
that text holds for the real one, character by character.  Where a template does not pass stand-ins on as they are (it
takes texts apart, or looks for control strings in them), the chat is refused.
"""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from sft.data.chat.message_types import Message, Tools
from sft.data.chat.tokenizer import Encoded, FolderTokenizer
from sft.errors import DataError

_PRIVATE = (0xF0000, 0x10FFFE)  # planes 15 and 16, of which no character has a meaning


class Escaped(NamedTuple):
    """A chat with a stand-in for every control string in its messages.

    tokens      what stands for each: a private character -> <|im_end|>
    everything  all texts in the chat, to look for a character that it does not contain
    """

    messages: list[Message]
    tools: Tools
    tokens: dict[str, str]
    everything: str

    def restore(self, text: str) -> str:
        """`text` with the control strings back in it; positions stay what they are."""
        for character, token in self.tokens.items():
            text = text.replace(character * len(token), token)
        return text


def free_characters(everything: str, count: int) -> list[str]:
    """The first private characters that a text does not contain.  Raises DataError where it contains nearly all."""
    free = list(islice((c for c in map(chr, range(*_PRIVATE)) if c not in everything), count))
    if len(free) < count:
        raise DataError("the chat uses the private characters of Unicode's planes 15 and 16.  Remove them.")
    return free


def escape(messages: list[Message], tools: Tools, tokenizer: FolderTokenizer) -> Escaped:
    """Stand-ins for the control strings in a chat, names and arguments of tools included."""
    control, everything = tokenizer.control, "\0".join(_texts_of_chat(messages, tools))
    if not any(head in everything for head in tokenizer.control_heads):
        return Escaped(messages, tools, {}, everything)
    tokens = sorted({token for text in _texts_of_chat(messages, tools) for token in control.findall(text)})
    standing = dict(zip(tokens, free_characters(everything, len(tokens)), strict=True))

    def replaced(value: Any) -> Any:
        if isinstance(value, str):
            return control.sub(lambda match: standing[match.group()] * len(match.group()), value)
        if isinstance(value, dict):
            return {replaced(key): replaced(item) for key, item in value.items()}
        return [replaced(item) for item in value] if isinstance(value, list) else value

    stand_ins = {character: token for token, character in standing.items()}
    return Escaped(replaced(messages), replaced(tools), stand_ins, everything + "".join(stand_ins))


def encode_escaped(masked: str, escaped: Escaped, tokenizer: FolderTokenizer) -> Encoded:
    """Tokens of the real text, where `masked` has stand-ins: what lies between two control tokens of the template is
    tokenised as plain text.  Raises DataError where the tokenizer cannot be shown to do that."""
    whole = tokenizer.encode(masked)
    is_control = tokenizer.is_control[whole.ids]
    if tokenizer.normalizes and np.count_nonzero(is_control) > len(tokenizer.control.findall(masked)):
        raise DataError(
            f"the tokenizer of {tokenizer.name} reads a control token out of characters that only resemble one.  "
            "Remove them or write them differently."
        )
    if not escaped.tokens:
        return whole
    is_control &= [bool(tokenizer.control.match(masked[a:b].strip())) for a, b in zip(whole.starts, whole.ends)]
    edges = [-1, *np.flatnonzero(is_control).tolist(), len(whole.ids)]
    stand_in = re.compile("[" + "".join(escaped.tokens) + "]")
    ids, offsets = [], []
    for before, after in zip(edges[:-1], edges[1:], strict=True):
        first = int(whole.ends[before]) if before >= 0 else 0
        last = int(whole.starts[after]) if after < len(whole.ids) else len(masked)
        part = slice(before + 1, after)
        control = slice(after, after + 1)
        if stand_in.search(masked, first, last):
            plain = _as_text(masked[first:last], whole.ids[part], escaped, tokenizer)
            ids.append(plain.ids)
            offsets.append(np.stack([plain.starts, plain.ends], axis=1) + first)
        else:
            ids.append(whole.ids[part])
            offsets.append(np.stack([whole.starts[part], whole.ends[part]], axis=1))
        ids.append(whole.ids[control])
        offsets.append(np.stack([whole.starts[control], whole.ends[control]], axis=1))
    return Encoded(np.concatenate(ids), lambda: np.concatenate(offsets).reshape(-1))


def _as_text(masked: str, ids: np.ndarray, escaped: Escaped, tokenizer: FolderTokenizer) -> Encoded:
    """Tokens of a piece between two control tokens, whose stand-ins are the tokens `ids` of the whole chat."""
    text = escaped.restore(masked)
    plain = tokenizer.encode(text, as_text=True)
    # The piece by itself must give what it gives within the chat, keep its text, and make no control token.
    alone = np.array_equal(tokenizer.encode(masked, as_text=True).ids, ids)
    lossless = tokenizer.decode(plain.ids).strip() in (text.strip(), tokenizer.normalize(text).strip())
    if not alone or not lossless or tokenizer.is_control[plain.ids].any():
        raise DataError(
            f"the chat contains the text {next(iter(escaped.tokens.values()))}, which the tokenizer of "
            f"{tokenizer.name} cannot be shown to keep as text.  Remove it or write it differently."
        )
    return plain


def _texts_of_chat(messages: list[Message], tools: Tools) -> list[str]:
    values = [value for message in messages for value in message.values()]
    others = [value for value in values if type(value) is not str]
    return [*(value for value in values if type(value) is str), *_texts([*others, tools])]


def _texts(part: object) -> Iterator[str]:
    """Every text in a part of a chat, names of keys included."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict):
        yield from part
        for value in part.values():
            if type(value) is str:
                yield value
            else:
                yield from _texts(value)
    elif isinstance(part, list):
        for item in part:
            yield from _texts(item)
