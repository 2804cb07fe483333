"""Whole runs with LoRA: from a Hugging Face folder, resumed on another layout, and refused with other base weights."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from sft.console import QUIET
from sft.weights.export.export_hf import export_hf
from sft.weights.export.stored_adapters import StoredAdapters
from sft.weights.lora.peft.folder import WEIGHTS
from sft.weights.torch_dist import TorchDistReader
from tests.builders import chats
from tests.launching import records, start
from tests.unit.fixtures import hf, mxfp4

SIZES = dict(num_attention_heads=4, num_key_value_heads=4, head_dim=8)
VISIBLE = 1e-3  # least change of logits by adapters, so that an equality is meaningful
LOSS_TOLERANCE = 1e-5  # relative; fp32, another layout
RUN = ["data.tokenizer=byte", "lora.rank=4", "train.global_batch_size=2", "checkpoint.save_every=2", "optim.lr=1e-2"]
RUN += ["lora.targets=[all-linear, experts.*]", "optim.schedule=constant", "checkpoint.export_hf=last"]
RUN += ["lora.lr_ratio=4"]


def recipe(folder: Path, *more: str) -> list[str]:
    return [f"model.hf={folder}/model", "model.init_from=null", *RUN, *more]


def stored_names(checkpoint: Path) -> set[str]:
    from torch.distributed.checkpoint import FileSystemReader

    return set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)


def test_a_run_resumes_on_another_layout_and_beside_its_own_base_only(tmp_path: Path) -> None:
    chats(tmp_path, 40)
    hf.save(tmp_path / "model", "qwen3_moe", **SIZES)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, steps in ((whole, 4), (cut, 2)):
        (code, out, told), _ = start(tmp_path, recipe(tmp_path, f"run.dir={folder}/run", f"train.num_steps={steps}"))
        assert code == 0, told
        assert "frozen: the weights of " in out and "parameters trained 7,424 in 32 adapters of rank 4 (" in out
        assert "started from new adapters (rank 4, seed 1234)" in out
    layout = ["parallel.cp=1", "parallel.tp=2", "parallel.ep=2", "parallel.sequence_parallel=true"]
    layout += ["parallel.distributed_optimizer=true"]
    (code, out, told), _ = start(tmp_path, recipe(tmp_path, f"run.dir={cut}/run", "train.num_steps=4", *layout))
    assert code == 0, told
    expected, found = records(whole, "train"), records(cut, "train")
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    for record, other in zip(found, expected, strict=True):
        assert record["lm loss"] == pytest.approx(other["lm loss"], rel=LOSS_TOLERANCE)
    checkpoint = cut / "run/checkpoints/iter_0000004"
    names = {name for name in stored_names(checkpoint) if not name.startswith(("optimizer.", "rng_state", "common"))}
    assert all(name.startswith("adapter.model.layers.") for name in names)
    assert len(names) == 2 * 2 * (4 + 3), "all experts of a layer have one A and one B of gate, up and down"

    check_export(tmp_path, cut / "run", found[-1])

    weights = hf.tensors(tmp_path / "model")
    hf.rewrite(tmp_path / "model", **{"model.norm.weight": weights["model.norm.weight"] + 1})
    (code, _, told), _ = start(tmp_path, recipe(tmp_path, f"run.dir={cut}/run", "train.num_steps=6"))
    assert code == 2 and "trains adapters of the weights" in told, told


def test_a_run_beside_a_base_in_low_bits_saves_and_resumes(tmp_path: Path) -> None:
    chats(tmp_path, 40)
    mxfp4.quantise(
        hf.save(tmp_path / "model", "gpt_oss", dtype=torch.bfloat16, num_attention_heads=4, intermediate_size=64)
    )
    low = ["model.base_dtype=as_stored", "lora.target_parameters=[experts.down_proj]", "lora.targets=[q_proj]"]
    low += ["parallel.cp=1", "checkpoint.export_hf=none"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, steps in ((whole, 4), (cut, 2), (cut, 4)):
        arguments = recipe(tmp_path, f"run.dir={folder}/run", f"train.num_steps={steps}", *low)
        (code, _, told), *_ = start(tmp_path, arguments)
        assert code == 0, told
    expected, found = records(whole, "train"), records(cut, "train")
    losses = [[record["lm loss"] for record in run] for run in (expected, found)]
    assert len(set(losses[0])) == 4 and losses[0] == losses[1]


def check_export(folder: Path, run: Path, record: dict[str, Any]) -> None:
    """The last export is a PEFT folder with the weights of the checkpoint; peft computes our losses with it."""
    export = run / "hf_exports/last_0000004"
    assert {path.name for path in export.iterdir()} == {
        "README.md", "adapter_config.json", "adapter_model.safetensors", "generation_config.json", "manifest.json",
    }  # fmt: skip
    base = hf.load(folder / "model").eval()
    before = base(torch.arange(20)[None]).logits.detach()
    model = peft.PeftModel.from_pretrained(base, export).eval()
    assert not torch.allclose(model(torch.arange(20)[None]).logits, before, atol=VISIBLE)
    export_hf(run / "checkpoints/iter_0000004", folder / "again", QUIET)
    assert hf.same(load_file(export / WEIGHTS), load_file(folder / "again" / WEIGHTS))
    stored = StoredAdapters(TorchDistReader(run / "checkpoints/iter_0000004"))
    for name, tensor in load_file(export / WEIGHTS).items():
        module, dot, factor = name.removeprefix("base_model.model.").partition(".lora_")
        assert torch.equal(stored.read(module, f"{dot}{factor}"), tensor)
