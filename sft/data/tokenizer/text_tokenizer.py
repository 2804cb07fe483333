"""Tokenises texts: the tokens of a text, the characters that each token covers, and control tokens as plain text.

Decides how the characters of a token are found.  In a byte-level BPE, each token stands for fixed bytes.  If the bytes
of all tokens together are the bytes of the text, they show where each token begins and what it decodes to.  Otherwise
the tokenizer computes offsets, which takes a fifth more time.

This module does not know chats: `sft/data/chat/tokenizer.py` adds a chat template.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from sft.data.tokenizer.files import TokenizerFiles, encode, failing_at
from sft.data.tokenizer.special_tokens import refusing
from sft.data.work import Meter

# The byte for which each letter of a byte-level BPE stands.  Letters below 256 stand for the byte of their code; the
# others stand, in order, for the bytes that remain.
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_LETTERS = {letter: ord(letter) for letter in _ALPHABET if ord(letter) < 256}
_LETTERS |= zip(_ALPHABET[len(_LETTERS) :], sorted({*range(256)} - {*_LETTERS.values()}), strict=True)


@dataclass(frozen=True)
class Encoded:
    """Tokens of a text.  Token k covers the characters text[starts[k]:ends[k]].

    edges  [n + 1]: byte positions in the text's UTF-8 at which tokens begin, and at which the last one ends.  None if
           the bytes of the tokens are not the bytes of the text
    """

    ids: np.ndarray  # int32 [n]
    offsets: Callable[[], tuple[np.ndarray, np.ndarray]]  # starts and ends, int [n] each; called only if needed
    text: str = ""
    edges: list[int] | None = None

    @property
    def starts(self) -> np.ndarray:
        return self._offsets[0]

    @property
    def ends(self) -> np.ndarray:
        return self._offsets[1]

    def token_spans(self, starts: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int, bool]]:
        """The tokens of each text[start:end], as (first token, token after the last, whether they are proven to decode
        to this text).

        The first token is the first that ends after `start`; the last is the last that begins before `end`.
        """
        edges = self.edges
        if edges is None:
            firsts, stops = self.ends.searchsorted(starts, side="right"), self.starts.searchsorted(ends, side="left")
            return [(a, max(a, b), False) for a, b in zip(firsts.tolist(), stops.tolist(), strict=True)]
        before, spans = self._bytes_before([*starts, *ends]), []
        for start, end in zip(starts, ends, strict=True):
            first, stop = bisect_right(edges, before[start]) - 1, bisect_left(edges, before[end])
            is_exact = edges[first] == before[start] and edges[stop] == before[end]
            spans.append((first, max(first, stop), is_exact))
        return spans

    def begins_before(self, token: int, position: int) -> bool:
        """Whether a token covers a character before `position`."""
        if self.edges is None:
            return bool(self.starts[token] < position)
        return self.edges[token] < self._bytes_before([position])[position]

    def continued(self, num_kept: int, text: str, at: int, rest: "Encoded") -> "Encoded":
        """The tokens of `text`: the first `num_kept` tokens of this text, which are those of text[:at], and then
        `rest`, the tokens of text[at:].

        The result has `edges` only if both parts have them.
        """
        ids = np.concatenate([self.ids[:num_kept], rest.ids])
        if self.edges is not None and rest.edges is not None:
            before = self.edges[num_kept]
            edges = [*self.edges[:num_kept], *(before + edge for edge in rest.edges)]
            return Encoded(ids, lambda: offsets_of(text, edges), text, edges)
        starts = np.concatenate([self.starts[:num_kept], rest.starts + at])
        ends = np.concatenate([self.ends[:num_kept], rest.ends + at])
        return Encoded(ids, lambda: (starts, ends))

    def _bytes_before(self, positions: Sequence[int]) -> dict[int, int]:
        """For each position of a character, the number of UTF-8 bytes before it.  "éb", 1 -> 2"""
        if self.text.isascii():
            return {position: position for position in positions}
        before, at, num_bytes = {}, 0, 0
        for position in sorted({*positions}):
            num_bytes += len(self.text[at:position].encode())
            before[position], at = num_bytes, position
        return before

    @cached_property
    def _offsets(self) -> tuple[np.ndarray, np.ndarray]:
        return self.offsets()


class Encoder:
    """Tokenises texts with one tokenizer.

    as_text: whether special tokens in a text become plain text, such as "<", "|", ...

    meter: adds up the seconds of all calls
    """

    def __init__(self, backend: Tokenizer, meter: Meter | None = None, *, as_text: bool = False) -> None:
        self.backend, self.meter, self.as_text = backend, meter or Meter(), as_text

    def __call__(self, text: str) -> Encoded:
        """Tokens of `text`, without added special tokens or truncation."""
        with self.meter:
            ids = encode(self.backend, text, as_text=self.as_text).ids
        edges = self._edges(text, ids)
        return Encoded(np.array(ids, np.int32), lambda: self._offsets(text, edges), text, edges)

    def _edges(self, text: str, ids: list[int]) -> list[int] | None:
        """The field `Encoded.edges` for the tokens `ids` of `text`."""
        if self._bytes is None:
            return None
        pieces = [self._bytes[i] for i in ids]
        return [0, *accumulate(map(len, pieces))] if b"".join(pieces) == text.encode() else None

    def _offsets(self, text: str, edges: list[int] | None) -> tuple[np.ndarray, np.ndarray]:
        if edges is not None:
            return offsets_of(text, edges)
        with self.meter:
            spans = encode(self.backend, text, as_text=self.as_text, offsets=True).offsets
        flat = np.fromiter(chain.from_iterable(spans), dtype=np.int32, count=2 * len(spans))
        return np.ascontiguousarray(flat[::2]), np.ascontiguousarray(flat[1::2])

    @cached_property
    def _bytes(self) -> list[bytes] | None:
        """The bytes of each token, by id; None if the tokenizer is no byte-level BPE."""
        state = json.loads(self.backend.to_str())
        if state["model"]["type"] != "BPE" or (state["decoder"] or {}).get("type") != "ByteLevel":
            return None
        vocabulary = self.backend.get_vocab()
        pieces = [b""] * (max(vocabulary.values()) + 1)
        for token, i in vocabulary.items():
            is_plain = all(map(_LETTERS.__contains__, token))
            pieces[i] = bytes(map(_LETTERS.__getitem__, token)) if is_plain else token.encode()  # as the decoder does
        return pieces


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """The tokenizer of a folder."""

    name: str
    files: TokenizerFiles

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id of each control token."""
        return self.files.special_ids

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id.  The number of tokens may be smaller, because ids may be unused."""
        return max(self.files.backend.get_vocab().values()) + 1

    @property
    def pad_id(self) -> int:
        pad = self.files.pad_id if self.files.pad_id is not None else self.files.eos_id
        return 0 if pad is None else pad

    @cached_property
    def control_names(self) -> dict[int, str]:
        """Control tokens by their ids."""
        return {i: token for token, i in self.ids.items()}

    @cached_property
    def control(self) -> re.Pattern[str]:
        """Matches control tokens.  If one name begins with another, the longer one matches."""
        names = sorted(self.ids, key=len, reverse=True)
        return re.compile("|".join(re.escape(token) for token in names) or "(?!)")  # (?!) never matches

    @cached_property
    def control_heads(self) -> tuple[str, ...]:
        """The first two characters of control tokens, for a faster search."""
        return tuple(sorted({token[:2] for token in self.ids}))

    @cached_property
    def is_control(self) -> np.ndarray:
        """bool [vocab_size]: whether an id is a control token."""
        return np.isin(np.arange(self.vocab_size), list(self.control_names))

    @cached_property
    def always_found(self) -> dict[int, str]:
        """The control tokens, by id, before which a text can be cut without changing its other tokens.

        The tokenizer searches the unchanged text for these tokens before any other step.  The tokens on one side do not
        depend on the text on the other side, because the control token takes no spaces before it (lstrip), needs no
        spaces or punctuation around it (single_word), and no longer added token contains it.
        """
        added = self.files.backend.get_added_tokens_decoder()
        names = "\0".join(token.content for token in added.values())
        return {
            i: token.content
            for i, token in added.items()
            if i in self.control_names
            and not (token.normalized or token.lstrip or token.single_word)
            and names.count(token.content) == 1
        }

    @cached_property
    def is_always_found(self) -> np.ndarray:
        """bool [vocab_size]: whether an id is in `always_found`."""
        return np.isin(np.arange(self.vocab_size), list(self.always_found))

    @cached_property
    def meter(self) -> Meter:
        """The seconds in which this object made tokens of texts."""
        return Meter()

    @cached_property
    def encode(self) -> Encoder:
        """A function that tokenises a text, without added special tokens or truncation."""
        return Encoder(self.files.backend, self.meter)

    def encode_as_text(self, text: str, masked: str, ids: np.ndarray) -> Encoded | None:
        """The tokens of a piece of a chat, with control strings as plain text.  None if it cannot be proven that the
        control strings stay text, and that the rest of the chat keeps its tokens.

        text    the piece
        masked  the piece with private characters instead of the control strings
        ids     the ids of `masked` within the whole chat
        """
        plain = self._without_control(text)
        # The masked piece must have the same ids alone as within the chat.  The tokens of the piece must decode to its
        # text, and none may be a control token.
        alone = np.array_equal(self._without_control(masked).ids, ids)
        lossless = self.decode(plain.ids).strip() in (text.strip(), self.normalize(text).strip())
        return plain if alone and lossless and not self.is_control[plain.ids].any() else None

    @cached_property
    def _without_control(self) -> Encoder:
        """A function that tokenises a text, with control strings as plain text.

        Control tokens are marked special, because the tokenizer can treat only special tokens as text.  They are not
        removed, because other tokens would then get their ids.
        """
        state = json.loads(self.files.backend.to_str())
        for token in state["added_tokens"]:
            token["special"] = token["content"] in self.ids
        return Encoder(Tokenizer.from_str(json.dumps(state)), self.meter, as_text=True)

    @cached_property
    def normalizes(self) -> bool:
        """Whether the tokenizer changes text before it tokenises it."""
        return self.files.backend.normalizer is not None

    def normalize(self, text: str) -> str:
        """Applies the tokenizer's normaliser, which for Qwen composes accents.  Raises DataError if it fails."""
        normalizer = self.files.backend.normalizer
        with failing_at(text):
            return text if normalizer is None else str(normalizer.normalize_str(text))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`, including control tokens.  Raises DataError if the tokenizer fails."""
        with refusing(lambda why: f"the tokenizer fails to make text of {len(ids):,} tokens: {why}."):
            return str(self.files.backend.decode(np.asarray(ids).tolist(), skip_special_tokens=False))


def offsets_of(text: str, edges: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """For each token, its first character and the character after its last one: two arrays int64 [n].

    edges: the byte positions at which tokens begin, and at which the last one ends (`Encoded.edges`)
    """
    starts, ends = np.array(edges[:-1], np.int64), np.array(edges[1:], np.int64)
    return (starts, ends) if text.isascii() else _characters(text, starts, ends)


def _characters(text: str, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Converts the first and last byte positions of tokens to positions of characters.

    A character whose bytes are in two tokens belongs to both.

    "é" in two tokens, bytes 0 to 1 and 1 to 2  ->  both cover character 0 to 1
    """
    code = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    character_ends = np.cumsum(1 + (code > 0x7F) + (code > 0x7FF) + (code > 0xFFFF))
    return np.searchsorted(character_ends, starts, "right"), np.searchsorted(character_ends, ends, "left") + 1
