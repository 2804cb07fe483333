"""The messages of `sft check` about a PEFT folder from which a run would start."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.cli import main
from sft.config.lora import LoraConfig
from sft.errors import CheckpointError
from sft.recipe.load import load_recipe, parse_recipe
from sft.weights.lora.initial_adapters import as_in_folder, describe
from sft.weights.trained import trained_weights
from tests.builders import chats
from tests.unit.fixtures import hf, peft, vision
from tests.unit.fixtures.peft import ALPHA, RANK

RECIPE = """
run: {{dir: {folder}/run, device: cpu, precision: fp32}}
model: {{hf: {folder}/model}}
data: {{train: {folder}/chat.jsonl, tokenizer: byte, seq_length: 256}}
train: {{num_steps: 2, global_batch_size: 2}}
optim: {{lr: 1e-2, schedule: constant}}
lora: {{rank: 4, alpha: 12, targets: [q_proj, v_proj], init_from: {folder}/adapter}}
"""
FACTOR = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
OTHER = "base_model.model.model.layers.1.self_attn.q.lora_B.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that continues to train an adapter of PEFT."""
    folder = tmp_path_factory.mktemp("written")
    hf.save(folder / "model", "llama")
    peft.adapted(hf.load(folder / "model"), target_modules=["q_proj", "v_proj"]).save_pretrained(folder / "adapter")
    chats(folder, 8)
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    return folder


@pytest.fixture
def adapter(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "adapter", tmp_path / "adapter"))


def check(written: Path, adapter: Path, *words: str) -> int:
    return main(["check", str(written / "recipe.yaml"), f"lora.init_from={adapter}", *words])


def test_a_folder_that_fits(written: Path, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peft.rewrite(adapter, lora_dropout=0.1, base_model_name_or_path="org/other")
    assert check(written, adapter, "run.precision=bf16") == 0
    said = capsys.readouterr().out
    assert f"{adapter}: 4 adapters of rank 4; " in said
    assert f"WARNING: {adapter} was trained beside org/other, but model.hf = {written}/model." in said
    assert f"WARNING: lora_dropout = 0.1 of {adapter} is not used." in said
    assert f"F32 of {adapter} is rounded to BF16" in said
    peft.rewrite(adapter, lora_dropout=0.0, base_model_name_or_path=f"{written}/model/")
    assert check(written, adapter) == 0
    said = capsys.readouterr().out
    assert f"WARNING: {adapter}" not in said and "lora_dropout" not in said and "is rounded" not in said


@pytest.mark.parametrize(
    "words,begins,ends",
    [
        (
            ["lora.rank=8", "lora.alpha=32", "lora.rslora=true"],
            "ConfigError: {adapter} has adapters that the recipe would compute differently: lora.rank = 8, but r = 4; "
            "lora.alpha = 32.0, but lora_alpha = 12.0; lora.rslora = true, but use_rslora = false.",
            "To continue them: lora.rank=4 lora.alpha=12.0 lora.rslora=false.",
        ),
        (
            ["lora.targets=[all-linear]"],
            "ConfigError: {adapter} has other adapters than the recipe: the folder has none of "
            "model.layers.*.mlp.down_proj (layers 0-1), model.layers.*.mlp.gate_proj (layers 0-1), ",
            "To continue those of the folder: lora.targets=[q_proj, v_proj] lora.exclude=[].",
        ),
        (
            ["lora.targets=[q_proj, v_proj]", "lora.exclude=[layers.0.*]"],
            "ConfigError: {adapter} has other adapters than the recipe: the recipe has none of "
            "model.layers.*.self_attn.q_proj (layer 0), model.layers.*.self_attn.v_proj (layer 0).",
            "To continue those of the folder: lora.targets=[q_proj, v_proj] lora.exclude=[].",
        ),
        (
            ["lora.init_from=nowhere"],
            "ConfigError: lora.init_from = nowhere is no folder in ",
            "`hf download NAME --local-dir DIR` fetches one of the hub.",
        ),
        (
            ["lora.init_from={written}/model"],
            "CheckpointError: {written}/model is no PEFT folder, because it has no adapter_config.json.",
            "",
        ),
    ],
    ids=str,
)
def test_a_recipe_that_does_not_fit_the_folder(
    written: Path, adapter: Path, capsys: pytest.CaptureFixture[str], words: list[str], begins: str, ends: str
) -> None:
    names = dict(written=written, adapter=adapter)
    assert check(written, adapter, *(word.format(**names) for word in words)) == 2
    said = capsys.readouterr().err
    assert begins.format(**names) in said and said.rstrip().endswith(ends), said


@pytest.mark.parametrize(
    "tensors,options,reason",
    [
        ({}, dict(use_dora=True), "is an adapter that cannot be continued: use_dora = true is not supported: DoRA"),
        ({FACTOR: torch.ones(4, 48)}, {}, "q_proj.lora_A.weight is 4 x 48, expected 4 x 32 (layer 1)\n  Use an a"),
        (
            {OTHER.replace("lora_B", "lora_A"): torch.ones(4, 32), OTHER: torch.ones(64, 4)},
            {},
            "has adapters of model.layers.*.self_attn.q (layer 1), but this trainer adapts no Linears of these names",
        ),
        (
            {"base_model.model.lm_head.weight": torch.ones(301, 32)},
            dict(modules_to_save=["lm_head"]),
            "holds other whole weights (modules_to_save) than the recipe trains.  To continue it: "
            "lora.train_embeddings=false lora.train_head=true.",
        ),
        (
            {"base_model.model.model.norm.weight": torch.ones(32)},
            dict(modules_to_save=["norm"]),
            "holds the whole weight of model.norm (modules_to_save), but beside adapters this trainer trains only",
        ),
    ],
    ids=str,
)
def test_a_folder_that_cannot_be_continued(
    written: Path,
    adapter: Path,
    capsys: pytest.CaptureFixture[str],
    tensors: dict[str, Any],
    options: dict[str, Any],
    reason: str,
) -> None:
    assert check(written, peft.rewrite(adapter, tensors, **options)) == 2
    said = capsys.readouterr().err
    assert f"CheckpointError: {adapter}" in said or f"ConfigError: {adapter}" in said
    assert reason in said, said


def test_a_recipe_without_lora_takes_the_keys_of_the_folder(written: Path) -> None:
    config = load_recipe(str(written / "recipe.yaml"), []).config
    without = config.model_copy(update={"lora": LoraConfig()})
    source = str(written / "adapter")
    assert as_in_folder(without, source) == config.lora
    other = config.model_copy(update={"lora": LoraConfig(rank=2)})
    assert as_in_folder(other, source) == LoraConfig(rank=2, init_from=source)


@pytest.mark.parametrize("prefix", ["model.language_model", "language_model.model"])
def test_names_beside_a_vision_tower(tmp_path: Path, prefix: str) -> None:
    """Names as in the files, and as in the memory of transformers before and since version 4.52."""
    vision.save(tmp_path / "model", "mistral3")
    model = peft.adapted(vision.load(tmp_path / "model"), target_modules=r".*language_model.*\.(q|down)_proj")
    model.save_pretrained(tmp_path / "adapter")
    stored = hf.tensors(tmp_path / "adapter")
    head = "base_model.model.model.language_model"
    assert all(name.startswith(head) for name in stored)
    renamed = {name.replace(head, f"base_model.model.{prefix}"): value for name, value in stored.items()}
    peft.rewrite(tmp_path / "adapter", dict.fromkeys(stored) | renamed)
    lora = f"lora={{rank: {RANK}, alpha: {ALPHA}, targets: [q_proj, down_proj], init_from: {tmp_path}/adapter}}"
    recipe = RECIPE.format(folder=tmp_path).rpartition("lora:")[0]
    config = parse_recipe(recipe, "tests", [lora]).config
    (line,) = describe(config, trained_weights(config, hf.VOCAB))
    assert line.startswith(f"{tmp_path}/adapter: 4 adapters of rank 4; ")


def test_a_tied_model(tmp_path: Path) -> None:
    """We have a single weight.  PEFT writes it twice with ensure_weight_tying, and otherwise trains two."""
    hf.save(tmp_path / "model", "llama", tied=True)
    options = dict(target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    peft.adapted(hf.load(tmp_path / "model"), **options).save_pretrained(tmp_path / "adapter")
    config = parse_recipe(RECIPE.format(folder=tmp_path), "tests", ["lora.train_embeddings=true"]).config
    trained = trained_weights(config, hf.VOCAB)
    (line,) = describe(config, trained)
    assert line.startswith(f"{tmp_path}/adapter: 4 adapters of rank 4, model.embed_tokens; ")
    without = config.model_copy(update={"lora": LoraConfig()})
    assert as_in_folder(without, str(tmp_path / "adapter")) == config.lora
    head = hf.tensors(tmp_path / "adapter")["base_model.model.lm_head.weight"]
    peft.rewrite(tmp_path / "adapter", {"base_model.model.lm_head.weight": head + 1})
    with pytest.raises(CheckpointError, match="embed_tokens.weight and .*lm_head.weight differ, but the base model"):
        describe(config, trained)
    peft.rewrite(tmp_path / "adapter", ensure_weight_tying=False, modules_to_save=["embed_tokens", "lm_head"])
    with pytest.raises(CheckpointError, match="which PEFT trained apart from the weight to which the base model ties"):
        describe(config, trained)
