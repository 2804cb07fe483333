"""Adds tokens to a tokenizer (data.add_tokens, data.add_special_tokens), and writes them into its files.

Added tokens get the next ids, in the order of the recipe, as in transformers.  The tokenizer searches a text for them
before any other step, without a change of the text (`normalized` is false).
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from sft.config import DataConfig
from sft.data.tokenizer.files import FILE, TokenizerFiles, encode
from sft.data.tokenizer.special_tokens import read_json, refusing
from sft.errors import DataError

_SETTINGS = "tokenizer_config.json"
_LISTS = ("extra_special_tokens", "additional_special_tokens")  # special tokens without a role, in files


def with_new_tokens(name: str, files: TokenizerFiles, data: DataConfig) -> TokenizerFiles:
    """The files with the new tokens of `data`.  Tokens that the tokenizer has already keep their ids.

    Raises DataError if the tokenizer cannot add tokens, or does not find one in a text.
    """
    if not data.new_tokens:
        return files
    if not files.is_of_file:
        raise DataError(
            f"data.add_tokens needs {FILE}, which {name} does not have: transformers makes the tokenizer of other "
            f"files.  Save the tokenizer with save_pretrained of transformers, which writes {FILE}, and name this "
            "folder in data.tokenizer."
        )
    special = {*data.add_special_tokens}
    for token in data.new_tokens:  # one by one, because the library adds special tokens first
        with refusing(lambda why: f"the tokenizer of {name} cannot add tokens: {why}."):
            files.backend.add_tokens([AddedToken(token, normalized=False, special=token in special)])
    vocabulary = files.backend.get_vocab()
    ids = {token: vocabulary[token] for token in data.new_tokens}
    for token, token_id in ids.items():
        if encode(files.backend, token).ids != [token_id]:
            raise DataError(
                f"the tokenizer of {name} does not find the token {token!r} of data.add_tokens in a text.  Choose a "
                "token that no other token contains, and that does not begin or end with spaces."
            )
    return replace(files, new_ids=ids)


def pieces_of(backend: Tokenizer, tokens: Mapping[int, str]) -> dict[int, tuple[int, ...]]:
    """For each id, the ids as which the tokenizer writes this token's text without any of `tokens`.

    () if it writes nothing, or needs one of these ids itself
    """
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] not in tokens]
    before = Tokenizer.from_str(json.dumps(state))
    pieces = {token_id: tuple(encode(before, text).ids) for token_id, text in tokens.items()}
    return {token_id: () if not tokens.keys().isdisjoint(ids) else ids for token_id, ids in pieces.items()}


def write_new_tokens(folder: Path, tokens: Mapping[str, int], special: Collection[str]) -> None:
    """Add tokens to the tokenizer files in `folder`.  tokens: the id of each token; special: those that are special"""
    if not tokens:
        return
    content = read_json(str(folder), folder, FILE)
    added = {int(entry["id"]): entry for entry in content["added_tokens"]}
    for token, token_id in tokens.items():
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.setdefault(token_id, {"id": token_id, "content": token, **flags, "special": token in special})
    content["added_tokens"] = [added[token_id] for token_id in sorted(added)]
    _write(folder / FILE, content)
    if (folder / _SETTINGS).is_file():
        _write_settings(folder, {token_id: added[token_id] for token_id in tokens.values()}, special)


def _write_settings(folder: Path, entries: Mapping[int, dict[str, Any]], special: Collection[str]) -> None:
    settings = read_json(str(folder), folder, _SETTINGS)
    if "added_tokens_decoder" in settings:
        known = settings["added_tokens_decoder"]
        for token_id, entry in entries.items():
            known.setdefault(str(token_id), {key: value for key, value in entry.items() if key != "id"})
    for key in _LISTS:
        if isinstance(listed := settings.get(key), list):
            names = [token["content"] if isinstance(token, dict) else token for token in listed]
            settings[key] = listed + [token for token in sorted(special) if token not in names]
    _write(folder / _SETTINGS, settings)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def beyond(backend: Tokenizer, num_rows: int) -> dict[int, str]:
    """The tokens for which an embedding of `num_rows` rows has no row, by id."""
    return {token_id: token for token, token_id in backend.get_vocab().items() if token_id >= num_rows}
