"""Whole runs with LoRA: from a Hugging Face folder, resumed on another layout, refused beside other weights."""

from pathlib import Path

import pytest

from tests.builders import chats
from tests.launching import records, start
from tests.unit.fixtures import hf

SIZES = dict(num_attention_heads=4, num_key_value_heads=4, head_dim=8)
LOSS_TOLERANCE = 1e-5  # relative; fp32, another layout
RUN = ["data.tokenizer=byte", "lora.rank=4", "train.global_batch_size=2", "checkpoint.save_every=2", "optim.lr=1e-2"]
RUN += ["optim.schedule=constant"]


def recipe(folder: Path, *more: str) -> list[str]:
    return [f"model.hf={folder}/model", "model.init_from=null", *RUN, *more]


def stored_names(checkpoint: Path) -> set[str]:
    from torch.distributed.checkpoint import FileSystemReader

    return set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)


def test_a_run_resumes_on_another_layout_and_beside_its_own_base_only(tmp_path: Path) -> None:
    chats(tmp_path, 40)
    hf.save(tmp_path / "model", "llama", **SIZES)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, steps in ((whole, 4), (cut, 2)):
        (code, out, told), _ = start(tmp_path, recipe(tmp_path, f"run.dir={folder}/run", f"train.num_steps={steps}"))
        assert code == 0, told
        assert "frozen: the weights of " in out and "started from new adapters (rank 4, seed 1234)" in out
    layout = ["parallel.cp=1", "parallel.tp=2", "parallel.distributed_optimizer=true"]
    (code, out, told), _ = start(tmp_path, recipe(tmp_path, f"run.dir={cut}/run", "train.num_steps=4", *layout))
    assert code == 0, told
    expected, found = records(whole, "train"), records(cut, "train")
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    for record, other in zip(found, expected, strict=True):
        assert record["lm loss"] == pytest.approx(other["lm loss"], rel=LOSS_TOLERANCE)
    checkpoint = cut / "run/checkpoints/iter_0000004"
    names = {name for name in stored_names(checkpoint) if not name.startswith(("optimizer.", "rng_state", "common"))}
    assert len(names) == 2 * 2 * 7 and all(name.startswith("adapter.model.layers.") for name in names)

    weights = hf.tensors(tmp_path / "model")
    hf.rewrite(tmp_path / "model", **{"model.norm.weight": weights["model.norm.weight"] + 1})
    (code, _, told), _ = start(tmp_path, recipe(tmp_path, f"run.dir={cut}/run", "train.num_steps=6"))
    assert code == 2 and "trains adapters of the weights" in told, told
