"""The built-in tokenizer of bytes, which needs no file."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BYTE_CONTROL = {"<|im_start|>": 256, "<|im_end|>": 257, "<|pad|>": 258}
_BYTE_DIGEST = hashlib.sha256(b"sft byte tokenizer 1").hexdigest()


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """UTF-8 bytes and three control ids.  Control strings typed inside a message stay bytes.

    "hé" -> 104 195 169        <|im_start|> 256        <|im_end|> 257        <|pad|> 258
    """

    name: str = "byte"
    vocab_size: int = 256 + len(BYTE_CONTROL)
    pad_id: int = BYTE_CONTROL["<|pad|>"]
    end_of_turn: str = "<|im_end|>"
    digest: str = _BYTE_DIGEST

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`, control ids by their names; broken UTF-8 becomes U+FFFD."""
        control = {i: name.encode() for name, i in BYTE_CONTROL.items()}
        return b"".join(control.get(int(i)) or bytes([int(i)]) for i in ids).decode("utf-8", errors="replace")
