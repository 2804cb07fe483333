"""Reads the special and added tokens of the JSON files beside tokenizer.json, by the rules of transformers 5.

tokenizer_config.json may name tokens that tokenizer.json lacks.  They are added in the same order and with the same
flags as in transformers, so they get the same ids.  Older folders also have special_tokens_map.json and
added_tokens.json.

This module also converts errors that libraries raise while they read a folder to a DataError (`refusing`).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from sft.data.rows.messages import shortened
from sft.errors import DataError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def reason(error: BaseException) -> str:
    """The first line of an error of a library, or the name of its type."""
    lines = str(error).strip().splitlines()
    return shortened(lines[0].strip().rstrip("."), 200) if lines else type(error).__name__


@contextmanager
def refusing(describe: Callable[[str], str]) -> Iterator[None]:
    """A context manager that turns an error of a library into DataError(describe(reason)).

    It also turns a panic of Rust, which is a BaseException but not an Exception.  DataError, KeyboardInterrupt,
    SystemExit and GeneratorExit stay as they are.
    """
    try:
        yield
    except (DataError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise DataError(describe(reason(error))) from error


def read_json(name: str, folder: Path, file: str) -> dict[str, Any]:
    """The object of a JSON file of the folder; {} if there is no such file.  Raises DataError if it cannot be read."""
    if not (folder / file).is_file():
        return {}
    with refusing(lambda why: f"{file} of tokenizer folder {name} cannot be read: {why}."):
        content = json.loads((folder / file).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        return content


def read_special_tokens(
    name: str, folder: Path, settings: dict[str, Any], backend: Tokenizer
) -> tuple[dict[str, Any], list[AddedToken]]:
    """The special tokens by name, and all added tokens of the folder in the order in which they get ids.

    settings: the content of tokenizer_config.json; backend: the tokenizer of tokenizer.json
    """
    if "added_tokens_decoder" in settings:
        values = settings
        by_id = {int(i): _token(token) for i, token in settings["added_tokens_decoder"].items()}
    else:
        values = {**settings, **_special_tokens_map(name, folder, settings)}
        extras = _extras(values)
        special = {_token(token).content for token in [*(values.get(key) for key in _NAMED), *extras] if token}
        by_id = {
            i: AddedToken(token, normalized=token not in special, special=token in special)
            for token, i in read_json(name, folder, "added_tokens.json").items()
        } | backend.get_added_tokens_decoder()
    extras = _extras(values)
    own = [key for key, value in values.items() if key.endswith("_token") and isinstance(value, (str, dict))]
    named = {key: _token(values[key]) for key in dict.fromkeys([*_NAMED, *own]) if values.get(key)}
    if isinstance(extras, dict):  # image_token and the like
        named |= {key: _token(token) for key, token in extras.items()}
    names = {token.content for token in named.values()}
    tokens = [token for _, token in sorted(by_id.items())]
    known = {token.content for token in tokens}
    others = [*named.values(), *(map(_token, extras) if isinstance(extras, list) else ())]
    tokens += [token for token in others if token.content not in known]
    for token in tokens:
        token.special = token.special or token.content in names
    return {key: token.content for key, token in named.items()}, tokens


def _special_tokens_map(name: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The content of special_tokens_map.json, whose extra tokens are put after those of tokenizer_config.json."""
    values = read_json(name, folder, "special_tokens_map.json")
    before, after = _extras(settings), _extras(values)
    if isinstance(before, list) and isinstance(after, list):
        values["extra_special_tokens"] = before + [token for token in after if token not in before]
    return {
        key: {**value, "special": True} if isinstance(value, dict) and "content" in value else value
        for key, value in values.items()
    }


def _extras(values: dict[str, Any]) -> Any:
    """Further special tokens: a list of tokens, or {name: token}."""
    return values.get("extra_special_tokens") or values.get("additional_special_tokens") or []


def _token(value: Any) -> AddedToken:
    """The token that a JSON value describes.  value: a text, which makes a special token, or an object with flags

    "</s>"  ->  the special token </s>        {"content": "</s>", "lstrip": false, ...}  ->  </s> with these flags
    """
    if isinstance(value, str):
        return AddedToken(value, special=True)
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(**{key: value[key] for key in flags if key in value})
