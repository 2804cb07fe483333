"""Imported weights are those that Megatron-LM loads, and the trained weights of a run return to transformers."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sft.console import QUIET, Console
from sft.data.cache.prepare import prepare_recipe
from sft.data.chat.tokenizer import load_tokenizer
from sft.recipe.load import load_recipe
from sft.weights.export.export_hf import export_hf
from sft.weights.import_hf import import_hf
from tests.builders import chats
from tests.ranks import megatron_lm
from tests.ranks.hf_models import VISIBLE, hf_losses
from tests.ranks.interop import theirs_loaded
from tests.ranks.pool import Ranks
from tests.unit.fixtures import hf


@pytest.mark.skipif(not megatron_lm.HAS_TRAINING, reason="megatron.training comes with core 0.19")
@pytest.mark.parametrize("world_size,flags", [(1, ""), (2, "--tensor-model-parallel-size 2")])
def test_megatron_lm_loads_what_was_imported(ranks: Ranks, tmp_path: Path, world_size: int, flags: str) -> None:
    """Uses Megatron-LM's own load_checkpoint, which checks the stored arguments."""
    sizes = dict(num_hidden_layers=4, head_dim=4)  # sizes of megatron_lm.COMMAND
    source = hf.save(tmp_path / "source", "qwen3", **sizes)
    import_hf(source, tmp_path / "imported", QUIET)
    model = hf.load(source).state_dict()
    for rank, found in enumerate(ranks(world_size).run(theirs_loaded, flags, str(tmp_path / "imported"))):
        down, gate = (model[f"model.layers.3.mlp.{name}_proj.weight"].numpy() for name in ("down", "gate"))
        np.testing.assert_array_equal(
            found["decoder.layers.3.mlp.linear_fc2.weight"], np.split(down, world_size, axis=1)[rank]
        )
        half = len(gate) // world_size
        np.testing.assert_array_equal(
            found["decoder.layers.3.mlp.linear_fc1.weight"][:half], np.split(gate, world_size)[rank]
        )
        embedding = model["model.embed_tokens.weight"].numpy()
        rows = found["embedding.word_embeddings.weight"]
        there = embedding[rank * len(rows) : (rank + 1) * len(rows)]
        np.testing.assert_array_equal(rows[: len(there)], there)


RUN = """
run: {dir: run, device: cpu, precision: fp32}
model: {hf: model, init_from: imported}
data: {train: chat.jsonl, eval: held_out.jsonl, tokenizer: byte, seq_length: 512, doc_multiple: 32}
parallel: {sequence_parallel: false}
train: {num_steps: 3, global_batch_size: 2}
optim: {lr: 1e-3}
"""


def sft(folder: Path, *words: str) -> str:
    """Runs one command of sft in one process."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "sft", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_without_sizes_and_its_held_out_loss_in_transformers(tmp_path: Path) -> None:
    """The steps of a user: import, a recipe that names the model, training with another rotary base, export, load in
    transformers."""
    chats(tmp_path, 40)
    chats(tmp_path, 7, "held_out.jsonl")
    (tmp_path / "recipe.yaml").write_text(RUN)
    import_hf(hf.save(tmp_path / "model", "mixtral", vocab_size=512, tied=True), tmp_path / "imported", QUIET)
    recipe = ["recipe.yaml", "model.rope.base=20000"]
    sft(tmp_path, "data", "prepare", *recipe)
    sft(tmp_path, "train", *recipe)
    for name in ("model", "imported/hf"):
        shutil.rmtree(tmp_path / name)  # only the copy in run/hf is left
    told = io.StringIO()
    with contextlib.chdir(tmp_path):  # the run names the model by a relative path
        export_hf(Path("run"), Path("exported"), Console(0, told))
        config = load_recipe("recipe.yaml", ["model.hf=run", "model.rope.base=20000"]).config
        held_out = prepare_recipe(config, load_tokenizer(config.data), QUIET)["eval"]
    assert "config.json   run/hf/config.json, changed: rope_parameters" in told.getvalue()
    model, total, count = hf.load(tmp_path / "exported"), 0.0, 0
    for i in range(7):
        sample = held_out.sample(i)
        with torch.no_grad():
            losses = hf_losses(model, sample)[torch.from_numpy(sample.weights[1:] > 0)]
        total, count = total + float(losses.sum()), count + len(losses)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (logged,) = [r["lm loss"] for r in records if r["kind"] == "eval" and r["step"] == 3]
    assert logged == pytest.approx(total / count, rel=1e-5)
    card = (tmp_path / "exported" / "README.md").read_text().splitlines()
    assert card[:6] == [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "---",
        "",
        "# run, step 3",
    ]
    assert any(line.startswith(f"| eval | 3 | {logged:.4f} |") for line in card)
    assert f"Base model: {tmp_path}/model." in card and {"train.num_steps: 3", "model.hf: model"} <= {*card}
    (first,) = [r["lm loss"] for r in records if r["kind"] == "eval" and r["step"] == 0]
    assert abs(first - logged) > VISIBLE
