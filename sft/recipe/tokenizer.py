"""Loads the tokenizer of a recipe, that of data.tokenizer or of model.hf, and compares two tokenizers."""

import json
from typing import Any

from sft.config import Config
from sft.data.chat.tokenizer import ByteTokenizer, ChatTokenizer, FolderTokenizer, load_tokenizer
from sft.errors import DataError
from sft.hf.pretrained import tokenizer_folder


def tokenizer_of(config: Config) -> ChatTokenizer:
    """The tokenizer and its chat template.  Raises DataError if it is missing or unusable."""
    name = config.tokenizer
    try:
        return load_tokenizer(config.data, name, tokenizer_folder(config))
    except DataError as error:
        if config.data.tokenizer is None and name != "byte":
            raise DataError(f"data.tokenizer = null means the tokenizer of model.hf = {name}: {error}") from None
        raise


def same_ids(a: ChatTokenizer, b: ChatTokenizer) -> bool:
    """Whether two tokenizers make the same tokens of every text.

    Chat template and end tokens may differ, as they do between a model and the export of a run (`served_files.py`).
    """
    if isinstance(a, ByteTokenizer) or isinstance(b, ByteTokenizer):
        return a.digest == b.digest
    return a.digest == b.digest or _of_text(a) == _of_text(b)


def _of_text(tokenizer: FolderTokenizer) -> dict[str, Any]:
    """The fields of the tokenizer that decide the ids of a text.  Whether an added token is special changes no ids."""
    content = json.loads(tokenizer.files.backend.to_str())
    added = [{key: value for key, value in token.items() if key != "special"} for token in content["added_tokens"]]
    return {**{part: content[part] for part in ("model", "normalizer", "pre_tokenizer")}, "added_tokens": added}
