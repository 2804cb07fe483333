"""A tokenizer of texts, which knows its control tokens and can tokenise them as plain text.

Does not know chats: `sft/data/chat/tokenizer.py` adds a chat template.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tokenizers import Tokenizer

from sft.data.tokenizer.encoded import Encoded, Encoder
from sft.data.tokenizer.files import Ids, TokenizerFiles, failing_at
from sft.data.tokenizer.special_tokens import refusing


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
        """One more than the largest id; the number of tokens is too small if some ids are unused."""
        return max(self.files.backend.get_vocab().values()) + 1

    @property
    def pad_id(self) -> int:
        pad = self.files.pad_id if self.files.pad_id is not None else self.eos_id
        return 0 if pad is None else pad

    @property
    def eos_id(self) -> int | None:
        return self.files.eos_id

    @property
    def around_text(self) -> tuple[Ids, Ids]:
        """Special tokens that the tokenizer puts before (BOS) and after a text."""
        return self.files.around_text

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

    def encode(self, text: str) -> Encoded:
        """Ids of `text`, without added special tokens or truncation."""
        return self._encoder(text)

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self.files.backend)

    def encode_as_text(self, text: str, masked: str, ids: np.ndarray) -> Encoded | None:
        """Tokens of a piece of a chat in which control strings are plain text; None if no proof of that exists.

        masked, ids  the piece with stand-ins for the control strings, and its ids within the whole chat
        """
        plain = self._without_control(text)
        # The piece by itself must have the same ids as within the chat, keep its text, and make no control token.
        alone = np.array_equal(self._without_control(masked).ids, ids)
        lossless = self.decode(plain.ids).strip() in (text.strip(), self.normalize(text).strip())
        return plain if alone and lossless and not self.is_control[plain.ids].any() else None

    @cached_property
    def _without_control(self) -> Encoder:
        """Tokenises control tokens as text, as special ones.  If they were removed, others would get their ids."""
        state = json.loads(self.files.backend.to_str())
        for token in state["added_tokens"]:
            token["special"] = token["content"] in self.ids
        return Encoder(Tokenizer.from_str(json.dumps(state)), as_text=True)

    @cached_property
    def normalizes(self) -> bool:
        """Whether the tokenizer changes text before it tokenises it."""
        return self.files.backend.normalizer is not None

    def normalize(self, text: str) -> str:
        """`text` after the tokenizer's own normaliser (for instance, Qwen's composes accents)."""
        normalizer = self.files.backend.normalizer
        with failing_at(text):
            return text if normalizer is None else str(normalizer.normalize_str(text))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`, control tokens included, spaces untouched."""
        with refusing(lambda why: f"the tokenizer fails to make text of {len(ids):,} tokens: {why}."):
            return str(self.files.backend.decode(np.asarray(ids).tolist(), skip_special_tokens=False))
