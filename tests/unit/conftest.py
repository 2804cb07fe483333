"""What several unit tests share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft.data.chat.tokenizer import FolderTokenizer
from tests.unit.fixtures import hf
from tests.unit.fixtures.folder import load_folder, template
from tests.unit.fixtures.hf import Make


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], FolderTokenizer]:
    """`tokenizers("llama31")`: the small tokenizer with that template, made once."""
    made: dict[str, FolderTokenizer] = {}

    def get(name: str) -> FolderTokenizer:
        if name not in made:
            made[name] = load_folder(tmp_path_factory.mktemp(name), template(name))
        return made[name]

    return get


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """`made("qwen3", dtype=torch.bfloat16)`: a small random model of that family, as transformers saves it."""

    def make(family: str = "qwen2", **fields: Any) -> Path:
        return hf.save(tmp_path / "source", family, **fields)

    return make
