"""Loads the tokenizer and the chat template of a run.

Decides the files of both, the padding id, the true number of ids, the tokens around a plain text, and the digest that
is part of cache keys.  `template.py` renders chats, and `turns.py` finds the assistant's turns.

There are two kinds: the built-in byte tokenizer, which needs no file, and any Hugging Face tokenizer folder.  No code
of a folder runs.  A sandbox with a budget renders the folder's template (`sandbox.py`).
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sft.config import DataConfig
from sft.data.chat.template import ChatTemplate, TurnDelimiters, learn_delimiters
from sft.data.chat.tokenizer_files import TokenizerFiles, encode, read_tokenizer, template_for
from sft.errors import DataError

BYTE_CONTROL = {"<|im_start|>": 256, "<|im_end|>": 257, "<|pad|>": 258}
_BYTE_DIGEST = hashlib.sha256(b"sft byte tokenizer 1").hexdigest()
_Ids = tuple[int, ...]


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


@dataclass(frozen=True)
class Encoded:
    """Tokens of a text.  Token k covers the characters text[starts[k]:ends[k]]."""

    ids: np.ndarray  # int32 [n]
    offsets: Callable[[], np.ndarray]  # int32 [2n]: start, end, start, end, ...; slow, called only if needed

    @cached_property
    def starts(self) -> np.ndarray:
        return self._offsets[::2]

    @cached_property
    def ends(self) -> np.ndarray:
        return self._offsets[1::2]

    def token_span(self, start: int, end: int) -> tuple[int, int]:
        """Start and end of the tokens over text[start:end].  The first of these tokens ends after `start`."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        return first, max(first, int(np.searchsorted(self.starts, end, side="left")))

    @cached_property
    def _offsets(self) -> np.ndarray:
        return self.offsets()


@dataclass(frozen=True, kw_only=True)
class FolderTokenizer:
    """A Hugging Face tokenizer folder, with or without a chat template."""

    name: str
    vocab_size: int
    pad_id: int
    eos_id: int | None
    around_text: tuple[_Ids, _Ids]  # special tokens that the tokenizer puts before (BOS) and after a text
    chat_template: ChatTemplate | None
    turn_delimiters: TurnDelimiters | None
    control: re.Pattern[str]  # matches control tokens: special tokens, and tokens that end a turn
    control_names: dict[int, str]  # control tokens by their ids
    control_heads: tuple[str, ...]  # the first two characters of control tokens, for a faster search
    files: TokenizerFiles

    @property
    def template(self) -> ChatTemplate:
        """The chat template.  Raises DataError if there is none, because only chats need one."""
        if self.chat_template is None:
            raise self._has_no_template()
        return self.chat_template

    @property
    def delimiters(self) -> TurnDelimiters:
        """The delimiters of an assistant's turn.  Raises DataError if there is no chat template."""
        if self.turn_delimiters is None:
            raise self._has_no_template()
        return self.turn_delimiters

    def _has_no_template(self) -> DataError:
        return DataError(
            f"the tokenizer of {self.name} has no chat template, so messages cannot be written as text.  Give one with "
            "data.chat_template: a Jinja file, such as chat_template.jinja of a chat model."
        )

    @cached_property
    def digest(self) -> str:
        """A digest of everything that decides which tokens a row gets: the tokenizer as it was loaded, its special
        tokens and the chat template.  Files that do not change these, such as config.json, do not change the digest."""
        facts = {
            "backend": self.files.backend.to_str(),
            "special": self.files.special_tokens,
            "text": [self.around_text, self.eos_id],
            "template": self.chat_template and [self.chat_template.source, self.chat_template.switches],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @property
    def end_of_turn(self) -> str:
        """The token that ends an assistant's turn.  A turn with a tool call may end with another token."""
        return self.delimiters.ends[0]

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id of each control token."""
        return {name: i for i, name in self.control_names.items()}

    @cached_property
    def is_control(self) -> np.ndarray:
        """bool [vocab_size]: whether an id is a control token."""
        return np.isin(np.arange(self.vocab_size), list(self.control_names))

    def encode(self, text: str, *, as_text: bool = False) -> Encoded:
        """Ids of `text`, without added special tokens or truncation.  `as_text` splits <|im_end|> into "<", "|", ..."""
        backend = self.files.backend

        def offsets() -> np.ndarray:
            spans = encode(backend, text, as_text=as_text, offsets=True).offsets
            return np.fromiter(chain.from_iterable(spans), dtype=np.int32, count=2 * len(spans))

        # Encoding without offsets gives the same ids and takes a fifth less time.
        return Encoded(np.array(encode(backend, text, as_text=as_text).ids, np.int32), offsets)

    def encode_as_text(self, text: str, masked: str, ids: np.ndarray) -> Encoded | None:
        """Tokens of a piece of a chat in which control strings are plain text; None if no proof of that exists.

        masked, ids  the piece with stand-ins for the control strings, and its ids within the whole chat
        """
        plain = self.encode(text, as_text=True)
        # The piece by itself must have the same ids as within the chat, keep its text, and make no control token.
        alone = np.array_equal(self.encode(masked, as_text=True).ids, ids)
        lossless = self.decode(plain.ids).strip() in (text.strip(), self.normalize(text).strip())
        return plain if alone and lossless and not self.is_control[plain.ids].any() else None

    def count(self, text: str) -> int:
        """Number of tokens of a short text that occurs often."""
        if text not in self.counts:
            self.counts[text] = len(self.encode(text).ids)
        return self.counts[text]

    @cached_property
    def counts(self) -> dict[str, int]:
        """The results of `count`, by text; a proven count replaces them."""
        return {}

    @cached_property
    def normalizes(self) -> bool:
        """Whether the tokenizer changes text before it tokenises it."""
        return self.files.backend.normalizer is not None

    def normalize(self, text: str) -> str:
        """`text` after the tokenizer's own normaliser (for instance, Qwen's composes accents)."""
        normalizer = self.files.backend.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`, control tokens included, spaces untouched."""
        return str(self.files.backend.decode(np.asarray(ids).tolist(), skip_special_tokens=False))


ChatTokenizer = ByteTokenizer | FolderTokenizer


def template_name(tokenizer: ChatTokenizer) -> str:
    """The name of the tokenizer's chat template for users."""
    return "of data.tokenizer = byte" if isinstance(tokenizer, ByteTokenizer) else tokenizer.template.name


def load_tokenizer(data: DataConfig, name: str | None = None, folder: Path | None = None) -> ChatTokenizer:
    """The tokenizer `name`, with the template of `data.chat_template` or the tokenizer's own template.

    name: as messages call the tokenizer; None: `data.tokenizer`, or byte
    folder: its files; None: those of the folder `name`
    Raises DataError if the folder is missing or no tokenizer folder, or if the template is missing or unusable.
    """
    name = name or data.tokenizer or "byte"
    if name == "byte":
        if data.chat_template is not None:
            raise DataError(
                f"data.chat_template = {data.chat_template} has no effect with data.tokenizer = byte, which has its "
                "own template.  Remove data.chat_template, or name a tokenizer folder."
            )
        if data.chat_template_kwargs:
            raise DataError(
                f"data.chat_template_kwargs gives {', '.join(data.chat_template_kwargs)}, which has no effect with "
                "data.tokenizer = byte, whose template reads no variables.  Remove data.chat_template_kwargs, or "
                "name a tokenizer folder."
            )
        return ByteTokenizer()
    return _load_folder(name, folder or Path(name), data.chat_template, data.chat_template_kwargs)


def _load_folder(name: str, folder: Path, template_file: str | None, switches: dict[str, Any]) -> FolderTokenizer:
    files = read_tokenizer(name, folder)
    template = _choose_template(files, name, template_file, switches)
    backend = files.backend
    vocabulary, special = backend.get_vocab(), files.special_ids
    delimiters = None if template is None else learn_delimiters(template, files.added_ids, special)
    names = {**special, **{end: vocabulary[end] for end in (delimiters.ends if delimiters else ())}}
    # Longer names come first: if one name begins with another, the longer one must match.
    control = sorted(names, key=len, reverse=True)
    pad = files.pad_id if files.pad_id is not None else files.eos_id
    return FolderTokenizer(
        name=name,
        vocab_size=max(vocabulary.values()) + 1,  # len() is too small if some ids are unused
        pad_id=0 if pad is None else int(pad),
        eos_id=files.eos_id,
        around_text=files.around_text,
        chat_template=template,
        turn_delimiters=delimiters,
        control_names={i: token for token, i in names.items()},
        control_heads=tuple(sorted({token[:2] for token in control})),
        control=re.compile("|".join(re.escape(token) for token in control) or "(?!)"),  # (?!) never matches
        files=files,
    )


def _choose_template(
    files: TokenizerFiles, name: str, template_file: str | None, switches: dict[str, Any]
) -> ChatTemplate | None:
    """The template of the file or of the tokenizer; None if there is none, which suffices for texts and tokens."""
    source, template_name = template_for(files, has_tools=False), f"of {name}"
    if template_file is not None:
        try:
            source, template_name = Path(template_file).read_text(encoding="utf-8"), template_file
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"chat template data.chat_template = {template_file} cannot be read: {error}.") from error
    if not source:
        if switches:
            raise DataError(
                f"data.chat_template_kwargs gives {', '.join(switches)}, but the tokenizer of {name} has no chat "
                "template.  Give one with data.chat_template, or remove data.chat_template_kwargs."
            )
        return None
    template = ChatTemplate(source, template_name, dict(files.special_tokens), switches)
    _check_switches(template)
    return template


def _check_switches(template: ChatTemplate) -> None:
    """Refuses variables that the template does not read, or that are special tokens of the tokenizer."""
    taken = [name for name in template.switches if name in template.special_tokens]
    unread = [name for name in template.switches if name not in template.variables]
    if taken or unread:
        readable = ", ".join(ChatTemplate(template.source, template.name, template.special_tokens).free_switches)
        why = "the tokenizer gives itself" if taken else "the template does not read"
        raise DataError(
            f"data.chat_template_kwargs gives {', '.join(taken or unread)}, which {why}.  Variables that chat template "
            f"{template.name} reads: {readable or 'none'}."
        )
