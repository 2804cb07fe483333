"""The embedding and the output weight are trained whole beside adapters, as with peft's modules_to_save, on every
layout."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from sft.console import QUIET
from sft.mcore.checkpoint_io import engine_state
from sft.mcore.engine import Engine
from sft.mcore.gradients import gradient_chunks
from sft.mcore.modules.stored import sharded_tensors
from sft.weights.export.export_adapter import export_adapter
from tests.ranks import scenarios
from tests.ranks.hf_models import ADAMW, SHORT, check_losses, load, packs_of, parts_of, recipe_of
from tests.ranks.layouts import CP, GRADIENT_TOLERANCE, PP, SHARDED, SP, STEP_TOLERANCE, TP
from tests.ranks.peft_models import ALPHA, RANK, fill, peft_gradients, peft_model, shard_parts, steps, trained_of, whole
from tests.ranks.pool import Ranks
from tests.ranks.scenarios import check_parameters
from tests.unit.fixtures import hf

STEPS = 10
FULL = "train.recompute=full"


def step(engine: Engine) -> None:
    engine.train_step(scenarios.microbatches_of(engine, packs_of(SHORT)))


def trained(engine: Engine) -> list[Any]:
    return shard_parts(sharded_tensors(engine_state.trained_state(engine)))


def train(overrides: list[str], folder: str, values: dict[str, torch.Tensor], checkpoint: Path) -> dict[str, Any]:
    """First gradients; the token losses after ten steps, which are in a checkpoint; and the weights after one more
    step."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        fill(engine, values)
        frozen = {name: p.detach().clone() for c in engine.chunks for name, p in c.named_parameters()}
        engine.measure(scenarios.microbatches_of(engine, packs_of(SHORT)), forward_only=False)
        gradients = parts_of(gradient_chunks(engine))
        for _ in range(STEPS):
            step(engine)
        if engine.groups.rank == 0:
            checkpoint.mkdir()
        control = engine.groups.control
        engine_state.write(engine_state.snapshot(engine, {"iteration": STEPS}), checkpoint, control)
        after, losses = trained(engine), scenarios.losses_of(engine, packs_of(SHORT))
        params = [(name, p) for c in engine.chunks for name, p in c.named_parameters() if not p.requires_grad]
        unchanged = all(torch.equal(p, frozen[name]) for name, p in params)
        step(engine)
        return {
            "gradients": gradients, "after": after, "losses": losses, "unchanged": unchanged, "later": trained(engine),
        }  # fmt: skip


def resume(overrides: list[str], folder: str, checkpoint: Path) -> dict[str, Any]:
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        engine_state.load(engine, checkpoint)
        loaded = trained(engine)
        step(engine)
        return {"loaded": loaded, "later": trained(engine)}


def reference(source: Path, saved: list[str], *, tied: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """A peft model with random adapters and the base weights, and the values of the adapters."""
    model, values = peft_model(source, "all-linear", modules_to_save=[*saved], ensure_weight_tying=tied)
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".modules_to_save." in name:
                module = modules[name.partition(".modules_to_save.")[0]]
                param.copy_(module.original_module.weight)
    return model, {name: value for name, value in values.items() if ".lora_" in name}


@pytest.mark.parametrize(
    "family,tied,saved,world_size,overrides,other",
    [
        ("llama", False, ["embed_tokens", "lm_head"], 2, [*SP, FULL], [*PP]),
        ("qwen3", True, ["embed_tokens"], 2, [*PP, FULL], [*CP, *SHARDED]),
        ("qwen3", False, ["lm_head"], 2, [*CP], [*SP, *SHARDED]),
        ("phi3", False, ["embed_tokens"], 4, [*PP, *SHARDED], [*TP, *CP]),
    ],
    ids=str,
)
def test_whole_weights_beside_adapters_are_those_of_peft(
    ranks: Ranks, tmp_path: Path, family: str, tied: bool, saved: list[str], world_size: int, overrides: Any, other: Any
) -> None:
    source = hf.save(tmp_path / "source", family, tied=tied)
    model, values = reference(source, saved, tied=tied)
    recipe = [*recipe_of(source), f"model.hf={source}", f"lora={{rank: {RANK}, alpha: {ALPHA}}}", *ADAMW]
    recipe += [f"lora.train_{'embeddings' if name == 'embed_tokens' else 'head'}=true" for name in saved]
    checkpoint = tmp_path / "iter_0000010"
    results = ranks(world_size).run(train, [*recipe, *overrides], str(source), values, checkpoint)
    assert all(result["unchanged"] for result in results)

    packs, before = packs_of(SHORT), trained_of(model)
    check_parameters(whole(results, "gradients"), peft_gradients(model, packs)[0], GRADIENT_TOLERANCE)
    steps(model, packs, STEPS)
    moved = {name: tensor - before[name] for name, tensor in trained_of(model).items()}
    after = whole(results, "after")
    check_parameters({name: tensor - before[name] for name, tensor in after.items()}, moved, STEP_TOLERANCE)

    export(checkpoint, tmp_path / "export", source)
    loaded = peft.PeftModel.from_pretrained(hf.load(source), tmp_path / "export").eval()
    assert bool(loaded.peft_config["default"].ensure_weight_tying) == tied
    check_losses([result["losses"] for result in results], loaded, packs)

    resumed = ranks(world_size).run(resume, [*recipe, *other], str(source), checkpoint)
    expected, found = whole(results, "later"), whole(resumed, "later")
    moved = {name: tensor - after[name] for name, tensor in expected.items()}
    check_parameters({name: found[name] - after[name] for name in found}, moved, STEP_TOLERANCE)


def export(checkpoint: Path, target: Path, source: Path) -> None:
    recipe = {"lora.rank": RANK, "lora.alpha": ALPHA, "lora.rslora": False, "model.hf": str(source)}
    common = {"iteration": STEPS}
    finish: Any = lambda folder, entries: None  # noqa: E731
    export_adapter(checkpoint, target, QUIET, common, recipe, like=source, dtype=None, finish=finish)


@pytest.mark.parametrize(
    "family,targets",
    [
        ("qwen3_5_text", "[all-linear]"),
        pytest.param("qwen3_next", "[in_proj_qkvz, in_proj_ba, out_proj]", marks=pytest.mark.grid),
    ],
    ids=str,
)
def test_adapters_of_linear_attention_resume_bitwise(ranks: Ranks, tmp_path: Path, family: str, targets: str) -> None:
    """On another layout, the weights have the same bits; on the same layout, also after another step."""
    source = hf.save(tmp_path / "source", family)
    _, values = peft_model(source, "all-linear" if family == "qwen3_5_text" else targets.strip("[]").split(", "))
    lora = f"lora={{rank: {RANK}, alpha: {ALPHA}, targets: {targets}}}"
    recipe, checkpoint = [*recipe_of(source), f"model.hf={source}", lora, *ADAMW], tmp_path / "iter_0000010"
    results = ranks(2).run(train, [*recipe, *SP], str(source), values, checkpoint)
    after = whole(results, "after")
    assert after.keys() == values.keys() and not any(torch.equal(after[name], values[name]) for name in values)
    on_another = ranks(2).run(resume, [*recipe, *CP, *SHARDED], str(source), checkpoint)
    assert hf.same(after, whole(on_another, "loaded"))
    on_the_same = ranks(2).run(resume, [*recipe, *SP], str(source), checkpoint)
    assert hf.same(whole(results, "later"), whole(on_the_same, "later"))
    assert not hf.same(after, whole(results, "later"))
