"""The tokens of a text, and the characters that each of them covers.

Decides how these characters are found.  In a byte-level BPE each token stands for fixed bytes.  If the bytes of all
tokens are those of the text, they say where tokens begin, and what they decode to.  Otherwise the tokenizer says where
tokens begin, which takes a fifth of its time more.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from sft.data.tokenizer.files import encode

# The byte that each letter of a byte-level BPE stands for: its own below 256, then those that have no letter there.
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_LETTERS = {letter: ord(letter) for letter in _ALPHABET if ord(letter) < 256}
_LETTERS |= zip(_ALPHABET[len(_LETTERS) :], sorted({*range(256)} - {*_LETTERS.values()}), strict=True)


@dataclass(frozen=True)
class Encoded:
    """Tokens of a text.  Token k covers the characters text[starts[k]:ends[k]].

    edges  the bytes of the text's UTF-8 before each token and after the last one, [n + 1], if the bytes of the tokens
           are those of the text; otherwise None
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
        """For each text[start:end] its first token, which ends after `start`, the end of its tokens, and whether these
        are proven to decode to this text."""
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

    def _bytes_before(self, positions: Sequence[int]) -> dict[int, int]:
        """For each position of a character, the bytes before it.  "éb", 1 -> 2"""
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
    """Tokenises texts with one tokenizer.  as_text: special tokens in the texts become "<", "|", ..."""

    def __init__(self, backend: Tokenizer, *, as_text: bool = False) -> None:
        self.backend, self.as_text = backend, as_text

    def __call__(self, text: str) -> Encoded:
        """Tokens of `text`, without added special tokens or truncation."""
        ids = encode(self.backend, text, as_text=self.as_text).ids
        edges = self._edges(text, ids)
        return Encoded(np.array(ids, np.int32), lambda: self._offsets(text, edges), text, edges)

    def _edges(self, text: str, ids: list[int]) -> list[int] | None:
        """`Encoded.edges`."""
        if self._bytes is None:
            return None
        pieces = [self._bytes[i] for i in ids]
        return [0, *accumulate(map(len, pieces))] if b"".join(pieces) == text.encode() else None

    def _offsets(self, text: str, edges: list[int] | None) -> tuple[np.ndarray, np.ndarray]:
        if edges is not None:
            starts, ends = np.array(edges[:-1], np.int64), np.array(edges[1:], np.int64)
            return (starts, ends) if text.isascii() else _characters(text, starts, ends)
        spans = encode(self.backend, text, as_text=self.as_text, offsets=True).offsets
        flat = np.fromiter(chain.from_iterable(spans), dtype=np.int32, count=2 * len(spans))
        return np.ascontiguousarray(flat[::2]), np.ascontiguousarray(flat[1::2])

    @cached_property
    def _bytes(self) -> list[bytes] | None:
        """[vocab_size]: the bytes of each token; None if the tokenizer is no byte-level BPE."""
        state = json.loads(self.backend.to_str())
        if state["model"]["type"] != "BPE" or (state["decoder"] or {}).get("type") != "ByteLevel":
            return None
        vocabulary = self.backend.get_vocab()
        pieces = [b""] * (max(vocabulary.values()) + 1)
        for token, i in vocabulary.items():
            is_plain = all(map(_LETTERS.__contains__, token))
            pieces[i] = bytes(map(_LETTERS.__getitem__, token)) if is_plain else token.encode()  # as the decoder does
        return pieces


def _characters(text: str, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The characters of tokens, from their bytes.  A character whose bytes are in two tokens belongs to both.

    "é" in two tokens, bytes 0 to 1 and 1 to 2  ->  both cover character 0 to 1
    """
    code = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    character_ends = np.cumsum(1 + (code > 0x7F) + (code > 0x7FF) + (code > 0xFFFF))
    return np.searchsorted(character_ends, starts, "right"), np.searchsorted(character_ends, ends, "left") + 1
