"""Muon: its updates equal torch.optim.Muon and a float64 loop, and they do not depend on the layout."""

from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sft.errors import CheckpointError
from sft.estimate import muon as estimate_of_muon
from sft.estimate.parameters import stage_parameters
from sft.estimate.stage import Stage
from sft.mcore.checkpoint_io import engine_state
from sft.mcore.optimizer.inner import chained_optimizers
from tests.ranks import scenarios
from tests.ranks.layouts import CP, EP, LATENT, MOE, PP, SHARDED, SP, TP
from tests.ranks.pool import Ranks

MUON = ["optim.name=muon", "optim.lr=1e-2", "model.num_layers=2", "model.qkv_bias=false"]
FP32 = [*MUON, "optim.muon.ns_dtype=fp32"]
BF16_MODEL = ["run.precision=bf16", *SHARDED]
STEPS = 10
# Newton-Schulz in fp32 amplifies rounding: each of 5 steps multiplies small singular values by 3.4.
FLOAT64_TOLERANCE = 1e-5
# The same curve on another layout: sums in another order, amplified as above.
CURVE_TOLERANCE = 1e-6
DEEPSEEK = [
    *(*LATENT, *MOE, "model.moe.score_function=sigmoid", "model.moe.correction_bias=true"),
    *("model.moe.scaling_factor=1.7", "model.moe.shared_ffn_hidden_size=16", "model.moe.dense_layers=1"),
]
LORA = ["lora.rank=4", "lora.targets=[q_proj, v_proj, o_proj, gate_proj, down_proj]"]


def float64_muon(momentum: Tensor, weight: Tensor, grad: Tensor, lr: float, decay: float) -> tuple[Tensor, Tensor]:
    """The momentum and the weight after an update, with torch's defaults, by a loop over singular values.

    The quintic of Newton-Schulz changes the singular values of a matrix only.
    """
    momentum = 0.95 * momentum + 0.05 * grad
    direction = 0.05 * grad + 0.95 * momentum
    u, s, vt = torch.linalg.svd(direction, full_matrices=False)
    s = s / max(float(direction.norm()), 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    update = 0.2 * sqrt(max(weight.shape)) * (u * s) @ vt
    return momentum, weight * (1 - lr * decay) - lr * update


def projections(name: str, rows: int) -> list[list[int]]:
    """The rows of each projection of a weight of scenarios.RECIPE: 8 heads and 4 key heads of 4 numbers."""
    if name.endswith("linear_fc1.weight"):
        return [list(range(rows // 2)), list(range(rows // 2, rows))]
    if name.endswith("linear_qkv.weight"):
        groups = [range(16 * group, 16 * group + 16) for group in range(4)]
        return [[row for group in groups for row in group[a:b]] for a, b in ((0, 8), (8, 12), (12, 16))]
    return [list(range(rows))]


def pick(tensor: Tensor, expert: int | None, rows: list[int]) -> Tensor:
    return (tensor if expert is None else tensor[expert])[rows]


def followed(overrides: Sequence[str]) -> dict[str, Any]:
    """Trains on one process.  Each update of Muon is also made by torch.optim.Muon, and in float64."""
    with scenarios.running([*overrides, f"train.num_steps={STEPS}"]) as engine:
        names = {id(p): n for n, p in engine.chunks[0].module.named_parameters()}
        inners = [core.optimizer for core in chained_optimizers(engine.optimizer)]
        own = [p for inner in inners for group in inner.muon.param_groups for p in group["params"]]
        parts = [
            (param, expert, rows)
            for param in own
            for expert in (range(len(param)) if param.dim() == 3 else [None])
            for rows in projections(names[id(param)], param.shape[-2])
        ]
        copies = [torch.nn.Parameter(pick(p.detach(), e, rows).clone()) for p, e, rows in parts]
        wide = [copy.detach().double() for copy in copies]
        momenta = [torch.zeros_like(copy) for copy in wide]
        reference = torch.optim.Muon(copies, lr=1.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")

        def follow(lr: float) -> None:
            for number, (copy, (p, e, rows)) in enumerate(zip(copies, parts)):
                copy.grad = pick(p.grad, e, rows).clone()
                momenta[number], wide[number] = float64_muon(momenta[number], wide[number], copy.grad.double(), lr, 0.1)
            reference.param_groups[0]["lr"] = lr
            reference.step()

        loader = scenarios.loader_of(engine)
        engine.optimizer.step_with_ready_grads = before(
            engine.optimizer.step_with_ready_grads, lambda: follow(engine.optimizer.param_groups[-1]["lr"])
        )
        for step in range(STEPS):
            engine.train_step(loader.microbatches(step % 5))
        found = [pick(p.detach(), e, rows) for p, e, rows in parts]
        return {
            "names": sorted({names[id(p)] for p in own}),
            "adam": sorted(set(names.values()) - {names[id(p)] for p in own}),
            "is bitwise": all(torch.equal(a, b) for a, b in zip(found, copies)),
            "error": max(float((a - b).norm() / b.norm()) for a, b in zip(found, wide)),
        }


def before(call: Any, action: Any) -> Any:
    def both() -> Any:
        action()
        return call()

    return both


MODELS = {"dense": [], "experts": MOE, "latent": DEEPSEEK, "lora": LORA}


@pytest.mark.parametrize("model", MODELS)
def test_torch_makes_the_same_updates_bit_for_bit(ranks: Ranks, model: str) -> None:
    (found,) = ranks(1).run(followed, [*MUON, *MODELS[model]])
    assert found["is bitwise"] and found["error"] > 1e-4, found  # bf16 is far from float64


@pytest.mark.parametrize("model", MODELS)
def test_updates_equal_a_float64_loop(ranks: Ranks, model: str) -> None:
    (found,) = ranks(1).run(followed, [*FP32, *MODELS[model]])
    assert found["error"] < FLOAT64_TOLERANCE, found
    kinds = {".".join(name.split(".")[-2:]) for name in found["adam"]}
    if model == "experts":  # the base of LoRA is frozen
        assert kinds == {
            *("word_embeddings.weight", "output_layer.weight", "router.weight", "final_layernorm.weight"),
            *("input_layernorm.weight", "pre_mlp_layernorm.weight", "q_layernorm.weight", "k_layernorm.weight"),
        }


LAYOUTS = {
    "dp 2": (2, [], "dense"),
    "dp 2 distributed": (2, SHARDED, "dense"),
    "sharded weights": (2, [*SHARDED, "parallel.shard=weights"], "lora"),
    "ep 2": (2, [*EP, *SHARDED], "experts"),
    "tp 2 x cp 2": (4, [*SP, *CP, *SHARDED], "dense"),
    "tp 2 x pp 2": (4, [*SP, *PP], "latent"),
    "pp 2 x dp 2": (4, [*PP, *SHARDED], "lora"),
    "ep 2 x tp 2": (4, [*SP, *EP, *SHARDED], "experts"),
}


@pytest.fixture(scope="module")
def references(ranks: Ranks) -> dict[str, Any]:
    """Three steps of one process for each model."""
    return {name: ranks(1).run(scenarios.train, [*FP32, *model])[0] for name, model in MODELS.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_curve_is_that_of_one_process(ranks: Ranks, references: dict[str, Any], layout: str) -> None:
    world_size, overrides, model = LAYOUTS[layout]
    for result in ranks(world_size).run(scenarios.train, [*FP32, *MODELS[model], *overrides]):
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(result[name], references[model][name], rtol=CURVE_TOLERANCE)


def test_a_resumed_run_is_equal_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    scenarios.check_bitwise(ranks(2), tmp_path, [*MUON, *TP, *BF16_MODEL])


def test_a_checkpoint_continues_on_another_layout(ranks: Ranks, references: dict[str, Any], tmp_path: Path) -> None:
    ranks(2).run(scenarios.train, [*FP32, *TP, *SHARDED], [0, 1], None, str(tmp_path))
    for overrides in ([*PP, *SHARDED], [*SHARDED, "parallel.shard=weights"]):
        for result in ranks(2).run(scenarios.train, [*FP32, *overrides], [2], str(tmp_path)):
            np.testing.assert_allclose(result["loss"], references["dense"]["loss"][2:], rtol=CURVE_TOLERANCE)


def test_a_checkpoint_of_another_optimizer_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    adamw, muon = MUON[2:], MUON
    for number, (before, after) in enumerate(((adamw, muon), (muon, adamw))):
        folder = tmp_path / str(number)
        ranks(1).run(scenarios.train, before, [0], None, str(folder))
        (said,) = ranks(1).run(refusal, after, str(folder))
        assert "updated them with another optimizer" in said


def refusal(overrides: list[str], folder: str) -> str:
    with scenarios.running(overrides) as engine:
        with pytest.raises(CheckpointError) as refused:
            engine_state.load(engine, Path(folder))
        return str(refused.value)


def traffic(overrides: Sequence[str]) -> dict[str, float]:
    """The elements that this rank receives from other ranks in the exchanges of a step, and the estimate's bound."""
    received, call = [], dist.all_to_all_single

    def counted(output: Tensor, given: Tensor, *counts: list[int], **others: Any) -> None:
        if counts:  # those of experts have names
            received.append(output.nbytes - counts[0][others["group"].rank()] * output.element_size())
        call(output, given, *counts, **others)

    with scenarios.running(overrides) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        scenarios.train_steps(engine, [0])
        stage = Stage.of(engine.config, engine.layout, scenarios.VOCAB, engine.groups.pp_rank, engine.trained)
        muons = [core.optimizer.muon for core in chained_optimizers(engine.optimizer)]
        held = sum(state.nbytes for muon in muons for values in muon.state.values() for state in values.values())
        own = stage_parameters(stage)
        return {
            "received": float(sum(received)),
            "estimate": estimate_of_muon.exchanged(stage, own),
            "momentum": float(held),
            "elements": own.muon.updated(engine.config, engine.layout),
            "flops": sum(
                m.flops(muon.config)
                for muon in muons
                for r in muon.rounds
                for m in r.matrices.get(muon.group.rank(), [])
            ),
            "even flops": estimate_of_muon.flops(stage),
        }


# The share of the estimate's bound that ranks receive.  dp 2: each owner has all momentum, and sends each update once.
# With the distributed optimizer, each rank updates one of two layers, and owns it.  Of ep 2 x tp 2 only the dense third
# moves: experts are whole on their ranks.
RECEIVED = {"dp 2": 2 / 3, "dp 2 distributed": 0.0, "tp 2 x cp 2": 2 / 3, "ep 2 x tp 2": 1 / 6}


@pytest.mark.parametrize("layout", RECEIVED)
def test_bytes_and_flops_are_those_of_the_estimate(ranks: Ranks, layout: str) -> None:
    world_size, overrides, model = LAYOUTS[layout]
    found = ranks(world_size).run(traffic, [*MUON, *MODELS[model], *overrides])
    total = {name: sum(rank[name] for rank in found) for name in found[0]}
    assert total["momentum"] == 4 * total["elements"]
    assert total["received"] == pytest.approx(RECEIVED[layout] * total["estimate"])
    assert total["flops"] == pytest.approx(total["even flops"])
    assert max(rank["flops"] for rank in found) < 1.3 * total["flops"] / world_size
