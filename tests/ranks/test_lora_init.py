"""A PEFT adapter continues to train in our engine, on every layout, as in peft; `sft eval` and `sft probe` evaluate
adapters."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
from safetensors.torch import load_file

from sft.console import QUIET
from sft.mcore.checkpoint_io import engine_state
from sft.mcore.lora import adapted, freeze
from sft.weights.lora.initial_adapters import load_new_adapters
from sft.weights.lora.peft.config import AdapterConfig
from sft.weights.lora.peft.folder import WEIGHTS, Contents, write
from tests.builders import chats
from tests.ranks import scenarios
from tests.ranks.commands import scored, sft
from tests.ranks.hf_models import ADAMW, SHORT, check_losses, load, packs_of, recipe_of
from tests.ranks.layouts import CP, EP, PP, SHARDED, SP, STEP_TOLERANCE, TP
from tests.ranks.peft_models import ALPHA, HEAD, RANK, factors, peft_model, shard_parts, steps, trained_of, whole
from tests.ranks.pool import Ranks
from tests.ranks.scenarios import check_parameters
from tests.unit.fixtures import hf

# Adam changes a number by about optim.lr = 1e-3 in each step, and bf16 rounds numbers below 1 by up to 2^-9
TWO_STEPS = 4e-3
PIPELINE = [*PP, "train.recompute=full"]
WHOLE = {"train_embeddings": "embed_tokens", "train_head": "lm_head"}
SHARED = ["q_proj", "v_proj", *(f"shared_expert.{name}_proj" for name in ("gate", "up", "down"))]


def continued(overrides: list[str], folder: str, packs: Any) -> dict[str, Any]:
    """The losses and factors of this rank with the adapters of lora.init_from, and the factors after two steps."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        source = load_new_adapters(engine, engine.config, QUIET)
        losses, before = scenarios.losses_of(engine, packs), held(engine)
        for _ in range(2):
            engine.train_step(scenarios.microbatches_of(engine, packs))
        return {"source": source, "losses": losses, "before": before, "after": held(engine)}


def held(engine: Any) -> list[Any]:
    whole = freeze.whole_leaves(engine_state.model_state(engine), engine.trained)
    return shard_parts([*adapted.linear_tensors(engine.chunks), *whole])


@pytest.mark.parametrize(
    "family,tied,targets,saved,layouts",
    [
        ("qwen3", False, "all-linear", ["lm_head"], [(1, []), (2, SP), (4, [*CP, *PIPELINE])]),
        ("llama", True, "all-linear", [], [(2, [*TP, *SHARDED]), (4, [*CP, *SP])]),
        ("phi3", False, "all-linear", ["embed_tokens", "lm_head"], [(2, SP), (2, SHARDED)]),
        ("qwen2_moe", False, SHARED, ["embed_tokens"], [(2, [*EP, *SHARDED]), (4, [*SP, *EP])]),
        ("qwen3_moe", True, ["q_proj", "o_proj"], ["embed_tokens"], [(2, PIPELINE), (2, [*EP, *CP])]),
    ],
    ids=str,
)
def test_an_adapter_of_peft_continues(
    ranks: Ranks,
    tmp_path: Path,
    family: str,
    tied: bool,
    targets: Any,
    saved: list[str],
    layouts: list[tuple[int, list[str]]],
) -> None:
    """peft trains three steps and saves; then peft and our engine both train two more steps."""
    source, packs = hf.save(tmp_path / "source", family, tied=tied), packs_of(SHORT)
    model, _ = peft_model(source, targets, modules_to_save=[*saved] or None, ensure_weight_tying=tied and bool(saved))
    steps(model, packs, 3)
    model.save_pretrained(tmp_path / "adapter")
    before, trained = trained_of(model), copy.deepcopy(model)
    count = sum(name.endswith(".lora_A.weight") for name in before)
    steps(trained, packs, 2)
    moved = {name: value - before[name] for name, value in trained_of(trained).items()}
    named = targets if isinstance(targets, str) else f"[{', '.join(targets)}]"
    keys = f"lora={{rank: {RANK}, alpha: {ALPHA}, targets: {named}, init_from: {tmp_path}/adapter}}"
    parts = [f"lora.{key}=true" for key, name in WHOLE.items() if name in saved]
    for world_size, layout in layouts:
        recipe = [*recipe_of(source), f"model.hf={source}", keys, *parts, *ADAMW, *layout]
        results = ranks(world_size).run(continued, recipe, str(source), packs)
        assert results[0]["source"].startswith(f"the adapters of {tmp_path}/adapter: {count} adapters of rank {RANK}")
        check_losses([result["losses"] for result in results], model, packs)
        start, end = (whole(results, key) for key in ("before", "after"))
        assert hf.same(start, before)
        check_parameters({name: value - start[name] for name, value in end.items()}, moved, STEP_TOLERANCE)


def test_adapters_of_experts_are_those_of_the_folder(ranks: Ranks, tmp_path: Path) -> None:
    """Loads a folder that we wrote, bit for bit; test_lora.py tests the results of such adapters.

    In bf16, the optimizer steps from fp32 copies of the factors.
    """
    source = hf.save(tmp_path / "source", "mixtral")
    modules = {name: (out, of) for name, out, of in linears(source, ["w1", "w2", "w3", "o_proj"])}
    contents = Contents(config=AdapterConfig(rank=RANK, alpha=ALPHA), modules=modules)
    values = factors(contents.shapes())
    write(tmp_path / "adapter", contents, values.items(), others=[])
    keys = f"lora={{rank: {RANK}, alpha: {ALPHA}, targets: [w1, w2, w3, o_proj], init_from: {tmp_path}/adapter}}"
    for layout in ([*EP, *PIPELINE], [*EP, *SP, "run.precision=bf16"]):
        recipe = [*recipe_of(source), f"model.hf={source}", keys, *ADAMW, *layout]
        results = ranks(4 if layout[1:] == PIPELINE else 2).run(continued, recipe, str(source), packs_of(SHORT))
        start, end = (
            {HEAD + name: value for name, value in whole(results, key).items()} for key in ("before", "after")
        )
        expected = {name: v.bfloat16().float() if "run.precision=bf16" in layout else v for name, v in values.items()}
        assert hf.same(start, expected)
        assert all(0 < (end[name] - start[name]).abs().max() < TWO_STEPS for name in start)


def linears(source: Path, leaves: list[str]) -> Iterator[tuple[str, int, int]]:
    for name, weight in hf.tensors(source).items():
        if name.split(".")[-2] in leaves:
            yield name.removesuffix(".weight"), *weight.shape


RECIPE = """
run: {{dir: {folder}/run, device: cpu, precision: fp32}}
model: {{hf: {folder}/model}}
data: {{train: {folder}/chat.jsonl, eval: {folder}/held_out.jsonl, tokenizer: byte, seq_length: 256}}
parallel: {{tp: 2}}
train: {{num_steps: 2, global_batch_size: 2}}
optim: {{lr: 1e-2, schedule: constant}}
checkpoint: {{save_every: 2}}
"""
LORA = ["lora.rank=4", "lora.targets=[q_proj, k_proj, v_proj, o_proj, down_proj]"]


def loss_of(content: dict[str, Any]) -> float:
    return float(content["sets"]["eval"]["lm loss"])


def evaluated(run: Path) -> dict[int, float]:
    """The loss of the held-out set by step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["lm loss"] for line in lines if line["kind"] == "eval"}


def test_ours_to_peft_to_ours(ranks: Ranks, tmp_path: Path) -> None:
    """Every conversion keeps the bits, in a run, an evaluation and a probe; another base model is refused."""
    chats(tmp_path, 20)
    chats(tmp_path, 7, "held_out.jsonl")
    hf.save(tmp_path / "model", "llama")
    recipe, pool = tmp_path / "recipe.yaml", ranks(2)
    recipe.write_text(RECIPE.format(folder=tmp_path))
    assert sft(pool, "data", "prepare", str(recipe), alone=True).code == 0
    first = sft(pool, "train", str(recipe), *LORA, "checkpoint.export_hf=last")
    assert first.code == 0, first.err
    exported, again = tmp_path / "run/hf_exports/last_0000002", tmp_path / "again"
    peft.PeftModel.from_pretrained(hf.load(tmp_path / "model"), exported).save_pretrained(again)
    assert hf.same(load_file(exported / WEIGHTS), load_file(again / WEIGHTS))

    memory = (tmp_path / "run/base.json").read_bytes()
    of_run = scored(pool, recipe, *LORA)
    assert of_run["step"] == 2
    for words in ([], LORA):  # a recipe without LoRA takes the settings of the folder
        of_folder = scored(pool, recipe, *words, "--from", str(again))
        assert loss_of(of_folder) == loss_of(of_run)
        assert of_folder["weights"].endswith(f"with the adapters of {again}: 10 adapters of rank 4; 15 KiB")
    of_base = scored(pool, recipe, "--from", str(tmp_path / "model"))
    assert abs(loss_of(of_base) - loss_of(of_run)) > 1e-3

    other = [*LORA, f"lora.init_from={again}", f"run.dir={tmp_path}/other", "train.eval_every=1"]
    checked = sft(pool, "check", str(recipe), *other, alone=True)
    assert f"{again}: 10 adapters of rank 4; 15 KiB" in checked.out, checked
    assert f"WARNING: {again} was trained beside " not in checked.out
    for words in (["train", str(recipe), *other], ["eval", str(recipe), *LORA]):
        source = ["--from", str(again)] if words[0] == "eval" else []
        refused = sft(pool, *words, "lora.rank=8", *source)
        assert refused.code == 2 and "compute differently: lora.rank = 8, but r = 4.  To continue" in refused.err
    started = sft(pool, "train", str(recipe), *other)
    assert started.code == 0, started.err
    assert evaluated(tmp_path / "other")[0] == loss_of(of_run)
    shutil.rmtree(again)
    resumed = sft(pool, "train", str(recipe), *other, "train.num_steps=3", "lora.init_from=elsewhere")
    assert resumed.code == 0, resumed.err
    assert evaluated(tmp_path / "other").keys() == {0, 1, 2, 3}

    weights = hf.tensors(tmp_path / "model")
    hf.rewrite(tmp_path / "model", **{"model.norm.weight": weights["model.norm.weight"] + 1})
    for words in (["eval", str(recipe), *LORA], ["probe", "leak", str(recipe), *LORA]):
        refused = sft(pool, *words)
        assert refused.code == 2 and "iter_0000002 trains adapters of the weights " in refused.err, refused.err
    assert (tmp_path / "run/base.json").read_bytes() == memory
