"""Models compute what transformers does with the same files, on every layout; what is trained goes back to it.

The models are transformers' own, saved by it; the losses and gradients to compare with come from it too.
"""

import contextlib
import copy
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.batch import Sample
from sft.console import QUIET, Console
from sft.data.cache.prepare import prepare_recipe
from sft.data.chat.tokenizer import load_tokenizer
from sft.recipe.load import load_recipe
from sft.weights.export.export_hf import export_hf
from sft.weights.import_hf import import_hf
from tests.builders import chats
from tests.ranks import megatron_lm, scenarios
from tests.ranks.hf_comparison import Models, compare_token_losses, saved_once, skewed_packs
from tests.ranks.hf_models import (
    GRADIENT_TOLERANCE,
    MEAN_LOSS_TOLERANCE,
    VISIBLE,
    Architecture,
    backward,
    check_parameters,
    global_name,
    hf_losses,
    in_hf_names,
    load,
    packed_gradients,
)
from tests.ranks.interop import theirs_loaded
from tests.ranks.pool import Ranks
from tests.unit.fixtures import hf

ORIGINAL = 64  # context before scaling; samples of 200 tokens go far beyond
CP, EP, TP = ["parallel.cp=2"], ["parallel.ep=2"], ["parallel.tp=2"]
SP = ["parallel.sequence_parallel=true"]
DENSE = [(1, []), (2, CP), (2, TP), (2, ["parallel.pp=2"])]
SPARSE = [(1, []), (2, EP), (2, [*CP, *EP]), (2, [*TP, *SP, *EP]), (2, ["parallel.pp=2"])]


def rope(kind: str, theta: float, **more: float) -> dict[str, Any]:
    original = {} if kind == "linear" else {"original_max_position_embeddings": ORIGINAL}
    return {"rope_type": kind, "rope_theta": theta, **original, **more}


MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(family="llama", rms_norm_eps=1e-5),
    "llama all heads": dict(family="llama", num_key_value_heads=8, tied=True),
    "mistral": dict(family="mistral"),
    "qwen2": dict(family="qwen2"),
    "qwen3 tied": dict(family="qwen3", tied=True),
    "qwen3 moe": dict(family="qwen3_moe", norm_topk_prob=True),  # as Qwen released them
    "qwen3 moe, weights of the softmax": dict(family="qwen3_moe", tied=True),
    "mixtral": dict(family="mixtral"),
    "seed oss": dict(family="seed_oss"),
    "phi 4": dict(family="phi3", rms_norm_eps=1e-5),
    "linear positions": dict(family="llama", rope_parameters=rope("linear", 1e4, factor=4.0)),
    "llama3 positions": dict(
        family="llama", rope_parameters=rope("llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    ),
    "yarn": dict(family="qwen2", rope_parameters=rope("yarn", 1e6, factor=4.0)),
    "yarn with everything set": dict(
        family="llama",
        rope_parameters=rope("yarn", 1e4, factor=4.0, beta_fast=8.0, beta_slow=0.5, attention_factor=1.3),
    ),
}


def is_sparse(name: str) -> bool:
    return MODELS[name]["family"] in ("qwen3_moe", "mixtral")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return saved_once(tmp_path_factory, MODELS)


def layouts_of(names: list[str], layouts: list[tuple[int, list[str]]]) -> list[Any]:
    """Each model on one rank and on one of the other layouts, in turn; all others are a grid."""
    return [
        pytest.param(name, *layout, marks=[] if place in (0, 1 + turn % (len(layouts) - 1)) else pytest.mark.grid)
        for turn, name in enumerate(names)
        for place, layout in enumerate(layouts)
    ]


CASES = layouts_of([name for name in MODELS if not is_sparse(name)], DENSE)
CASES += layouts_of([name for name in MODELS if is_sparse(name)], SPARSE)


@pytest.mark.parametrize(
    "name,world_size,overrides", CASES, ids=lambda v: " ".join(v) if isinstance(v, list) else str(v)
)
def test_every_token_has_the_loss_that_transformers_gives_it(
    ranks: Ranks, models: Models, name: str, world_size: int, overrides: list[str]
) -> None:
    compare_token_losses(ranks, models(name), (world_size, overrides), skewed_packs())


ONE_STEP = [(name, 1, []) for name in ("llama", "mistral", "qwen2", "qwen3 tied", "qwen3 moe", "mixtral")] + [
    (name, 2, [*EP, *cp]) for name in ("qwen3 moe", "mixtral") for cp in ([], CP)
]


@pytest.mark.parametrize(
    "name,world_size,overrides", ONE_STEP, ids=lambda v: " ".join(v) if isinstance(v, list) else str(v)
)
def test_loss_and_every_gradient_are_those_of_transformers(
    ranks: Ranks, models: Models, name: str, world_size: int, overrides: list[str]
) -> None:
    model, together = models(name), skewed_packs()[:2]
    expected_loss, count = backward(model.model, [sample for pack in together for sample in pack])
    expected = {n: param.grad.clone() for n, param in model.model.named_parameters()}
    results = ranks(world_size).run(packed_gradients, model.recipe + overrides, model.folder, together)
    for result in results:
        assert result["num_tokens"] == count == 50 + 9 + 16 + 1 + 22  # the last quarters of 200, 37, 64, 5 and 90
        assert result["loss"] == pytest.approx(expected_loss, rel=MEAN_LOSS_TOLERANCE)
    everywhere = {key: gradient for result in results for key, gradient in result["gradients"].items()}
    check_parameters(in_hf_names(in_transformers(name), everywhere), expected, GRADIENT_TOLERANCE)


def in_transformers(name: str) -> Architecture:
    return Architecture(hf.FAMILIES[MODELS[name]["family"]], tied=MODELS[name].get("tied", False))


# Four steps: warm-up of two, then constant; weight decay, clipping.
STEPS, WARM_UP, LR, DECAY, CLIP, BETAS = 4, 2, 3e-3, 0.1, 0.5, (0.9, 0.95)
OPTIM = [
    f"train.num_steps={STEPS}",
    "optim.schedule=constant",
    f"optim.warmup_steps={WARM_UP}",
    f"optim.lr={LR}",
    f"optim.weight_decay={DECAY}",
    f"optim.clip_grad={CLIP}",
]
STEPS_TOLERANCE = 1e-5  # of losses, norms and parameters; measured at most 2.4e-6


def trained(overrides: list[str], folder: str) -> dict[str, Any]:
    """Steps of ours: losses, norms before clipping, and the parameters of this rank."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        loader = scenarios.loader_of(engine, scenarios.SkewedCorpus(scenarios.LENGTHS))
        batches = [loader.microbatches(step) for step in range(STEPS)]
        results = [engine.train_step(batch) for batch in batches]
        (chunk,) = engine.chunks
        return {
            "loss": [r.objective / r.num_tokens for r in results],
            "grad_norm": [r.grad_norm for r in results],
            "samples": [[i for mb in batch for i in mb.sample_ids] for batch in batches],
            "parameters": {
                global_name(engine, n): p.detach().numpy().copy() for n, p in chunk.module.named_parameters()
            },
        }


def torch_loop(model: Any, batches: list[list[Sample]]) -> tuple[list[float], list[float]]:
    """The same in plain torch, a sample at a time: losses and norms; `model` is trained."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=1e-8)
    losses, norms = [], []
    for step, samples in enumerate(batches, 1):
        loss, _ = backward(model, samples)
        losses.append(loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / WARM_UP)
        optimizer.step()
    return losses, norms


@pytest.mark.parametrize(
    "name,world_size,overrides",
    [
        ("llama", 2, [*CP, "parallel.distributed_optimizer=true"]),
        ("qwen3 moe", 2, [*EP, "parallel.distributed_optimizer=true"]),
        ("mixtral", 2, [*EP, *CP, "train.recompute=full"]),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else str(v),
)
def test_four_steps_are_those_of_a_plain_loop(
    ranks: Ranks, models: Models, name: str, world_size: int, overrides: list[str]
) -> None:
    model = models(name)
    results = ranks(world_size).run(trained, [*model.recipe, *OPTIM, *overrides], model.folder)
    corpus = scenarios.SkewedCorpus(scenarios.LENGTHS)
    ids = [sorted({i for r in results for i in r["samples"][step]}) for step in range(STEPS)]
    theirs = copy.deepcopy(model.model)
    losses, norms = torch_loop(theirs, [[corpus.sample(i) for i in batch] for batch in ids])
    for result in results:
        np.testing.assert_allclose(result["loss"], losses, rtol=STEPS_TOLERANCE)
        np.testing.assert_allclose(result["grad_norm"], norms, rtol=STEPS_TOLERANCE)
    everywhere = {key: param for result in results for key, param in result["parameters"].items()}
    found, start = in_hf_names(in_transformers(name), everywhere), dict(model.model.named_parameters())
    expected = {n: param.detach() for n, param in theirs.named_parameters()}
    check_parameters(found, expected, STEPS_TOLERANCE)
    moved = [float((param - start[n]).norm() / start[n].norm()) for n, param in expected.items()]
    assert min(moved) > 100 * STEPS_TOLERANCE


@pytest.mark.skipif(not megatron_lm.HAS_TRAINING, reason="megatron.training comes with core 0.19")
@pytest.mark.parametrize("world_size,flags", [(1, ""), (2, "--tensor-model-parallel-size 2")])
def test_megatron_lm_loads_what_was_imported(ranks: Ranks, tmp_path: Path, world_size: int, flags: str) -> None:
    """Its own load_checkpoint, with its own checks of the arguments that are stored."""
    sizes = dict(num_hidden_layers=4, head_dim=4)  # those of megatron_lm.COMMAND
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
    """One process of the command line."""
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
    """As a user does it: import, a recipe that names the model, train at another base, export, load elsewhere."""
    chats(tmp_path, 40)
    chats(tmp_path, 7, "held_out.jsonl")
    (tmp_path / "recipe.yaml").write_text(RUN)
    import_hf(hf.save(tmp_path / "model", "mixtral", vocab_size=512, tied=True), tmp_path / "imported", QUIET)
    recipe = ["recipe.yaml", "model.rope.base=20000"]
    sft(tmp_path, "data", "prepare", *recipe)
    sft(tmp_path, "train", *recipe)
    for name in ("model", "imported/hf"):
        shutil.rmtree(tmp_path / name)  # the copy in run/hf is left
    told = io.StringIO()
    with contextlib.chdir(tmp_path):  # the run names it by a relative path
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
