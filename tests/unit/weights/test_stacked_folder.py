"""PEFT folders with adapters of stacked experts (target_parameters): what is read from them, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sft.config import Config
from sft.config.lora import LoraConfig
from sft.errors import CheckpointError, ConfigError
from sft.hf.tensor_view import View
from sft.recipe.load import parse_recipe
from sft.weights.lora.initial_adapters import as_in_folder, describe
from sft.weights.lora.peft import folder as peft_folder
from sft.weights.lora.peft.parameter_names import parameter_of, target_parameters, wrapper_of
from sft.weights.lora.peft.stacked import a_of_experts, b_of_experts, rows_in_file, stacked_a, stacked_b
from sft.weights.trained import trained_weights
from tests.unit.fixtures import hf, peft, vision

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
RECIPE = """
run: {{dir: {folder}/run, device: cpu, precision: fp32}}
model: {{hf: {folder}/model}}
data: {{train: {folder}/chat.jsonl, tokenizer: byte, seq_length: 256}}
train: {{num_steps: 2, global_batch_size: 2}}
optim: {{lr: 1e-2, schedule: constant}}
lora: {{rank: 4, alpha: 12, {more}, init_from: {folder}/adapter}}
"""
INNER = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
FOLDED = INNER.replace("layers.0", "layers.*")


def written(folder: Path, family: str, parameters: list[str], **options: Any) -> Path:
    """A small model, and an adapter of PEFT with random factors."""
    hf.save(folder / "model", family)
    options = dict(target_modules=["q_proj"], target_parameters=parameters) | options
    peft.adapted(hf.load(folder / "model"), **options).save_pretrained(folder / "adapter")
    return folder / "adapter"


def config_of(folder: Path, more: str) -> Config:
    return parse_recipe(RECIPE.format(folder=folder, more=more), "tests", []).config


def described(config: Config) -> str:
    return describe(config, trained_weights(config, hf.VOCAB))[0]


def test_a_folder_of_peft(tmp_path: Path) -> None:
    adapter = written(tmp_path, "gpt_oss", BOTH)
    contents = peft_folder.read(adapter).contents
    block = "model.layers.0.mlp.experts"
    assert contents.modules[f"{block}.base_layer"] == (2 * hf.EXPERT_FFN, hf.WIDTH)
    assert contents.modules[block] == (hf.WIDTH, hf.EXPERT_FFN)
    assert contents.num_experts[block] == contents.num_experts[f"{block}.base_layer"] == hf.EXPERTS
    assert contents.config.target_parameters == ("experts.down_proj", "experts.gate_up_proj")
    config = config_of(tmp_path, "targets: [q_proj], target_parameters: [experts.gate_up_proj, experts.down_proj]")
    assert described(config).startswith(f"{adapter}: 6 adapters of rank 4; ")
    found = as_in_folder(config.model_copy(update={"lora": LoraConfig()}), str(adapter))
    assert found == config.lora.model_copy(update={"target_parameters": sorted(BOTH)})


@pytest.mark.parametrize(
    "family,router",
    [
        ("gpt_oss", "router.weight"),
        ("gemma4_text", None),  # a Linear
        ("granitemoe", "router.weight"),
        ("granitemoe_swa", "router.weight"),
        ("granitemoehybrid", "router.weight"),
        ("mistral4", "gate.weight"),
        ("qwen3_vl_moe", "gate.weight"),
    ],
)
def test_names_and_shapes_are_those_of_peft(tmp_path: Path, family: str, router: str | None) -> None:
    models: Any = vision if family in vision.VISION else hf
    fields: dict[str, Any] = hf.GEMMA4_MIXTURE if family == "gemma4_text" else {}
    models.save(tmp_path / "model", family, **fields)
    named = [*BOTH, *([router] if router else [])]
    model = peft.adapted(models.load(tmp_path / "model"), target_modules=["o_proj"], target_parameters=named)
    model.save_pretrained(tmp_path / "adapter")
    more = f"targets: [o_proj], target_parameters: [{', '.join(named)}]"
    config = config_of(tmp_path, more)
    count = sum(name.endswith("lora_A.weight") for name in hf.tensors(tmp_path / "adapter"))
    assert described(config).startswith(f"{tmp_path}/adapter: {count} adapters of rank 4; ")
    found = as_in_folder(config.model_copy(update={"lora": LoraConfig()}), str(tmp_path / "adapter"))
    assert (found.targets, found.target_parameters) == (["o_proj"], sorted(named))


def test_a_recipe_with_other_parameters(tmp_path: Path) -> None:
    adapter = written(tmp_path, "granitemoe", ["layers.1.block_sparse_moe.experts.down_proj"])
    with pytest.raises(ConfigError) as error:
        described(config_of(tmp_path, "targets: [q_proj], target_parameters: [down_proj]"))
    assert str(error.value).startswith(f"{adapter} has other adapters than the recipe: the folder has none of ")
    ends = "lora.targets=[q_proj] lora.exclude=[] lora.target_parameters=[1.block_sparse_moe.experts.down_proj]."
    assert str(error.value).endswith(f"To continue those of the folder: {ends}"), error.value


@pytest.mark.parametrize(
    "tensors,options,reason",
    [
        ({INNER: torch.ones(15, hf.WIDTH)}, {}, f"{FOLDED} (layer 0) is 15 x 32, which does not fit r = 4"),
        ({}, {"lora_dropout": 0.1, "use_dora": True}, "use_dora = true is not supported"),
        ({}, {"target_parameters": ["experts.gate_up_proj"]}, "has adapters of model.layers.*.mlp.experts.base_layer "),
        ({}, {"target_parameters": None}, f"{FOLDED} (layers 0-1) is 16 x 32, which does not fit r = 4"),
        ({}, {"rank_pattern": {"gate_up_proj": 8}}, "rank_pattern = {"),
    ],
    ids=str,
)
def test_folders_that_cannot_be_continued(
    tmp_path: Path, tensors: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    peft.rewrite(written(tmp_path, "gpt_oss", BOTH), tensors, **options)
    with pytest.raises(CheckpointError) as error:
        described(
            config_of(tmp_path, "targets: [q_proj], target_parameters: [experts.gate_up_proj, experts.down_proj]")
        )
    assert reason in str(error.value)


def test_experts_that_files_hold_one_by_one(tmp_path: Path) -> None:
    """transformers stacks them, so PEFT can train them with target_parameters, but with one A for gate and up."""
    adapter = written(tmp_path, "qwen3_moe", BOTH)
    with pytest.raises(CheckpointError) as error:
        described(config_of(tmp_path, "targets: [q_proj]"))
    assert str(error.value) == (
        f"{adapter} has adapters of parameters (target_parameters = experts.down_proj), but the files of this model "
        "hold one tensor for each expert, and here each of them has its own factors, while target_parameters gives "
        "gate and up one factor A.  Use an adapter of single experts."
    )


def test_the_order_of_rows_and_columns() -> None:
    """Three experts, rank 2: PEFT's rows of lora_A go expert by expert, its columns of lora_B rank by rank."""
    a = torch.tensor([[0.0], [0.1], [1.0], [1.1], [2.0], [2.1]])
    assert a_of_experts(a, 3).squeeze(-1).tolist() == a.view(3, 2).tolist()
    b = torch.tensor([[0, 1, 2, 10, 11, 12]])  # ten times the row of A, plus the expert
    assert b_of_experts(b, 3).squeeze(1).tolist() == [[0, 10], [1, 11], [2, 12]]
    assert torch.equal(stacked_a(a_of_experts(a, 3)), a) and torch.equal(stacked_b(b_of_experts(b, 3)), b)


def test_rows_of_gate_and_up_that_alternate() -> None:
    sizes = {"X": 2, "h": 3, "e": 2}
    views = [View("w", "X h e+e", part, transposed=True, blocks="e").of(0, 0, sizes) for part in (0, 1)]
    assert rows_in_file(views).tolist() == [0, 2, 1, 3]
    views = [View("w", "X e+e h", part).of(0, 0, sizes) for part in (0, 1)]
    assert rows_in_file(views).tolist() == [0, 1, 2, 3]


def test_names_in_transformers() -> None:
    block = "model.layers.0.block_sparse_moe"
    assert parameter_of(f"{block}.output_linear.weight") == f"{block}.experts.down_proj"
    stored = "language_model.model.layers.0.mlp.experts.gate_up_proj"
    gate_up = parameter_of(stored, has_vision=True)
    assert gate_up == "model.language_model.layers.0.mlp.experts.gate_up_proj"
    down = gate_up.replace("gate_up", "down")
    assert wrapper_of(gate_up, [gate_up, down]) == "model.language_model.layers.0.mlp.experts.base_layer"
    assert wrapper_of(down, [gate_up, down]) == wrapper_of(gate_up, [gate_up]) == gate_up.rpartition(".")[0]
    assert target_parameters(["a.0.experts.w", "a.1.experts.w"], ["a.0.experts.v"]) == ["experts.w"]
    assert target_parameters(["a.1.experts.w"], ["a.0.experts.w"]) == ["1.experts.w"]
