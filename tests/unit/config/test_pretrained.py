"""The model that model.hf names is found and read once, when the recipe is read; all later code reads that value."""

import json
from pathlib import Path
from typing import Any

import pytest

from sft.config import Config
from sft.config.keys import leaves, values
from sft.config.pretrained import HubSnapshot, Pretrained
from sft.hf import hub
from sft.hf.model_family import model_family
from sft.recipe.resolved import Recipe, dump
from sft.recipe.run_checks import check_run
from sft.weights.lora.base_digest import remembered_digest
from sft.weights.trained import trained_weights
from tests.builders import QWEN3, RECIPE, of_hf, refusal_lines
from tests.unit.fixtures.hub import serving, use


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("m").mkdir()
    Path("m/config.json").write_text(json.dumps(QWEN3))
    return tmp_path


def use_everything(recipe: Recipe) -> None:
    """Calls all code that needs the family, the folder or the positions of the model before its weights are opened."""
    config = recipe.config
    found = model_family(config.model)
    assert found is not None and found.name == "qwen3"
    assert len(trained_weights(config, 300).adapted) == 2
    assert remembered_digest(config, Path("r")) == remembered_digest(config, Path("other"))
    assert "was trained on 512 positions" in check_run(recipe)[-1]


def test_after_the_recipe_is_read_nobody_asks_for_the_model_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later code looks up neither the name nor config.json, which by then belongs to another model."""
    recipe = of_hf("m", "lora.rank=2", "lora.targets=[q_proj]", "data.seq_length=1024")
    assert recipe.config.model.pretrained == Pretrained(
        name="m", folder=Path("m"), snapshot=None, family="qwen3", max_positions=512
    )

    def asked(*_: Any) -> Any:
        raise AssertionError("the hub was asked")

    for name in ("is_hub_name", "local_folder", "snapshot"):
        monkeypatch.setattr(hub, name, asked)
    Path("m/config.json").write_text("{}")
    use_everything(recipe)


def test_a_commit_of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        commit = server.add("org/m", folder / "m")
        use(monkeypatch, server, folder / "cache")
        recipe = of_hf("org/m", "lora.rank=2", "lora.targets=[q_proj]", "data.seq_length=1024")
        known = recipe.config.model.pretrained
        assert known is not None and (known.name, known.folder.name) == ("org/m", commit)
        assert known.snapshot == HubSnapshot(name="org/m", repo="org/m", commit=commit, folder=known.folder)
        asked = len(server.asked)
        use_everything(recipe)
        assert len(server.asked) == asked


def test_it_is_no_key_of_a_recipe(folder: Path) -> None:
    """The value also does not occur in texts made from a config: recipe.yaml, checkpoints, and messages between
    ranks."""
    recipe = of_hf("m")
    (line,) = refusal_lines(RECIPE, "model.pretrained=m")
    assert line.startswith("unknown key model.pretrained (command line: model.pretrained=m).")
    assert "model.pretrained" not in {*leaves(), *values(recipe.config), *recipe.origins}
    assert "pretrained" not in dump(recipe) and "pretrained" not in recipe.config.model_dump_json()
    assert Config.model_validate_json(recipe.config.model_dump_json()).model.pretrained is None


def test_a_config_without_positions(folder: Path) -> None:
    for positions in (None, 0, "512"):
        Path("m/config.json").write_text(json.dumps(QWEN3 | {"max_position_embeddings": positions}))
        known = of_hf("m").config.model.pretrained
        assert known is not None and known.max_positions is None
