"""The tokens of a text, and the characters that each of them covers.

Decides how these characters are found.  In a byte-level BPE each token has a fixed number of bytes, so their sums say
where tokens begin, if they add up to the text.  Otherwise the tokenizer says it, which takes a fifth of its time more.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from unicodedata import is_normalized

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from sft.data.tokenizer.files import encode


@dataclass(frozen=True)
class Encoded:
    """Tokens of a text.  Token k covers the characters text[starts[k]:ends[k]].

    byte_ends  where tokens end in the UTF-8 of the text, int64 [n], one after the other; None if that is unknown
    """

    ids: np.ndarray  # int32 [n]
    offsets: Callable[[], tuple[np.ndarray, np.ndarray]]  # starts and ends, int [n] each; called only if needed
    text: str = ""
    byte_ends: np.ndarray | None = None

    @property
    def starts(self) -> np.ndarray:
        return self._offsets[0]

    @property
    def ends(self) -> np.ndarray:
        return self._offsets[1]

    def token_spans(self, starts: Sequence[int], ends: Sequence[int]) -> tuple[list[int], list[int]]:
        """First tokens and ends of the tokens over each text[start:end].  A first token ends after its `start`."""
        if self.byte_ends is None:
            firsts, stops = self.ends.searchsorted(starts, side="right"), self.starts.searchsorted(ends, side="left")
        else:  # a few positions are counted in bytes, instead of all tokens in characters
            before = self._bytes_before([*starts, *ends])
            firsts = self.byte_ends.searchsorted([before[start] for start in starts], side="right")
            last = np.array([before[end] for end in ends])
            stops = (self.byte_ends.searchsorted(last, side="left") + 1) * (last > 0)  # a token starts where one ends
        return firsts.tolist(), np.maximum(firsts, stops).tolist()

    def begins_before(self, token: int, position: int) -> bool:
        """Whether a token covers a character before `position`."""
        if self.byte_ends is None:
            return bool(self.starts[token] < position)
        return bool((self.byte_ends[token - 1] if token else 0) < self._bytes_before([position])[position])

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
        ids = np.array(encode(self.backend, text, as_text=self.as_text).ids, np.int32)
        ends = self._byte_ends(text, ids)
        return Encoded(ids, lambda: self._offsets(text, ends), text, ends)

    def _byte_ends(self, text: str, ids: np.ndarray) -> np.ndarray | None:
        if self._byte_lengths is None or not (text.isascii() or is_normalized("NFC", text)):
            return None
        ends: np.ndarray = self._byte_lengths[ids].cumsum()
        num_bytes = len(text) if text.isascii() else len(text.encode())
        return ends if len(ends) and ends[-1] == num_bytes else None

    def _offsets(self, text: str, ends: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        if ends is not None:
            starts = np.append(0, ends[:-1])
            return (starts, ends) if text.isascii() else _characters(text, starts, ends)
        spans = encode(self.backend, text, as_text=self.as_text, offsets=True).offsets
        flat = np.fromiter(chain.from_iterable(spans), dtype=np.int32, count=2 * len(spans))
        return np.ascontiguousarray(flat[::2]), np.ascontiguousarray(flat[1::2])

    @cached_property
    def _byte_lengths(self) -> np.ndarray | None:
        """int64 [vocab_size]: the number of bytes of each token; None if the tokenizer is no byte-level BPE."""
        state = json.loads(self.backend.to_str())
        is_plain = (state.get("normalizer") or {"type": "NFC"})["type"] == "NFC"
        if state["model"]["type"] != "BPE" or (state["decoder"] or {}).get("type") != "ByteLevel" or not is_plain:
            return None
        alphabet = set(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = self.backend.get_vocab()
        lengths = np.zeros(max(vocabulary.values()) + 1, np.int64)
        added = {token["content"] for token in state["added_tokens"]}
        for token, i in vocabulary.items():
            if token in added:
                lengths[i] = len(token.encode())
            elif alphabet.issuperset(token):
                lengths[i] = len(token)
            else:
                return None
        return lengths


def _characters(text: str, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The characters of tokens, from their bytes.  A character whose bytes are in two tokens belongs to both.

    "é" in two tokens, bytes 0 to 1 and 1 to 2  ->  both cover character 0 to 1
    """
    code = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    character_ends = np.cumsum(1 + (code > 0x7F) + (code > 0x7FF) + (code > 0xFFFF))
    return np.searchsorted(character_ends, starts, "right"), np.searchsorted(character_ends, ends, "left") + 1
