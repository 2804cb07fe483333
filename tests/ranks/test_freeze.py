"""train.freeze equals requires_grad = False in transformers, and optim.groups equals torch's parameter groups, on every
layout; frozen weights need no gradients or states."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.estimate.parameters import stage_parameters
from sft.estimate.stage import Stage
from sft.mcore.checkpoint_io import engine_state
from sft.mcore.checkpoint_io.optimizer_shards import MAIN, OptimizerSlice, optimizer_slices, sharded_slices
from sft.mcore.engine import Engine
from sft.mcore.gradients import chunk_of, gradient_chunks
from tests.ranks import scenarios
from tests.ranks.hf_models import (
    ADAMW,
    SHORT,
    backward,
    in_stored_names,
    load,
    packs_of,
    parts_of,
    recipe_of,
    stored_gradients,
)
from tests.ranks.layouts import CP, EP, GRADIENT_TOLERANCE, PP, SHARDED, SP, STEP_TOLERANCE
from tests.ranks.pool import Ranks
from tests.ranks.scenarios import check_parameters
from tests.unit.fixtures import hf

LAYOUT_TOLERANCE = 1e-4  # relative to a weight's change in the steps after a resume on another layout
STEPS = 10
FULL, SELECTIVE, TILES = "train.recompute=full", "train.recompute=selective", "train.mlp_tile=24"


@dataclass(frozen=True)
class Own:
    """A group of optim.groups.  names: regular expression of its tensors in transformers"""

    params: list[str]
    names: str
    lr_ratio: float = 1.0
    weight_decay: float = 0.1

    @property
    def key(self) -> dict[str, Any]:
        return {"params": self.params, "lr_ratio": self.lr_ratio, "weight_decay": self.weight_decay}


def recipe(source: Path, freeze: list[str], groups: Sequence[Own] = ()) -> list[str]:
    named = [f"train.freeze={json.dumps(freeze)}", f"optim.groups={json.dumps([group.key for group in groups])}"]
    return [*recipe_of(source), *ADAMW, f"model.hf={source}", *named]


def step(engine: Engine) -> None:
    engine.train_step(scenarios.microbatches_of(engine, packs_of(SHORT)))


def weights(engine: Engine) -> list[Any]:
    """All weights of this rank, also frozen ones."""
    slices = [
        OptimizerSlice(
            param=getattr(param, "whole", param),
            start=getattr(param, "start", 0),
            tensors={MAIN: param.detach().view(-1)},
            gradient=param.detach().view(-1),
            replica=getattr(param, "replica", None),
            write=lambda: None,
        )
        for chunk in engine.chunks
        for param in chunk.parameters()
    ]
    return parts_of(map(chunk_of, sharded_slices(slices, engine_state.model_state(engine), main="")))


def train(overrides: list[str], folder: str) -> dict[str, Any]:
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        before = {name: param.detach().clone() for c in engine.chunks for name, param in c.named_parameters()}
        engine.measure(scenarios.microbatches_of(engine, packs_of(SHORT)), forward_only=False)
        first = parts_of(gradient_chunks(engine))
        for _ in range(STEPS):
            step(engine)
        params = [(name, param) for chunk in engine.chunks for name, param in chunk.named_parameters()]
        stage = Stage.of(engine.config, engine.layout, engine.vocab_size, engine.groups.pp_rank, engine.trained)
        counted = stage_parameters(stage)
        return {
            "gradients": first,
            "weights": weights(engine),
            "unchanged": all(torch.equal(p, before[name]) for name, p in params if not p.requires_grad),
            "frozen": sum(not param.requires_grad for _, param in params),
            "trained": sum(param.numel() for _, param in params if param.requires_grad),
            "estimated": counted.trained.total,
            "gradient numbers": sum(
                buffer.grad_data.numel() for c in engine.chunks for buffer in (*c.buffers, *c.expert_parallel_buffers)
            ),
            "moments": sum(len(part.tensors.get("exp_avg", ())) for part in optimizer_slices(engine.optimizer)),
        }


def stored(results: list[dict[str, Any]], key: str, source: Path) -> dict[str, torch.Tensor]:
    return in_stored_names(source, [{"chunks": result[key]} for result in results])


def reference(
    source: Path, frozen: str, groups: Sequence[Own]
) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The transformers model after the steps, its first gradients, and its weights before.  frozen: regular expression
    of names"""
    model = hf.load(source).eval()
    for name, param in model.named_parameters():
        param.requires_grad_(not re.search(frozen, name))
    trained, settings = [param for param in model.parameters() if param.requires_grad], []
    for name, param in model.named_parameters():
        own = next((group for group in groups if re.search(group.names, name)), Own([], ""))
        decay = own.weight_decay if param.dim() > 1 else 0.0
        settings += [{"params": [param], "lr": 1e-3 * own.lr_ratio, "weight_decay": decay}] * param.requires_grad
    adam = torch.optim.AdamW(settings, betas=(0.9, 0.95), eps=1e-8)
    samples = [sample for pack in packs_of(SHORT) for sample in pack]
    before = stored_gradients(model, lambda param: param.detach())
    for number in range(STEPS):
        backward(model, samples)
        if number == 0:
            first = stored_gradients(model)
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        adam.step()
    return model, first, before


LAYER_0 = "layers.0.*"
ATTENTION = Own(["self_attn.*"], r"\.self_attn\.", lr_ratio=3.0)
TIED = Own(["embed_tokens"], r"embed_tokens", lr_ratio=0.2, weight_decay=0.0)
OUTPUT = Own(["o_proj"], r"\.o_proj\.", weight_decay=20.0)
EXPERTS = Own(["experts.*"], r"\.experts\.", lr_ratio=0.5, weight_decay=20.0)
MLP = Own(["mlp.*", "model.norm"], r"\.mlp\.|^model\.norm", lr_ratio=4.0, weight_decay=10.0)


@pytest.mark.parametrize(
    "family,tied,freeze,frozen,world_size,overrides,groups",
    [
        ("llama", False, ["embed_tokens", "lm_head", "mlp.*"], r"embed_tokens|lm_head|\.mlp\.", 2, [*SP, FULL], []),
        # stage 0 trains nothing
        ("qwen3", True, ["embed_tokens", LAYER_0], r"embed_tokens|layers\.0\.", 2, [*PP, FULL], [ATTENTION]),
        ("qwen2", False, ["model.*"], r"^model\.", 2, [*CP, *SHARDED], []),  # only the output weight is trained
        (
            "llama",
            True,
            ["q_proj", "k_proj", "v_proj", "*norm"],
            r"[qkv]_proj|norm",
            2,
            [*PP, SELECTIVE],
            [TIED, OUTPUT],
        ),
        (
            "qwen3_moe",
            False,
            ["embed_tokens", "experts.*", "mlp.gate"],
            r"embed_tok|experts|mlp\.gate\.",
            2,
            [*EP, *CP],
            [],
        ),
        ("mixtral", False, [], r"$^", 2, [*EP, *CP, FULL], [EXPERTS, ATTENTION]),  # nothing is frozen
        ("deepseek_v3", False, ["o_proj"], r"o_proj", 2, [*EP, *CP], []),
        ("qwen3_moe", False, ["layers.0.mlp.experts.*"], r"layers\.0\.mlp\.experts", 2, [*PP, FULL], [EXPERTS]),
        (
            "qwen3",
            False,
            ["lm_head", "layers.1.*"],
            r"lm_head|layers\.1\.",
            4,
            [*SP, *CP, *SHARDED, TILES],
            [TIED, MLP],
        ),
    ],
    ids=str,
)
def test_steps_are_those_of_transformers(
    ranks: Ranks,
    tmp_path: Path,
    family: str,
    tied: bool,
    freeze: list[str],
    frozen: str,
    world_size: int,
    overrides: Any,
    groups: list[Own],
) -> None:
    """Compares the first gradients and ten steps.  Frozen weights keep their bits, and have no gradients and no
    moments."""
    source = hf.save(tmp_path / "source", family, tied=tied)
    model, first, before = reference(source, frozen, groups)
    results = ranks(world_size).run(train, [*recipe(source, freeze, groups), *overrides], str(source))
    check_parameters(stored(results, "gradients", source), first, GRADIENT_TOLERANCE)
    after = stored_gradients(model, lambda param: param.detach())
    found = stored(results, "weights", source)
    assert found.keys() == before.keys()
    moved = {name: after[name] - before[name] for name in first}
    check_parameters({name: found[name] - before[name] for name in first}, moved, STEP_TOLERANCE)
    assert all(torch.equal(found[name], before[name]) for name in before.keys() - first.keys())
    assert any(result["frozen"] for result in results) == bool(freeze)
    for result in results:
        assert result["unchanged"] and result["trained"] == result["estimated"]
        padding = 64 * world_size * 2 * 2  # megatron-core pads the buffers of dense weights and of expert weights
        assert result["trained"] <= result["gradient numbers"] <= result["trained"] + 4096 + padding
        assert result["moments"] <= result["trained"]


def save(overrides: list[str], folder: str, checkpoint: Path) -> dict[str, Any]:
    """All weights after two steps, which are in a checkpoint, and after a third step."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        step(engine)
        step(engine)
        if engine.groups.rank == 0:
            checkpoint.mkdir()
        engine_state.write(engine_state.snapshot(engine, {"iteration": 2}), checkpoint, engine.groups.control)
        after = weights(engine)
        step(engine)
        return {"after": after, "later": weights(engine)}


def resume(overrides: list[str], checkpoint: Path) -> dict[str, Any]:
    with scenarios.running(overrides, has_weights=False) as engine:
        engine_state.load(engine, checkpoint)
        step(engine)
        return {"later": weights(engine)}


def test_a_run_resumes_on_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    """The checkpoint holds the whole model and the step of Adam, although rank 0 trained nothing."""
    source = hf.save(tmp_path / "source", "qwen3", tied=True)
    frozen, checkpoint = recipe(source, ["embed_tokens", LAYER_0]), tmp_path / "iter_0000002"
    results = ranks(2).run(save, [*frozen, *PP], str(source), checkpoint)
    after, expected = stored(results, "after", source), stored(results, "later", source)
    found = stored(ranks(2).run(resume, [*frozen, *SP, *SHARDED], checkpoint), "later", source)
    moved = {name: tensor - after[name] for name, tensor in expected.items() if not torch.equal(tensor, after[name])}
    assert moved.keys() == {name for name in after if not re.search(r"embed_tokens|layers\.0\.", name)}
    check_parameters({name: found[name] - after[name] for name in moved}, moved, LAYOUT_TOLERANCE)
    assert all(torch.equal(found[name], after[name]) for name in after.keys() - moved.keys())


WHAT = ['train.freeze=["embed_tokens", "layers.0.self_attn.*"]', "lora={rank: 2, targets: [o_proj], train_head: true}"]
MODES = [["train.recompute=none"], [SELECTIVE], [FULL], [FULL, TILES], [FULL, "train.offload_fraction=1.0"]]


def zero_gradients(recipes: list[list[str]], folder: str) -> list[str]:
    """The trained parts of weights whose gradients are zero in the second step."""
    zero = []
    for overrides in recipes:
        with scenarios.running(overrides) as engine:
            load(engine, folder)
            step(engine)
            step(engine)
            chunks = list(gradient_chunks(engine))
            assert chunks
            zero += [f"{overrides}: {chunk.parameter}" for chunk in chunks if not chunk.data.any()]
    return zero


@pytest.mark.parametrize("layout", [SHARDED, PP], ids=str)
def test_every_trained_weight_has_a_gradient_with_a_frozen_embedding(
    ranks: Ranks, tmp_path: Path, layout: list[str]
) -> None:
    source = hf.save(tmp_path / "source", "qwen3")
    base = [*recipe_of(source), *ADAMW, f"model.hf={source}", *layout]
    recipes = [[*base, what, *mode] for what in WHAT for mode in MODES]
    assert ranks(2).run(zero_gradients, recipes, str(source)) == [[], []]
