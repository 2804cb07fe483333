"""Reads a tokenizer folder: its tokenizer.json, or without one, other files by transformers.

Native code reads these files, and may end its process.  So a child with limits reads each content first.
"""

import hashlib
from pathlib import Path

from sft.data import limited
from sft.data.tokenizer.conversion import convert
from sft.data.tokenizer.files import EXPECTED, FILE, LARGEST_ID, TokenizerFiles, from_tokenizer_json
from sft.data.tokenizer.special_tokens import refusing
from sft.errors import DataError
from sft.files.folder_files import LIST_BYTES, UnsafeFileError, matching, read_file

_VOCABULARIES = (FILE, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_READ = ("*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja")  # also by transformers
_TRIED = (FILE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")  # what native code reads
_tried: set[bytes] = set()  # digests of such files that a child could read
_ADVICE = (
    "Its normalizer, pre-tokenizer or vocabulary asks for too much, or is damaged.  Fetch the file again from a source "
    "that you trust, or give another data.tokenizer."
)


def read_tokenizer(name: str, folder: Path) -> TokenizerFiles:
    """The files of `folder`, which messages call `name`.  Raises DataError with one sentence if they cannot be used.

    A child with limits reads new files first.
    """
    content = hashlib.sha256(repr([_bytes(folder / file) for file in _TRIED]).encode()).digest()
    if content not in _tried and not limited.is_child():
        limited.call(f"tokenizer.json of {name}", _try, name, folder, advice=_ADVICE)
        _tried.update([content] if (folder / FILE).is_file() else [])
    return _read(name, folder)


def _bytes(path: Path) -> bytes:
    try:
        return hashlib.sha256(read_file(path, LIST_BYTES)).digest() if path.is_file() else b""
    except (OSError, UnsafeFileError):  # `_read` says why
        return b""


def _try(name: str, folder: Path) -> None:
    _read(name, folder)


def _read(name: str, folder: Path) -> TokenizerFiles:
    if not folder.is_dir():
        raise DataError(f"tokenizer folder {name} does not exist.  {EXPECTED}.")
    names = sorted(path.name for path in folder.iterdir())
    held = ", ".join(names[:6]) or "nothing"
    if not any(file in names for file in _VOCABULARIES):  # transformers might make an empty tokenizer of config.json
        raise DataError(f"{name} has no tokenizer (it holds {held}).  {EXPECTED}.")
    with refusing(lambda why: f"the tokenizer of {name} cannot be read: {why}."):
        for pattern in _READ:
            matching(folder, pattern, LIST_BYTES)
    if FILE in names:
        files = from_tokenizer_json(name, folder)
    else:
        files = convert(name, folder, held)
    largest = max(files.backend.get_vocab().values(), default=-1)
    if not 0 <= largest <= LARGEST_ID:
        fault = (
            "has no token" if largest < 0 else f"has the id {largest:,}, and ids of at most {LARGEST_ID:,} can be used"
        )
        raise DataError(f"the tokenizer of {name} {fault}.  {EXPECTED}.")
    return files
