"""What several unit tests share."""

from collections.abc import Callable

import pytest

from sft.data.chat.tokenizer import FolderTokenizer
from tests.unit.fixtures.folder import load_folder, template


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], FolderTokenizer]:
    """`tokenizers("llama31")`: the small tokenizer with that template, made once."""
    made: dict[str, FolderTokenizer] = {}

    def get(name: str) -> FolderTokenizer:
        if name not in made:
            made[name] = load_folder(tmp_path_factory.mktemp(name), template(name))
        return made[name]

    return get
