"""LoRA equals that of peft on every layout: token losses, gradients of all factors, and steps of AdamW."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer

from sft.mcore.checkpoint_io.optimizer_shards import optimizer_slices
from sft.mcore.engine import Engine
from sft.mcore.lora import adapted
from sft.mcore.modules.stored import sharded_tensors
from tests.ranks import etp_on_gloo, scenarios
from tests.ranks.hf_models import ADAMW, SHORT, check_token_losses, expected_losses, load, packs_of
from tests.ranks.layouts import CP, EP, GRADIENT_TOLERANCE, PP, SHARDED, SP, STEP_TOLERANCE, TP
from tests.ranks.peft_models import (
    SMALL,
    VALUES,
    Adapted,
    factors,
    fill,
    lora_recipe,
    losses_and_gradients,
    peft_gradients,
    peft_model,
    shapes_of,
    shard_parts,
    steps,
    trained_of,
    whole,
)
from tests.ranks.pool import RankPool, Ranks
from tests.ranks.scenarios import check_parameters
from tests.ranks.te_attention import with_plain_attention
from tests.unit.fixtures import hf

ATTENTION = ["q_proj", "v_proj", "o_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


def check(
    pool: RankPool,
    recipe: list[str],
    source: Path,
    values: dict[str, torch.Tensor],
    model: Any,
    run: Callable[..., Any] = etp_on_gloo.run,
    *,
    tolerance: float = GRADIENT_TOLERANCE,
) -> None:
    """Token losses, gradients and the gradient norm equal those of `model`, whose adapters have the given values."""
    packs = packs_of(SHORT)
    results = pool.run(run, losses_and_gradients, recipe, str(source), values, packs)
    check_token_losses([result["losses"] for result in results], expected_losses(model, packs), packs)
    expected, _ = peft_gradients(model, packs)
    assert all(tensor.norm() > 0 for tensor in expected.values()), "a factor without a gradient shows nothing"
    check_parameters(whole(results, "gradients"), expected, tolerance)
    norm = float(torch.stack([tensor.norm() for tensor in expected.values()]).norm())
    assert all(result["norm"] == pytest.approx(norm, rel=GRADIENT_TOLERANCE) for result in results)


def in_grid(cases: list[Any]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.grid) for case in cases]


FULL, SELECTIVE, TILES = "train.recompute=full", "train.recompute=selective", "train.mlp_tile=24"
CASES = [
    ("qwen3", "all-linear", 1, [FULL]),
    ("qwen3", "all-linear", 2, SP),
    ("qwen3", "all-linear", 2, [*PP, FULL]),
    ("llama", ATTENTION, 2, TP),
    ("llama", ATTENTION, 2, [*CP, SELECTIVE]),
    ("phi3", "all-linear", 2, [*SP, TILES]),
    ("gpt_oss", ATTENTION, 2, [*SP, SELECTIVE]),  # adapters beside biases and frozen experts
    ("gemma2", "all-linear", 2, [*SP, TILES]),  # adapters between norms, and a frozen head whose logits are capped
    ("gemma4_text", "all-linear", 2, [*SP, SELECTIVE]),  # every second layer has queries and keys but no values
    # q_proj stores the rows of queries and gates head by head, in_proj_qkvz stores its rows key head by key head.
    ("qwen3_5_text", ["in_proj_qkv", "in_proj_a", "q_proj"], 2, [*SP, SELECTIVE]),
    ("qwen3_next", ["in_proj_qkvz", "in_proj_ba", "out_proj"], 2, SP),
    # kv_b_proj is applied to gathered latents, one head group at a time; every rank holds the whole kv_a_proj_with_mqa.
    ("deepseek_v3", LATENT, 4, [*CP, *SP, SELECTIVE]),
    ("deepseek_v3", ["kv_b_proj", "q_a_proj"], 4, [*PP, *SP, FULL]),
    ("qwen3", ["k_proj", "up_proj"], 4, [*TP, *PP, SELECTIVE]),
    ("phi3", "all-linear", 4, [*CP, *SP, FULL]),
    ("qwen3", "all-linear", 2, [*CP, *SHARDED, "parallel.shard=weights", FULL]),
    ("phi3", "all-linear", 1, [FULL, TILES, "train.head_chunks=2"]),
    ("llama", ATTENTION, 2, [*CP, SELECTIVE, "train.head_chunks=2"]),
]
MORE = [
    ("llama", "all-linear", 2, [TILES]),
    ("phi3", ["qkv_proj", "down_proj"], 1, [SELECTIVE]),
    ("deepseek_v3", LATENT, 2, SP),
    ("moonlight", ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj"], 2, SP),
    ("moonlight", ["q_proj", "kv_b_proj", "o_proj"], 4, [*PP, *CP, SELECTIVE]),
    ("glm4_moe_lite", LATENT, 2, CP),
    ("glm4_moe_lite", LATENT, 4, [*SP, FULL]),
    ("olmo_hybrid", ["q_proj", "g_proj", "b_proj", "o_proj"], 2, [*SP, SELECTIVE]),
]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {"moonlight": ("deepseek_v3", dict(q_lora_rank=None))}
# With wider weights, or adapters of every Linear, rounding in both implementations is up to 6e-5.
LINEAR: dict[str, Any] = dict(initializer_range=0.05, seed=8)
# Of a gradient's norm.  The delta rule amplifies the rounding of the sum of output and adapters to 1.5e-5.
LINEAR_TOLERANCE = 2e-5


@pytest.mark.card("LoRA")
@pytest.mark.parametrize("family,targets,world_size,overrides", CASES + in_grid(MORE), ids=str)
def test_losses_and_gradients_are_those_of_peft(
    ranks: Ranks, tmp_path: Path, family: str, targets: Any, world_size: int, overrides: list[str]
) -> None:
    family, fields = MODELS.get(family, (family, LINEAR if family in hf.LINEAR_FAMILIES else {}))
    source = hf.save(tmp_path / "source", family, **fields)
    model, values = peft_model(source, targets, exact=True, std=SMALL if family == "olmo_hybrid" else VALUES)
    tolerance = LINEAR_TOLERANCE if family in hf.LINEAR_FAMILIES else GRADIENT_TOLERANCE
    recipe = [*lora_recipe(source, targets), *overrides]
    check(ranks(world_size), recipe, source, values, model, tolerance=tolerance)


@pytest.mark.parametrize(
    "world_size,overrides", [(4, [*CP, *SP]), pytest.param(1, [SELECTIVE], marks=pytest.mark.grid)]
)
def test_adapters_of_latents_whose_keys_are_expanded_before_attention(
    ranks: Ranks, tmp_path: Path, world_size: int, overrides: list[str]
) -> None:
    """As with Transformer Engine, whose kernel gets keys and values of all heads."""
    source = hf.save(tmp_path / "source", "deepseek_v3")
    model, values = peft_model(source, LATENT, exact=True)
    recipe = [*lora_recipe(source, LATENT), *overrides]
    check(ranks(world_size), recipe, source, values, model, with_plain_attention)


EXPERTS = ["experts.*", "o_proj"]
ETP = ["parallel.etp=2", "run.device=auto"]
ROUTED_GRID = [
    ("qwen3_moe", EXPERTS, 2, [*SP, *ETP, SELECTIVE]),
    ("glm4_moe", ["experts.*", "shared_experts.*", "k_proj"], 2, [*EP, *CP, SELECTIVE]),
    ("minimax_m2", ["w1", "w2", "w3", "q_proj"], 2, [*SP, *EP]),
    ("minimax_m2", ["w1", "o_proj"], 4, [*PP, *CP, SELECTIVE]),
    ("deepseek_v3", ["experts.*", "shared_experts.*", "kv_b_proj"], 2, [*SP, *EP]),
    ("deepseek_v3", ["down_proj", "q_b_proj"], 4, [*EP, *CP, *SP, SELECTIVE]),
    ("glm4_moe_lite", ["experts.*", "kv_b_proj"], 2, [*EP, *CP]),
]


@pytest.mark.parametrize(
    "family,targets,world_size,overrides",
    [
        ("qwen3_moe", EXPERTS, 1, [SELECTIVE]),
        ("qwen3_moe", EXPERTS, 2, [*EP, *CP]),
        ("mixtral", ["experts.*"], 2, [*EP, *SP]),
        ("mixtral", ["w1", "w2", "q_proj"], 2, [*PP, FULL]),
        ("qwen2_moe", ["shared_expert.*", "experts.*.up_proj"], 2, [*SP, SELECTIVE]),
        ("qwen2_moe", ["shared_expert.*", "experts.*.down_proj"], 4, [*SP, *EP]),
        # Linears of the first layer, which has no experts, and of the shared experts and experts of the other layers.
        ("glm4_moe", ["q_proj", "down_proj"], 2, [*SP, *EP]),
        ("qwen3_moe", EXPERTS, 4, [*SP, *ETP, *EP, *CP]),
        *in_grid(ROUTED_GRID),
    ],
    ids=str,
)
def test_adapters_of_experts_are_low_rank_terms_of_their_weights(
    ranks: Ranks, tmp_path: Path, family: str, targets: list[str], world_size: int, overrides: list[str]
) -> None:
    source = hf.save(tmp_path / "source", family)
    model, values = model_with_experts(ranks, source, targets)
    check(ranks(world_size), [*lora_recipe(source, targets), *overrides], source, values, model)


def model_with_experts(ranks: Ranks, source: Path, targets: list[str]) -> tuple[Adapted, dict[str, torch.Tensor]]:
    """A transformers model with adapters, and the values of the adapters."""
    (shapes,) = ranks(1).run(shapes_of, lora_recipe(source, targets))
    values = {name: value.requires_grad_() for name, value in factors(shapes).items()}
    return Adapted(hf.load(source).eval(), values), {name: value.detach().clone() for name, value in values.items()}


STEPS = 10


def train(overrides: list[str], folder: str, values: dict[str, torch.Tensor], packs: Any) -> dict[str, Any]:
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        fill(engine, values)
        frozen = frozen_hash(engine)
        for _ in range(STEPS):
            step = engine.train_step(scenarios.microbatches_of(engine, packs))
        return {
            "factors": shard_parts(sharded_tensors(list(adapted.leaves(engine.chunks)))),
            "unchanged": frozen_hash(engine) == frozen,
            "rate": step.learning_rate,
            "trained": sum(p.numel() for chunk in engine.chunks for p in chunk.parameters() if p.requires_grad),
            "gradients": sum(
                b.grad_data.numel() for c in engine.chunks for b in (*c.buffers, *c.expert_parallel_buffers)
            ),
            "moments": sum(len(part.tensors.get("exp_avg", ())) for part in optimizer_slices(engine.optimizer)),
        }


def frozen_hash(engine: Engine) -> str:
    digest = hashlib.sha256()
    for chunk in engine.chunks:
        for name, param in chunk.named_parameters():
            if not param.requires_grad:
                digest.update(name.encode() + param.detach().numpy().tobytes())
    return digest.hexdigest()


def loraplus(model: Any, lr_ratio: float) -> Any:
    settings: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, loraplus_weight_decay=0.1)
    return create_loraplus_optimizer(model, torch.optim.AdamW, loraplus_lr_ratio=lr_ratio, **settings)


@pytest.mark.parametrize(
    "family,world_size,overrides,lr_ratio",
    [
        ("llama", 2, SHARDED, 8.0),
        ("qwen3", 2, SP, 8.0),
        ("phi3", 2, [*PP, FULL], 0.25),
        ("llama", 4, [*SP, *CP, *SHARDED, SELECTIVE], 1.0),
        ("qwen3_moe", 4, [*SP, *EP, *SHARDED], 1.0),
    ],
    ids=str,
)
def test_ten_steps_are_those_of_peft(
    ranks: Ranks, tmp_path: Path, family: str, world_size: int, overrides: list[str], lr_ratio: float
) -> None:
    source = hf.save(tmp_path / "source", family)
    targets: Any = "all-linear"
    if family == "qwen3_moe":
        targets = ["all-linear", "experts.*"]
        model, values = model_with_experts(ranks, source, targets)
    else:
        model, values = peft_model(source, targets)
    recipe = [*lora_recipe(source, targets), *ADAMW, *overrides, f"lora.lr_ratio={lr_ratio}"]
    packs = packs_of(SHORT)
    results = ranks(world_size).run(train, recipe, str(source), values, packs)
    steps(model, packs, STEPS, None if isinstance(model, Adapted) else loraplus(model, lr_ratio))
    moved = {name: tensor - values[name] for name, tensor in trained_of(model).items()}
    found = whole(results, "factors")
    check_parameters({name: tensor - values[name] for name, tensor in found.items()}, moved, STEP_TOLERANCE)
    copies: dict[Any, set[bytes]] = {}
    for result in results:
        # the learning rate of A, which does not depend on lr_ratio
        assert result["unchanged"] and result["rate"] == 1e-3
        assert result["trained"] <= result["gradients"] < 1.1 * result["trained"] + 4096  # buffers have padding
        for name, _, offset, data in result["factors"]:
            copies.setdefault((name, offset, data.shape), set()).add(data.tobytes())
    assert all(len(values) == 1 for values in copies.values()), "ranks that hold the same factor hold the same bits"


def rates(overrides: list[str]) -> list[tuple[float, float]]:
    """The learning rates of A, from the log, and of B, in each step."""
    with scenarios.running(overrides) as engine:
        found = []
        for _ in range(4):
            engine.scheduler.step(1)
            of_a, of_b = engine.optimizer.param_groups  # the log reads the first group
            assert all(factor.shape[0] == 3 for factor in of_a["params"])  # [rank, in]
            assert all(factor.shape[1] == 3 for factor in of_b["params"])  # [out, rank]
            found.append((of_a["lr"], of_b["lr"]))
        return found


def test_the_schedule_scales_the_rates_of_both_factors(ranks: Ranks) -> None:
    """Warm-up to the peak, then decay to min_lr: 1e-3 to 1e-4 for A, and four times these rates for B."""
    recipe = ["model.qkv_bias=false", "lora={rank: 3, lr_ratio: 4}", "optim.min_lr=1e-4", "train.num_steps=4"]
    ((first, *rest),) = ranks(1).run(rates, recipe)
    assert first == pytest.approx((1e-3, 4e-3))
    assert rest == [pytest.approx((a, 4 * a)) for a in (7e-4, 4e-4, 1e-4)]
