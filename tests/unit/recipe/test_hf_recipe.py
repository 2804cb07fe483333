"""model.hf: the architecture in a recipe comes from a config.json."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from sft.config import RopeConfig
from sft.errors import ConfigError, DataError
from sft.recipe.load import parse_recipe
from sft.recipe.resolved import Recipe, derived, dump
from sft.recipe.tokenizer import tokenizer_of
from tests.unit.fixtures import hf, vision
from tests.unit.fixtures.folder import make_folder, template

REST = """
data: {train: unused, seq_length: 256}
train: {num_steps: 5, global_batch_size: 4}
optim: {lr: 1e-3}
run: {dir: unused}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    transformers.Qwen3Config(
        vocab_size=301,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
    ).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def recipe(folder: Path, *overrides: str, **model: Any) -> Recipe:
    typed = "".join(f"  {key}: {value}\n" for key, value in {"hf": folder, **model}.items())
    return parse_recipe(f"model:\n{typed}{REST}", "a.yaml", overrides)


def test_nothing_needs_to_be_typed(folder: Path) -> None:
    found = recipe(folder)
    model = found.config.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (3, 64, 96)
    assert (model.num_attention_heads, model.num_query_groups, model.head_dim) == (8, 2, 16)
    assert (model.vocab_size, model.norm_epsilon, model.tie_embeddings) == (301, 1e-6, False)
    assert (model.qk_norm, model.qkv_bias) == (True, False)
    assert model.rope == RopeConfig(base=1e6, scaling="linear", factor=2.0)
    path = folder / "config.json"
    assert str(found.origins["model.ffn_hidden_size"]) == f"derived: {path}, intermediate_size"
    assert str(found.origins["model.rope.base"]) == f"derived: {path}, rope_parameters"
    assert str(found.origins["model.init_std"]) == "default"


@pytest.mark.parametrize("family", ["olmoe", "qwen2_5_vl"])
def test_a_family_without_a_key_for_the_width_of_heads(tmp_path: Path, family: str) -> None:
    models: Any = hf if family in hf.FAMILIES else vision
    found = recipe(models.save(tmp_path / "model", family))
    assert found.config.model.head_dim == 4
    assert str(found.origins["model.head_dim"]).endswith("hidden_size")


def test_the_recipe_of_a_run_loads_back(folder: Path) -> None:
    """The folder has the form that an import gives it."""
    (folder.parent / "imported").mkdir()
    folder = folder.rename(folder.parent / "imported" / "hf").parent
    found = recipe(folder, "model.rope.scaling=yarn", "model.rope.factor=4", "model.rope.original_max_position=4096")
    assert parse_recipe(dump(found), "recipe.yaml").config == found.config


def test_what_is_typed_has_to_agree(folder: Path) -> None:
    assert recipe(folder, num_layers=3, head_dim="null").config.model.head_dim == 16
    with pytest.raises(ConfigError) as error:
        recipe(folder, "model.qk_norm=false", num_layers=4)
    path = folder / "config.json"
    assert str(error.value) == (
        f"1 of 2: model.num_layers = 4 (a.yaml, line 3), but {path}, num_hidden_layers says 3.  Remove "
        f"model.num_layers.\n  2 of 2: model.qk_norm = false (command line: model.qk_norm=false), but {path}, "
        "model_type says true.  Remove model.qk_norm."
    )


def test_weights_and_tokenizer_come_with_the_model(folder: Path) -> None:
    found = recipe(folder)
    assert (found.config.model.init_from, found.config.data.tokenizer) == (None, None)
    assert found.config.tokenizer == str(folder)
    assert recipe(folder, "data.tokenizer=byte").config.tokenizer == "byte"
    assert derived(found.config)["data.tokenizer"] == (str(folder), "model.hf")
    with pytest.raises(DataError, match="tokenizer of model.hf = .* has no tokenizer .it holds config.json"):
        tokenizer_of(found.config)
    make_folder(folder, template("chatml"))
    own = tokenizer_of(found.config)
    assert own.vocab_size == 417
    assert tokenizer_of(recipe(folder, f"data.tokenizer={folder}").config).digest == own.digest
    (folder.parent / "imported").mkdir()
    moved = folder.rename(folder.parent / "imported" / "hf").parent  # the form that an import gives the folder
    assert tokenizer_of(recipe(moved).config).digest == own.digest


def test_positions_may_be_changed(folder: Path) -> None:
    assert recipe(folder, "model.rope.base=5e6").config.model.rope == RopeConfig(base=5e6, scaling="linear", factor=2.0)
    changed = ["model.rope.scaling=yarn", "model.rope.factor=4", "model.rope.original_max_position=4096"]
    assert recipe(folder, *changed).config.model.rope == RopeConfig(
        base=1e6, scaling="yarn", factor=4.0, original_max_position=4096
    )
    # The factor belonged to the scaling that the override replaced.
    assert recipe(folder, "model.rope.scaling=none").config.model.rope == RopeConfig(base=1e6)
    with pytest.raises(ConfigError, match="model.rope.factor = 1 .*must be above 1 for linear scaling"):
        recipe(folder, "model.rope.factor=1")


def test_a_folder_without_or_of_an_unknown_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        recipe(tmp_path / "nowhere")
    assert str(error.value).startswith(f"model.hf = {tmp_path / 'nowhere'} (a.yaml, line 2): ")
    assert "is missing from" not in str(error.value)  # the config.json would have given the sizes
    with pytest.raises(ConfigError, match='model_type = "mamba" is not supported'):
        recipe(hf.change(folder, model_type="mamba"))


def test_experts_come_along(tmp_path: Path) -> None:
    hf.save(tmp_path / "moe", "qwen3_moe")
    found = recipe(tmp_path / "moe", "model.moe.aux_loss_coef=1e-3")  # a training option, and no part of the model
    moe = found.config.model.moe
    assert (moe.num_experts, moe.top_k, moe.ffn_hidden_size, moe.normalize_top_k) == (4, 2, 24, False)
    assert moe.aux_loss_coef == 1e-3
    path = tmp_path / "moe" / "config.json"
    assert str(found.origins["model.moe.num_experts"]) == f"derived: {path}, num_local_experts"
    with pytest.raises(ConfigError, match="model.moe.top_k = 1 .*but .*config.json, num_experts_per_tok says 2"):
        recipe(tmp_path / "moe", "model.moe.top_k=1")
