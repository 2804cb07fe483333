"""Reads the contents of a tokenizer folder: the tokenizer, its special tokens, its chat templates, and the tokens at
which generation ends.

tokenizer.json decides how text becomes tokens.  Transformers may choose a class by config.json that replaces parts of
this tokenizer; `comparison.py` finds out whether the results differ.  Only a folder without tokenizer.json is read by
transformers.  tokenizer_config.json and the files beside it add names of special tokens, and tokens that tokenizer.json
lacks, by the rules of transformers 5.  No code of a folder runs.

`chat/tokenizer.py` decides which template a chat gets, and `template/sandbox.py` what a template may do.
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sft.data.tokenizer import mistral_regex
from sft.data.tokenizer.special_tokens import read_json, read_special_tokens, refusing
from sft.errors import DataError

Ids = tuple[int, ...]
EXPECTED = "data.tokenizer must be `byte` (built in), a folder with tokenizer.json, or a model on the hub"
FILE = "tokenizer.json"
LARGEST_ID = (1 << 24) - 1  # tables have a row for each id; the largest known vocabulary has 1,000,000
_TEXTS = ("a", "A", "0", " a", "the", "一", "\n")


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The contents of a tokenizer folder.

    backend          the tokenizer of tokenizer.json, with the added tokens of the other files; without a length limit,
                     padding and post-processor
    around_text      ids that the post-processor puts before (BOS) and after a text.  Llama 3: ((128000,), ())
    special_tokens   the variables that a template gets: {"bos_token": "<s>", "eos_token": "</s>"}
    templates        {"default": "{% for ...", "tool_use": ...}; empty if the folder has no chat template
    generation_ends  the tokens of eos_token_id in generation_config.json; empty if there are none
    notes            notes about these files for the user
    new_ids          the id of each token of data.add_tokens and data.add_special_tokens
    has_mended_regex whether `mistral_regex.py` replaced the regex of the pre-tokenizer
    """

    folder: Path
    backend: Tokenizer
    around_text: tuple[Ids, Ids]
    special_tokens: dict[str, Any]
    templates: dict[str, str] = field(default_factory=dict)
    generation_ends: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    new_ids: Mapping[str, int] = field(default_factory=dict)
    has_mended_regex: bool = False
    is_of_file: bool = True  # False: transformers made the tokenizer of other files than tokenizer.json

    @cached_property
    def added_ids(self) -> dict[str, int]:
        """The id of each added token, special or not."""
        return {token.content: i for i, token in sorted(self.backend.get_added_tokens_decoder().items())}

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Ids of the added tokens that are special."""
        decoder = self.backend.get_added_tokens_decoder()
        return {token.content: i for i, token in sorted(decoder.items()) if token.special}

    @property
    def eos_id(self) -> int | None:
        return self._id("eos_token")

    @property
    def pad_id(self) -> int | None:
        return self._id("pad_token")

    def _id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def encode(backend: Tokenizer, text: str, *, as_text: bool = False, offsets: bool = False) -> Any:
    """The tokenizers.Encoding of `text`, without added special tokens.  Raises DataError if the tokenizer fails at it.

    as_text  special tokens in `text` become plain text: <|im_end|> becomes "<", "|", ...
    offsets  whether to compute the characters that each token covers, which takes longer
    """
    backend.encode_special_tokens = as_text
    with failing_at(text):
        if offsets:
            return backend.encode(text, add_special_tokens=False)
        return backend.encode_batch_fast([text], add_special_tokens=False)[0]


def failing_at(text: str) -> AbstractContextManager[None]:
    """A context that raises DataError with the beginning of the text if the tokenizer's native code fails in it."""
    return refusing(
        lambda why: f"the tokenizer fails at a text of {len(text):,} characters, {json.dumps(text[:20])}...: {why}.  "
        "Shorten the text, or leave it out."
    )


def around_text(name: str, backend: Tokenizer) -> tuple[Ids, Ids]:
    """The ids that the post-processor puts before and after a text.  Raises DataError if no text gets a token."""
    for text in _TEXTS:
        with refusing(lambda why: f"the tokenizer of {name} fails at {text!r}: {why}.  Give another data.tokenizer."):
            encoding = backend.encode(text, add_special_tokens=True)
        mask = encoding.special_tokens_mask  # 1 1 0 1: two tokens before the text, one after it
        if 0 in mask:
            first, last = mask.index(0), len(mask) - mask[::-1].index(0)
            return tuple(encoding.ids[:first]), tuple(encoding.ids[last:])
    raise DataError(
        f"the tokenizer of {name} gives no token for {', '.join(map(repr, _TEXTS))}, so no text can be trained.  Its "
        "vocabulary lacks the letters of its pre-tokenizer.  Give another data.tokenizer."
    )


def plain(backend: Tokenizer) -> Tokenizer:
    """Changes `backend` so that it neither cuts nor pads texts, nor adds tokens to them, and returns it."""
    backend.no_truncation()
    backend.no_padding()
    # The template alone places the control tokens of a chat.  A post-processor would also remove spaces from the
    # character spans of tokens (ByteLevel's trim_offsets).
    backend.post_processor = None
    return backend


def from_tokenizer_json(name: str, folder: Path) -> TokenizerFiles:
    """The files of a folder with tokenizer.json.  Raises DataError if they cannot be used."""

    def describe(why: str) -> str:
        return f"tokenizer.json of {name} is not a usable tokenizer: {why}{_pointer(folder)}.  {EXPECTED}."

    with refusing(describe):
        backend = Tokenizer.from_file(str(folder / FILE))
    settings = read_json(name, folder, "tokenizer_config.json")
    with refusing(lambda why: f"tokenizer_config.json of {name} has a special token that cannot be used: {why}."):
        special, added = read_special_tokens(name, folder, settings, backend)
        before = backend.get_vocab()
        backend.add_tokens(added)
    notes = []
    if lacking := [token.content for token in added if token.content not in before]:
        more = f" and {len(lacking) - 3:,} more" if len(lacking) > 3 else ""
        notes.append(
            f"tokenizer.json of {name} lacks tokens that the files beside it name: {', '.join(lacking[:3])}{more}.  "
            "They get the next ids, as in transformers."
        )
    mended = mistral_regex.mend(name, folder, backend)
    return complete(name, folder, settings, backend, special, [*notes, *([mended] if mended else [])], bool(mended))


def complete(
    name: str,
    folder: Path,
    settings: dict[str, Any],
    backend: Tokenizer,
    special: dict[str, Any],
    notes: list[str],
    has_mended_regex: bool = False,
    *,
    is_of_file: bool = True,
) -> TokenizerFiles:
    """The contents of a folder whose tokenizer `backend` and special tokens `special` are known already.

    Reads chat templates and ends of generation, and adds notes about them.  Raises DataError if a file is invalid.
    """
    around = around_text(name, backend)
    templates = _templates(name, folder, settings, notes)
    ends = _generation_ends(name, folder, backend, notes)
    return TokenizerFiles(
        folder=folder,
        backend=plain(backend),
        around_text=around,
        special_tokens=special,
        templates=templates,
        generation_ends=ends,
        notes=tuple(notes),
        has_mended_regex=has_mended_regex,
        is_of_file=is_of_file,
    )


def _pointer(folder: Path) -> str:
    with (folder / FILE).open("rb") as file:
        is_pointer = file.read(30).startswith(b"version https://git-lfs")
    return " (it is a pointer of Git LFS: fetch the file with `git lfs pull`)" if is_pointer else ""


def _templates(name: str, folder: Path, settings: dict[str, Any], notes: list[str]) -> dict[str, str]:
    """The templates by name.  Jinja files replace all templates of tokenizer_config.json, as in transformers."""
    paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        paths = {"default": folder / "chat_template.jinja", **paths}
    with refusing(lambda why: f"a chat template of {name} cannot be read: {why}."):
        templates = {key: path.read_text(encoding="utf-8") for key, path in paths.items()}
    chosen: Any = templates or settings.get("chat_template")
    if not chosen and (chosen := read_json(name, folder, "chat_template.json").get("chat_template")):
        notes.append(f"the chat template of {name} is that of chat_template.json, the only one in the folder.")
    if isinstance(chosen, list):
        chosen = {entry["name"]: entry["template"] for entry in chosen if isinstance(entry, dict) and len(entry) >= 2}
    if isinstance(chosen, str):
        chosen = {"default": chosen}
    if chosen and not (isinstance(chosen, dict) and all(isinstance(text, str) for text in chosen.values())):
        raise DataError(f"chat_template in tokenizer_config.json of {name} is neither a text nor texts with names.")
    return chosen or {}


def _generation_ends(name: str, folder: Path, backend: Tokenizer, notes: list[str]) -> tuple[str, ...]:
    """The tokens of eos_token_id in generation_config.json; adds a note if the file cannot be read.

    2 -> ("</s>",)        [106, 1] -> ("<end_of_turn>", "<eos>")
    """
    try:
        ids = read_json(name, folder, "generation_config.json").get("eos_token_id")
    except DataError as error:
        notes.append(f"{error}  The tokens at which generation ends are not taken from it.")
        return ()
    ids = ids if isinstance(ids, list) else [ids]
    tokens = [backend.id_to_token(i) for i in ids if isinstance(i, int) and 0 <= i <= LARGEST_ID]
    return tuple(dict.fromkeys(token for token in tokens if token is not None))
