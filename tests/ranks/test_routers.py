"""Sigmoid routers: their correction bias is the same on every layout, and checkpoints store it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.mcore.checkpoint_io import engine_state
from sft.mcore.experts.router import Router
from tests.ranks import scenarios
from tests.ranks.layouts import AUX, CP, EP, LOSS_TOLERANCE, MOE, NORM_TOLERANCE, PP, SHARDED, SLOW_CP, SP, TOP_K
from tests.ranks.pool import Ranks

RATE = 0.03  # so large that one step changes the choices of many tokens
NUM_EXPERTS = 8  # two in each group
SIGMOID = [
    *MOE,
    *("model.moe.score_function=sigmoid", "model.moe.correction_bias=true", f"model.moe.bias_update_rate={RATE}"),
    *(f"model.moe.num_experts={NUM_EXPERTS}", "model.moe.num_groups=4", "model.moe.top_groups=2"),
    *("model.moe.scaling_factor=1.7", "model.moe.shared_ffn_hidden_size=16"),
    "model.moe.dense_layers=1",
]
STEPS = 3
BALANCE_TOLERANCE = 1e-5  # for the balancing loss, which routers compute in fp32


def biases(engine: Any) -> dict[int, list[float]]:
    """The biases by layer, exact, because float64 represents every fp32 number."""
    routers = [m for chunk in engine.chunks for m in chunk.modules() if isinstance(m, Router)]
    assert all(router.expert_bias is not None and router.expert_bias.dtype == torch.float32 for router in routers)
    return {router.layer_number: router.expert_bias.tolist() for router in routers}


def trained(
    overrides: Sequence[str], steps: Sequence[int] = range(STEPS), load: str = "", save_to: str = ""
) -> dict[str, Any]:
    with scenarios.running(overrides) as engine:
        if load:
            engine_state.load(engine, Path(load))
        results = scenarios.train_steps(engine, steps)
        if save_to:
            Path(save_to).mkdir(exist_ok=True)
            scenarios.save(engine, Path(save_to), {"iteration": steps[-1] + 1})
        return {
            "biases": biases(engine),
            "chosen": [np.asarray(result.experts.chosen) for result in results if result.experts],
            "real": [result.num_real_tokens for result in results],
            "loss": [result.objective / result.num_tokens for result in results],
            "grad_norm": [result.grad_norm for result in results],
        }


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> dict[str, Any]:
    (found,) = ranks(1).run(trained, SIGMOID + AUX)
    return found


def test_the_bias_moves_against_the_load(reference: dict[str, Any]) -> None:
    """Recomputed by hand in fp32 from the counts of the log: a bias rises if its expert has fewer real tokens than the
    mean."""
    expected = np.zeros((3, NUM_EXPERTS), dtype=np.float32)  # layers 2 to 4
    for chosen, real in zip(reference["chosen"], reference["real"], strict=True):
        assert chosen.sum(axis=1).tolist() == [TOP_K * real] * 3
        for layer, expert in np.ndindex(*chosen.shape):
            mean = TOP_K * real / NUM_EXPERTS
            step = np.float32(RATE) if chosen[layer, expert] < mean else -np.float32(RATE)
            expected[layer, expert] += step if chosen[layer, expert] != mean else 0
    assert reference["biases"] == {n + 2: row.tolist() for n, row in enumerate(expected)}
    assert len(np.unique(expected)) > 2  # otherwise the three steps could all be equal


LAYOUTS = {
    "dp": (2, []),
    "tp cp ep": (4, [*SP, *CP, *EP]),
    "virtual": (2, ["parallel.pp=2", "parallel.virtual_stages=2", "train.recompute=full"]),
    "dynamic cp": (2, ["parallel.cp=2", "parallel.dynamic_cp=true", "parallel.ep=2", *SLOW_CP]),
    "bf16": (2, ["parallel.distributed_optimizer=true", "run.precision=bf16", "parallel.ep=2"]),
}


@pytest.mark.parametrize("layout", ["dp", "tp cp ep", "dynamic cp", pytest.param("virtual", marks=pytest.mark.grid)])
def test_the_bias_is_the_same_bit_for_bit_on_every_layout(ranks: Ranks, reference: dict[str, Any], layout: str) -> None:
    world_size, overrides = LAYOUTS[layout]
    results = ranks(world_size).run(trained, SIGMOID + AUX + overrides)
    assert {layer: bias for result in results for layer, bias in result["biases"].items()} == reference["biases"]
    for result in results:
        assert all(bias == reference["biases"][layer] for layer, bias in result["biases"].items())
        np.testing.assert_allclose(result["loss"], reference["loss"], rtol=LOSS_TOLERANCE)
        np.testing.assert_allclose(result["grad_norm"][:1], reference["grad_norm"][:1], rtol=NORM_TOLERANCE)


def test_a_checkpoint_holds_the_bias(ranks: Ranks, reference: dict[str, Any], tmp_path: Path) -> None:
    """Two steps on one layout and the third on another, with another optimizer, give the bias of three steps on one
    layout."""
    ranks(2).run(trained, SIGMOID + AUX + CP, range(2), "", str(tmp_path))
    for result in ranks(2).run(trained, SIGMOID + AUX + SHARDED + PP, [2], str(tmp_path)):
        assert all(bias == reference["biases"][layer] for layer, bias in result["biases"].items())
        np.testing.assert_allclose(result["loss"], reference["loss"][2:], rtol=LOSS_TOLERANCE)


def test_in_half_precision_the_bias_stays_in_fp32(ranks: Ranks, tmp_path: Path) -> None:
    """bf16 cannot represent 0.03.  A checkpoint that is saved and loaded keeps the value."""
    world_size, overrides = LAYOUTS["bf16"]
    saved = ranks(world_size).run(trained, SIGMOID + overrides, range(STEPS), "", str(tmp_path))
    loaded = ranks(1).run(trained, [*SIGMOID, "run.precision=bf16"], [], str(tmp_path))
    assert loaded[0]["biases"] == saved[0]["biases"] == saved[1]["biases"]
    numbers = torch.tensor(list(saved[0]["biases"].values()))
    assert not torch.equal(numbers.bfloat16().float(), numbers)


def test_with_a_rate_of_0_the_bias_stays(ranks: Ranks) -> None:
    (found,) = ranks(1).run(trained, [*SIGMOID, "model.moe.bias_update_rate=0"], [0])
    assert found["biases"] == {layer: [0.0] * NUM_EXPERTS for layer in (2, 3, 4)}


def balanced(overrides: Sequence[str]) -> dict[str, Any]:
    """One step, and the inputs of each router in this step."""
    with scenarios.running(overrides) as engine:
        given: list[Any] = []
        for module in engine.chunks[0].modules():
            if isinstance(module, Router):
                module.register_forward_hook(
                    lambda m, args, made: given.append(
                        (m.layer_number, m.weight.detach().double(), args[0][:, 0].detach().double(), args[1].numbers)
                    )
                )
        (result,) = scenarios.train_steps(engine, [0])
        assert result.experts is not None
        return {"given": given, "aux": result.experts.aux, "real": result.num_real_tokens}


def test_the_balancing_loss_of_sigmoid_scores(ranks: Ranks) -> None:
    """Computed token by token in float64: E * sum over experts of (share of choices x mean score), without shared
    experts."""
    (found,) = ranks(1).run(balanced, SIGMOID + AUX)
    sums = np.zeros(3)
    for layer, weight, inputs, documents in found["given"]:
        scores = (1 / (1 + torch.exp(-inputs @ weight.T))).numpy()
        for document in range(int(documents.max()) + 1):
            rows = scores[(documents == document).numpy()]
            share = np.zeros(NUM_EXPERTS)
            for row in rows:
                share[np.argsort(-row)[:TOP_K]] += 1 / (TOP_K * len(rows))
            probability = np.mean([row / row.sum() for row in rows], axis=0) if len(rows) else share
            sums[layer - 2] += len(rows) * NUM_EXPERTS * float(share @ probability)
    np.testing.assert_allclose(found["aux"], sums / found["real"], rtol=BALANCE_TOLERANCE)


def unsupervised(overrides: Sequence[str]) -> dict[int, list[float]]:
    with scenarios.running(overrides) as engine:
        microbatches = scenarios.loader_of(engine).microbatches(0)
        batch = [replace(mb, loss_weights=torch.zeros_like(mb.loss_weights)) for mb in microbatches]
        assert engine.train_step(batch).skipped
        return biases(engine)


def test_a_skipped_step_leaves_the_bias(ranks: Ranks) -> None:
    (found,) = ranks(1).run(unsupervised, SIGMOID)
    assert not any(any(bias) for bias in found.values())
