"""The tokenizer of a recipe: that of data.tokenizer, or the one that belongs to model.hf."""

from sft.config import Config
from sft.data.chat.tokenizer import ChatTokenizer, load_tokenizer
from sft.errors import DataError
from sft.hf.hub import local_folder


def tokenizer_of(config: Config) -> ChatTokenizer:
    """The tokenizer and its chat template.  Raises DataError if it is missing or unusable."""
    name = config.tokenizer
    try:
        return load_tokenizer(config.data, name, None if name == "byte" else local_folder(name))
    except DataError as error:
        if config.data.tokenizer is None and name != "byte":
            raise DataError(f"data.tokenizer = null means the tokenizer of model.hf = {name}: {error}") from None
        raise
