"""A mixture of experts is the same model on every layout, and its balancing losses are what they are said to be."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from sft.mcore.experts.router import Router, begin
from sft.mcore.model.chunks import sharded_tensors
from tests.ranks import scenarios
from tests.ranks.layouts import ALL_ON, AUX, GRADIENT_TOLERANCE, LOSS_TOLERANCE, MOE, NORM_TOLERANCE, NUM_EXPERTS, TOP_K
from tests.ranks.pool import Ranks

SP = ["parallel.sequence_parallel=true"]
EP = ["parallel.ep=2"]
BALANCE_TOLERANCE = 1e-5  # of the balancing losses, which routers compute in fp32


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> dict[str, Any]:
    """Two steps of one process."""
    (found,) = ranks(1).run(scenarios.train, MOE + AUX, [0, 1])
    return found


# Three settings together, which a covering set of pairs need not have.
LAYOUTS = [
    (2, ["parallel.cp=2", *EP, *ALL_ON]),
    (2, ["parallel.tp=2", *SP]),  # experts whole on both: their tokens differ, and so do their gradients
    (4, ["parallel.pp=2", "parallel.tp=2", *SP, *EP, "train.recompute=selective"]),
]


@pytest.mark.parametrize("world_size,overrides", LAYOUTS)
def test_one_curve(ranks: Ranks, reference: dict[str, Any], world_size: int, overrides: list[str]) -> None:
    for found in ranks(world_size).run(scenarios.train, MOE + AUX + overrides, [0, 1]):
        assert found["counts"] == reference["counts"]
        np.testing.assert_allclose(found["loss"], reference["loss"], rtol=LOSS_TOLERANCE)
        np.testing.assert_allclose(found["grad_norm"], reference["grad_norm"], rtol=NORM_TOLERANCE)
        for load, expected in zip(found["experts"], reference["experts"], strict=True):
            np.testing.assert_array_equal(load.chosen, expected.chosen)
            np.testing.assert_allclose(load.aux, expected.aux, rtol=BALANCE_TOLERANCE)
            np.testing.assert_allclose(load.z, expected.z, rtol=BALANCE_TOLERANCE)
            assert not load.dropped.any()


def test_real_tokens_are_counted_once_and_no_padding(reference: dict[str, Any]) -> None:
    """Every layer has top_k choices of every real token; alignment and filler would add hundreds."""
    for load, (_, num_real_tokens, _, _) in zip(reference["experts"], reference["counts"], strict=True):
        assert load.chosen.sum(axis=1).tolist() == [TOP_K * num_real_tokens] * 4


def routed(overrides: Sequence[str], packs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Gradients of a step over `packs`, with what each router was given and made of it."""
    with scenarios.running(overrides) as engine:
        corpus = scenarios.SkewedCorpus(scenarios.LENGTHS)
        given: list[Any] = []
        for chunk in engine.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
            for name, module in chunk.named_modules():
                if isinstance(module, Router):
                    module.register_forward_hook(
                        lambda m, a, made, name=name: given.append((name, m.weight, *a, *made))
                    )
        batch = [scenarios.microbatch_of(engine, [corpus.sample(i) for i in ids]) for ids in packs]
        totals = engine._run(batch, forward_only=False)
        seen = engine._expert_load()
        assert seen is not None
        return {
            "gradients": {n: p.main_grad.clone().numpy() for c in engine.chunks for n, p in c.named_parameters()},
            "routers": [
                (n, w.detach().double().numpy(), x[:, 0].detach().double().numpy(), d.numbers.numpy())
                for n, w, x, d, _, _ in given
            ],
            "made": [(weights.detach().numpy(), sent.numpy()) for *_, weights, sent in given],
            "dropped": seen.dropped,
            "aux": seen.aux,
            "z": seen.z,
            "real": totals.num_real_tokens,
        }


def reference_losses(routers: list[Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Sums over real tokens by router, in float64 and token by token: aux, and z."""
    aux: dict[str, float] = {}
    z: dict[str, float] = {}
    for name, weight, inputs, documents in routers:
        logits = inputs @ weight.T
        for document in sorted({d for d in documents if d >= 0}):
            rows = logits[documents == document]
            odds = np.exp(rows - rows.max(axis=1, keepdims=True))
            probability = (odds / odds.sum(axis=1, keepdims=True)).mean(axis=0)
            share = np.zeros(NUM_EXPERTS)
            for row in rows:
                for expert in sorted(range(NUM_EXPERTS), key=lambda e: -row[e])[:TOP_K]:
                    share[expert] += 1 / (TOP_K * len(rows))
            aux[name] = aux.get(name, 0.0) + len(rows) * NUM_EXPERTS * float(share @ probability)
            z[name] = z.get(name, 0.0) + sum(float(np.log(np.exp(row).sum()) ** 2) for row in rows)
    return aux, z


PACKS = [[1, 2, 3, 5], [0], [11, 10, 6]]  # two or more documents, one, and padding in all


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_balancing_losses_are_those_of_the_definition(ranks: Ranks, precision: str) -> None:
    """In half precision too, of the numbers that a router is given: it computes in fp32."""
    recipe = [*MOE, *AUX, "train.global_batch_size=3", f"run.precision={precision}"]
    (found,) = ranks(1).run(routed, recipe, PACKS)
    aux, z = reference_losses(found["routers"])
    assert len(aux) == 4
    np.testing.assert_allclose(found["aux"], [s / found["real"] for s in aux.values()], rtol=BALANCE_TOLERANCE)
    np.testing.assert_allclose(found["z"], [s / found["real"] for s in z.values()], rtol=BALANCE_TOLERANCE)


@pytest.mark.parametrize(
    "name,coefficient,weighting",
    [
        ("aux_loss_coef", 0.1, []),
        ("z_loss_coef", 0.01, []),
        ("z_loss_coef", 0.01, ["loss.reduction=sample", "loss.denominator=weights"]),
    ],
)
def test_their_gradient_is_that_of_the_definition(
    ranks: Ranks, name: str, coefficient: float, weighting: list[str]
) -> None:
    """Of the last layer's router, which nothing but its own loss reaches on the way back: added to that of the
    language model, a mean over real tokens, though only a quarter of them is supervised, and whatever they weigh."""
    recipe = [*MOE, "train.global_batch_size=3", *weighting]
    (without,) = ranks(1).run(routed, recipe, PACKS)
    (found,) = ranks(1).run(routed, [*recipe, f"model.moe.{name}={coefficient}"], PACKS)
    key = "module.decoder.layers.3.mlp.router.weight"
    added = found["gradients"][key] - without["gradients"][key]
    weight = None
    total = torch.zeros((), dtype=torch.float64)
    for router, matrix, inputs, documents in found["routers"]:
        if "layers.3" not in router:
            continue
        weight = torch.tensor(matrix, requires_grad=True) if weight is None else weight
        logits = torch.from_numpy(inputs) @ weight.T
        for document in sorted({int(d) for d in documents if d >= 0}):
            rows = logits[torch.from_numpy(documents == document)]
            if name == "aux_loss_coef":
                picked = torch.zeros_like(rows).scatter(1, rows.topk(TOP_K).indices, 1.0)
                share = picked.sum(0) / picked.sum()
                total = total + len(rows) * NUM_EXPERTS * (share * rows.softmax(1).mean(0)).sum()
            else:
                total = total + rows.exp().sum(1).log().square().sum()
    assert weight is not None
    (coefficient * total / found["real"]).backward()
    expected = weight.grad.numpy()
    assert np.linalg.norm(expected) > 1e-3
    # The rest of the gradient, computed in fp32, is subtracted.
    scale = np.linalg.norm(found["gradients"][key])
    assert np.linalg.norm(added - expected) < GRADIENT_TOLERANCE * scale


def test_without_room_choices_are_dropped_and_counted(ranks: Ranks, reference: dict[str, Any]) -> None:
    """Half the even share: at least half of all choices find no room."""
    tight = [*MOE, "model.moe.capacity_factor=0.5", "data.pad_to_seq_length=false"]
    for world_size, overrides in ((1, []), (2, EP)):
        for found in ranks(world_size).run(scenarios.train, tight + overrides, [0]):
            (load,) = found["experts"]
            share = load.dropped / load.chosen.sum(axis=1)
            # Of a pack of t tokens an expert takes t * top_k / experts / 2; padding is a few percent of t.
            assert ((share > 0.35) & (share < 0.75)).all()
            assert np.isfinite(found["grad_norm"]).all()
    (roomy,) = ranks(1).run(scenarios.train, [*MOE, *AUX, "model.moe.capacity_factor=100"], [0])
    np.testing.assert_allclose(roomy["loss"], reference["loss"][:1], rtol=LOSS_TOLERANCE)
    assert not roomy["experts"][0].dropped.any()


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_an_expert_takes_the_real_tokens_that_weigh_most(ranks: Ranks, factor: float) -> None:
    """Of a pack, factor * tokens * top_k / experts.  Padding goes nowhere, and takes nobody's place."""
    recipe = [*MOE, "train.global_batch_size=3", f"model.moe.capacity_factor={factor}"]
    (found,) = ranks(1).run(routed, recipe, PACKS)
    dropped: dict[str, int] = {}
    for (name, matrix, inputs, documents), (weights, sent) in zip(found["routers"], found["made"]):
        logits, expected = inputs @ matrix.T, np.zeros(sent.shape)
        for token in np.flatnonzero(documents >= 0):
            best = np.argsort(-logits[token])[:TOP_K]
            odds = np.exp(logits[token, best])
            expected[token, best] = odds / odds.sum()
        room = int(np.ceil(factor * len(inputs) * TOP_K / NUM_EXPERTS))
        for expert in range(NUM_EXPERTS):
            late = np.argsort(-expected[:, expert])[room:]
            dropped[name] = dropped.get(name, 0) + np.count_nonzero(expected[late, expert])
            expected[late, expert] = 0.0
        np.testing.assert_array_equal(sent, expected > 0)
        np.testing.assert_allclose(weights, expected, atol=1e-5)
    assert found["dropped"].tolist() == list(dropped.values()) and min(dropped.values()) > 0


@pytest.mark.parametrize("recompute,times", [("none", 1), ("selective", 1), ("full", 2)])
def test_only_whole_recomputed_layers_route_again(ranks: Ranks, recompute: str, times: int) -> None:
    """Selective recomputation computes the experts again, but chooses them and sends tokens to them once."""
    (found,) = ranks(1).run(routed, [*MOE, "train.global_batch_size=1", f"train.recompute={recompute}"], [[1]])
    assert len(found["routers"]) == 4 * times


def test_evaluation_counts_nothing(ranks: Ranks) -> None:
    (seen,) = ranks(1).run(evaluated, MOE + AUX)
    assert seen == [0.0, 0.0]


def initial(overrides: Sequence[str]) -> dict[Any, float]:
    """The sum of every tensor of new experts and routers, by key and place among layers and experts."""
    with scenarios.running(overrides) as engine:
        found = [s for chunk in engine.chunks for s in sharded_tensors(chunk.module.sharded_state_dict())]
        return {(s.key, s.global_offset): float(s.data.double().sum()) for s in found if ".mlp." in s.key}


def test_new_experts_differ_and_are_the_same_on_every_layout(ranks: Ranks) -> None:
    (one,) = ranks(1).run(initial, MOE)
    assert len(one) == len(set(one.values())) == 4 + 4 * NUM_EXPERTS * 3  # routers; gate, up and down of each
    for overrides in (EP, ["parallel.pp=2"]):
        first, second = ranks(2).run(initial, [*MOE, *overrides])
        assert first | second == one and first != one


def evaluated(overrides: Sequence[str]) -> list[float]:
    with scenarios.running(overrides) as engine:
        loader = scenarios.loader_of(engine, scenarios.SkewedCorpus(scenarios.LENGTHS))
        begin(engine.chunks, loss_scale=1.0)
        engine.evaluate(loader.microbatches(0))
        seen = engine._expert_load()
        assert seen is not None
        return [float(seen.chosen.sum()), float(seen.z.sum())]


def sent(overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Of each router: how many real tokens and how much padding each expert was sent, and what padding weighs."""
    with scenarios.running(overrides) as engine:
        corpus = scenarios.SkewedCorpus(scenarios.LENGTHS)
        found: list[dict[str, Any]] = []
        for chunk in engine.chunks:
            for module in chunk.modules():
                if isinstance(module, Router):
                    module.register_forward_hook(
                        lambda m, given, made: found.append(
                            {
                                "real": made[1][given[1].numbers >= 0].sum(0).tolist(),
                                "padding": made[1][given[1].numbers < 0].sum(0).tolist(),
                                "weight": float(made[0][given[1].numbers < 0].abs().sum()),
                            }
                        )
                    )
        engine.evaluate([scenarios.microbatch_of(engine, [corpus.sample(i) for i in (1, 3, 6)])])
        return found


def test_padding_goes_to_all_experts_in_turn(ranks: Ranks) -> None:
    """Samples of 37, 5 and 2 tokens in documents of 64, 32 and 32: 84 of 128 are padding, 2 choices each."""
    (dropless,) = ranks(1).run(sent, [*MOE, "train.global_batch_size=1"])
    (capped,) = ranks(1).run(sent, [*MOE, "train.global_batch_size=1", "model.moe.capacity_factor=100"])
    assert len(dropless) == len(capped) == 4
    for layer in dropless:
        assert sum(layer["real"]) == TOP_K * (37 + 5 + 2)
        assert sum(layer["padding"]) == TOP_K * 84
        assert max(layer["padding"]) - min(layer["padding"]) <= 6  # a turn may begin anywhere in each document
        assert layer["weight"] == 0.0
    for layer in capped:
        assert sum(layer["real"]) == TOP_K * (37 + 5 + 2) and not any(layer["padding"])
