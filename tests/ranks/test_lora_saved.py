"""The embedding and the output weight trained whole beside adapters, as peft's modules_to_save, on every layout."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from sft.batch import Sample
from sft.console import QUIET
from sft.mcore.checkpoint_io import engine_state
from sft.mcore.engine import Engine
from sft.mcore.gradients import gradient_chunks
from sft.mcore.model.chunks import sharded_tensors
from sft.weights.export.export_adapter import export_adapter
from tests.ranks import scenarios
from tests.ranks.hf_models import PACKS, Reference, check_losses, check_parameters, load, losses_of, recipe_of
from tests.ranks.peft_models import ALPHA, RANK, fill, peft_gradients, peft_model, stored_name, whole
from tests.ranks.pool import Ranks
from tests.unit.fixtures import hf

GRADIENT_TOLERANCE = 1e-5  # of the norm of each gradient; fp32, two implementations
STEP_TOLERANCE = 1e-4  # of the norm of what a weight moved; Adam divides by the root of small numbers
STEPS = 10
OPTIMIZER = ["optim.schedule=constant", "optim.lr=1e-3", "optim.warmup_steps=null", "optim.clip_grad=0.5"]
OPTIMIZER += ["optim.weight_decay=0.1", f"train.num_steps={STEPS + 1}"]
CP, TP, PP = ["parallel.cp=2"], ["parallel.tp=2"], ["parallel.pp=2"]
SP, DP = [*TP, "parallel.sequence_parallel=true"], ["parallel.distributed_optimizer=true"]
FULL = "train.recompute=full"
OURS = {"model.embed_tokens.weight": "embedding.word_embeddings.weight", "lm_head.weight": "output_layer.weight"}


def packs() -> list[list[Sample]]:
    corpus = scenarios.SkewedCorpus([60, 33, 20, 41, 64], scenarios.VOCAB)
    return [[corpus.sample(i) for i in pack] for pack in PACKS]


def step(engine: Engine) -> None:
    mine = packs()[engine.groups.dp_rank :: engine.layout.dp]
    engine.train_step([scenarios.microbatch_of(engine, pack) for pack in mine])


def trained(engine: Engine) -> list[Any]:
    shards = sharded_tensors(engine_state.trained_state(engine))
    return [(s.key, s.global_shape, s.global_offset, s.data.detach().numpy().copy()) for s in shards]


def train(overrides: list[str], folder: str, values: dict[str, torch.Tensor], checkpoint: Path) -> dict[str, Any]:
    """First gradients; a checkpoint after ten steps, and its token losses; and what one more step makes of it."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        fill(engine, values)
        frozen = {name: p.detach().clone() for c in engine.chunks for name, p in c.named_parameters()}
        mine = packs()[engine.groups.dp_rank :: engine.layout.dp]
        engine.measure([scenarios.microbatch_of(engine, pack) for pack in mine], forward_only=False)
        gradients = [(c.parameter, c.shape, c.offset, c.data.numpy().copy()) for c in gradient_chunks(engine)]
        for _ in range(STEPS):
            step(engine)
        if engine.groups.rank == 0:
            checkpoint.mkdir()
        control = engine.groups.control
        engine_state.write(engine_state.snapshot(engine, {"iteration": STEPS}), checkpoint, control)
        after, losses = trained(engine), losses_of(engine, packs())
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


def collected(results: list[dict[str, Any]], key: str) -> dict[str, torch.Tensor]:
    """By the names of peft, without rows of padding."""
    tensors = whole(results, key)
    for theirs, ours in OURS.items():
        if ours in tensors:
            tensors[theirs] = tensors.pop(ours)[: hf.VOCAB]
    return tensors


def reference(source: Path, saved: list[str], *, tied: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """peft's model with random adapters and the weights of the base, and the values of the adapters."""
    model, values = peft_model(source, "all-linear", modules_to_save=[*saved], ensure_weight_tying=tied)
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".modules_to_save." in name:
                module = modules[name.partition(".modules_to_save.")[0]]
                param.copy_(module.original_module.weight)
    return model, {name: value for name, value in values.items() if ".lora_" in name}


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace(".modules_to_save.", "."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "family,tied,saved,world_size,overrides,other",
    [
        ("llama", False, ["embed_tokens", "lm_head"], 2, [*SP, FULL], [*PP]),
        ("qwen3", True, ["embed_tokens"], 2, [*PP, FULL], [*CP, *DP]),
        ("qwen3", False, ["lm_head"], 2, [*CP], [*SP, *DP]),
        ("phi3", False, ["embed_tokens"], 4, [*PP, *DP], [*TP, *CP]),
    ],
    ids=str,
)
def test_whole_weights_beside_adapters_are_those_of_peft(
    ranks: Ranks, tmp_path: Path, family: str, tied: bool, saved: list[str], world_size: int, overrides: Any, other: Any
) -> None:
    source = hf.save(tmp_path / "source", family, tied=tied)
    model, values = reference(source, saved, tied=tied)
    recipe = [*recipe_of(source), f"model.hf={source}", f"lora={{rank: {RANK}, alpha: {ALPHA}}}", *OPTIMIZER]
    recipe += [f"lora.train_{'embeddings' if name == 'embed_tokens' else 'head'}=true" for name in saved]
    checkpoint = tmp_path / "iter_0000010"
    results = ranks(world_size).run(train, [*recipe, *overrides], str(source), values, checkpoint)
    assert all(result["unchanged"] for result in results)

    first, _ = peft_gradients(model, packs())
    check_parameters(collected(results, "gradients"), plain(first), GRADIENT_TOLERANCE)
    params = {stored_name(name): param for name, param in model.named_parameters() if param.requires_grad}
    before = plain({name: param.detach().clone() for name, param in params.items()})
    adam = torch.optim.AdamW(params.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for _ in range(STEPS):
        peft_gradients(model, packs())
        torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
        adam.step()
    moved = {name: tensor.detach() - before[name] for name, tensor in plain(params).items()}
    after = collected(results, "after")
    check_parameters({name: tensor - before[name] for name, tensor in after.items()}, moved, STEP_TOLERANCE)

    export(checkpoint, tmp_path / "export", source)
    loaded = peft.PeftModel.from_pretrained(hf.load(source), tmp_path / "export").eval()
    assert bool(loaded.peft_config["default"].ensure_weight_tying) == tied
    check_losses([result["losses"] for result in results], Reference(str(source), loaded), packs())

    resumed = ranks(world_size).run(resume, [*recipe, *other], str(source), checkpoint)
    expected, found = collected(results, "later"), collected(resumed, "later")
    moved = {name: tensor - after[name] for name, tensor in expected.items()}
    check_parameters({name: found[name] - after[name] for name in found}, moved, STEP_TOLERANCE)


def export(checkpoint: Path, target: Path, source: Path) -> None:
    recipe = {"lora.rank": RANK, "lora.alpha": ALPHA, "lora.rslora": False, "model.hf": str(source)}
    common = {"iteration": STEPS}
    finish: Any = lambda folder, entries: None  # noqa: E731
    export_adapter(checkpoint, target, QUIET, common, recipe, like=source, dtype=None, finish=finish)


@pytest.mark.parametrize(
    "family,targets",
    [("qwen3_5_text", "[all-linear]"), ("qwen3_next", "[in_proj_qkvz, in_proj_ba, out_proj]")],
    ids=str,
)
def test_adapters_of_linear_attention_resume_bitwise(ranks: Ranks, tmp_path: Path, family: str, targets: str) -> None:
    """On another layout the weights are the same bits; on the same one so are those after another step."""
    source = hf.save(tmp_path / "source", family)
    _, values = peft_model(source, "all-linear" if family == "qwen3_5_text" else targets.strip("[]").split(", "))
    lora = f"lora={{rank: {RANK}, alpha: {ALPHA}, targets: {targets}}}"
    recipe, checkpoint = [*recipe_of(source), f"model.hf={source}", lora, *OPTIMIZER], tmp_path / "iter_0000010"
    results = ranks(2).run(train, [*recipe, *SP], str(source), values, checkpoint)
    after = whole(results, "after")
    assert after.keys() == values.keys() and not any(torch.equal(after[name], values[name]) for name in values)
    on_another = ranks(2).run(resume, [*recipe, *CP, *DP], str(source), checkpoint)
    assert hf.same(after, whole(on_another, "loaded"))
    on_the_same = ranks(2).run(resume, [*recipe, *SP], str(source), checkpoint)
    assert hf.same(whole(results, "later"), whole(on_the_same, "later"))
    assert not hf.same(after, whole(results, "later"))
