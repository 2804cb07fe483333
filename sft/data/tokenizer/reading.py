"""Reads a tokenizer folder: its tokenizer.json; if there is none, transformers reads the other files.

Native code reads these files, and may crash its process.  So a child process with limits reads new files first.  This
module decides what a failure of transformers means: a missing package, an unusable config.json, or unusable other
files.
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sft.data import limited
from sft.data.tokenizer.files import EXPECTED, FILE, LARGEST_ID, TokenizerFiles, complete, from_tokenizer_json
from sft.data.tokenizer.special_tokens import read_json, reason, refusing
from sft.errors import DataError
from sft.files.folder_files import LIST_BYTES, UnsafeFileError, matching, read_file

_VOCABULARIES = (FILE, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_READ = ("*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja")  # files that are read
_TRIED = (FILE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")  # files that native code reads
_tried: set[bytes] = set()  # digests of the files _TRIED of folders that a child could read
_ADVICE = (
    "Its normalizer, pre-tokenizer or vocabulary asks for too much, or is damaged.  Fetch the file again from a source "
    "that you trust, or give another data.tokenizer."
)


def read_tokenizer(name: str, folder: Path) -> TokenizerFiles:
    """The contents of `folder`, which messages call `name`.  A child process with limits reads new files first.

    Raises DataError if the folder has no usable tokenizer.
    """
    content = hashlib.sha256(repr([_bytes(folder / file) for file in _TRIED]).encode()).digest()
    if content not in _tried and not limited.is_child():
        limited.call(f"tokenizer.json of {name}", _try, name, folder, advice=_ADVICE)
        _tried.update([content] if (folder / FILE).is_file() else [])
    return _read(name, folder)


def _bytes(path: Path) -> bytes:
    try:
        return hashlib.sha256(read_file(path, LIST_BYTES)).digest() if path.is_file() else b""
    except (OSError, UnsafeFileError):  # `_read` raises an error with the reason
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
        files = _convert(name, folder, held)
    largest = max(files.backend.get_vocab().values(), default=-1)
    if not 0 <= largest <= LARGEST_ID:
        fault = (
            "has no token" if largest < 0 else f"has the token id {largest:,}; the largest usable id is {LARGEST_ID:,}"
        )
        raise DataError(f"the tokenizer of {name} {fault}.  {EXPECTED}.")
    return files


def load(folder: Path, *, fix_mistral_regex: bool = False) -> Any:
    """The tokenizer that AutoTokenizer makes from the files of a folder alone.  Raises any error, also a panic of Rust,
    which is no Exception.

    Always passes fix_mistral_regex.  Without it, transformers would read folders of Mistral's models with
    mistral-common if it is installed.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False, fix_mistral_regex=fix_mistral_regex
    )


def _convert(name: str, folder: Path, held: str) -> TokenizerFiles:
    """The contents of a folder without tokenizer.json; transformers makes the tokenizer of files like vocab.json.

    held: names of files in the folder, for errors
    Raises DataError if transformers makes no tokenizer with character offsets.
    """
    try:
        hf = load(folder, fix_mistral_regex=True)
        is_fast = getattr(hf, "is_fast", False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizer classes of transformers may raise any error
        raise DataError(_why_not(name, folder, held, error)) from error
    if not is_fast:
        raise DataError(
            f"the tokenizer of {name} has no character offsets, so the supervised tokens cannot be verified.  Save "
            "the tokenizer in the fast format (tokenizer.json)."
        )
    note = (
        f"{name} has no tokenizer.json, so transformers makes the tokenizer ({type(hf).__name__}) of other files, and "
        "other releases may make another one.  To keep it, save it with save_pretrained of transformers."
    )
    settings = read_json(name, folder, "tokenizer_config.json")
    special = dict(hf.special_tokens_map)
    return complete(name, folder, settings, hf.backend_tokenizer, special, [note], is_of_file=False)


def _why_not(name: str, folder: Path, held: str, error: BaseException) -> str:
    """The error message: why transformers could not load a folder, and what would work."""
    models = sorted(path.name for path in folder.glob("*.model"))
    package = "sentencepiece" if models and _is_sentencepiece(folder / models[0]) else "tiktoken" if models else None
    if package is not None and find_spec(package) is None:
        return (
            f"{models[0]} of {name} needs the package {package} to be read, which is not installed here: pip install "
            f"{package}; or give a folder with tokenizer.json."
        )
    if str(_config_error(folder)) == str(error):
        return (
            f"config.json of {name} cannot be read by transformers, which chooses the kind of tokenizer by it: "
            f"{reason(error)}.  Correct it, or give data.tokenizer a folder with tokenizer.json."
        )
    return f"{name} is not a usable tokenizer folder (it holds {held}): {reason(error)}.  {EXPECTED}."


def _is_sentencepiece(path: Path) -> bool:
    """Whether a .model file is a file of SentencePiece, whose first byte is 0x0A.  Files of tiktoken are base64
    text."""
    with path.open("rb") as file:
        return file.read(1) == b"\n"


def _config_error(folder: Path) -> BaseException | None:
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # also a panic of Rust; `_why_not` compares it
        return error
    return None
