"""A run exports its model quantised, and `sft eval` gives the loss before and after."""

import json
from pathlib import Path

import torch

from sft.cli import main
from tests.builders import chats
from tests.launching import HF_RECIPE
from tests.ranks.commands import scored, sft
from tests.ranks.pool import Ranks
from tests.unit.fixtures import hf
from tests.unit.fixtures.hf import tensors

SIZES = dict(hidden_size=128, intermediate_size=256, head_dim=32, vocab_size=301)
RUN = ["train.num_steps=2", "train.global_batch_size=2", "checkpoint.save_every=1", "optim.schedule=constant"]


def test_the_loss_of_a_quantised_export_is_near_that_of_the_run(ranks: Ranks, tmp_path: Path) -> None:
    hf.save(tmp_path / "source", "qwen3", **SIZES)  # in fp32, as the run
    chats(tmp_path, 20)
    chats(tmp_path, 7, "held_out.jsonl")
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    held_out = f"seq_length: 256, eval: {tmp_path}/held_out.jsonl"
    recipe.write_text(HF_RECIPE.format(folder=tmp_path).replace("seq_length: 256", held_out))
    assert main(["data", "prepare", str(recipe)]) == 0
    words = [*RUN, "checkpoint.export_hf=last"]
    result = sft(ranks(2), "train", str(recipe), *words, "checkpoint.export_format=fp8_block")
    assert result.code == 0, result.err
    (exported,) = (path for path in (run / "hf_exports").iterdir() if path.is_dir())
    assert json.loads((exported / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    assert tensors(exported)["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn
    assert main(["export", str(run), str(tmp_path / "nvfp4"), "--format", "nvfp4"]) == 0
    folders = {"run": run, "fp8_block": exported, "nvfp4": tmp_path / "nvfp4"}
    loss = {
        name: scored(ranks(2), recipe, *RUN, "--from", str(folder))["sets"]["eval"]["lm loss"]
        for name, folder in folders.items()
    }
    # Weights change by 2.7% and by 9.5%.  The model is random, with large weights.
    assert 1e-6 < abs(loss["fp8_block"] - loss["run"]) < abs(loss["nvfp4"] - loss["run"]) < 0.5


def test_check_says_what_a_recipe_exports_and_refuses_what_fits_no_model(ranks: Ranks, tmp_path: Path) -> None:
    hf.save(tmp_path / "source", "qwen3", dtype=torch.bfloat16, **(SIZES | dict(head_dim=16)))
    chats(tmp_path, 20)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(HF_RECIPE.format(folder=tmp_path))
    words = [*RUN, "checkpoint.export_hf=last", "--world-size", "2"]
    found = sft(ranks(1), "check", str(recipe), *words, "checkpoint.export_format=fp8_block")
    assert found.code == 0 and "fp8_block: 8 tensors are quantised" in found.out
    assert "6 Linears keep their type, because rows and columns must be multiples of 128" in " ".join(found.out.split())
    found = sft(ranks(1), "check", str(recipe), *words, "checkpoint.export_format=as_source")
    assert found.code == 0 and "is not quantised, so exports are not" in " ".join(found.out.split())
    hf.save(tmp_path / "stacked", "gpt_oss", dtype=torch.bfloat16)
    stacked = [*words, f"model.hf={tmp_path}/stacked", "checkpoint.export_format=int4"]
    found = sft(ranks(1), "check", str(recipe), *stacked)
    assert found.code == 2 and "export_format = int4 does not fit gpt_oss" in found.err
    lora = [*words, "lora.rank=4", "checkpoint.export_format=int4"]
    found = sft(ranks(1), "check", str(recipe), *lora)
    assert found.code == 2 and "quantises whole models, and lora.export is adapter; use bf16" in found.err
