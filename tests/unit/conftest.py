"""Fixtures that several unit tests share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft.data.chat.tokenizer import FolderTokenizer
from tests.builders import RECIPE
from tests.unit.fixtures import hf
from tests.unit.fixtures.folder import ENDS_OF_TEMPLATE, OF_TEMPLATE, load_folder, template
from tests.unit.fixtures.hf import Make


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], FolderTokenizer]:
    """`tokenizers("llama31")`: the small tokenizer with the template of Llama 3.1, made once."""
    made: dict[str, FolderTokenizer] = {}

    def get(name: str) -> FolderTokenizer:
        if name not in made:
            more, ends = OF_TEMPLATE.get(name, ()), ENDS_OF_TEMPLATE.get(name, ())
            made[name] = load_folder(tmp_path_factory.mktemp(name), template(name), more, ends)
        return made[name]

    return get


@pytest.fixture
def released_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder with the config.json of every model of recipes/, so that none comes from the hub."""
    for name, file in hf.ON_HUB.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(hf.released(file)))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """`made("qwen3", dtype=torch.bfloat16)`: a small random model of this family, saved by transformers."""

    def make(family: str = "qwen2", **fields: Any) -> Path:
        return hf.save(tmp_path / "source", family, **fields)

    return make


@pytest.fixture
def recipe_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with RECIPE in a.yaml, of a process that no launcher started."""
    (tmp_path / "a.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path
