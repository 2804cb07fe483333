"""Loads the tokenizer of a recipe, that of data.tokenizer or of model.hf, and compares two tokenizers."""

from sft.config import Config
from sft.data.chat.tokenizer import ChatTokenizer, load_tokenizer
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
    return a.digest == b.digest or a.ids_digest == b.ids_digest
