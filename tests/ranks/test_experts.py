"""A mixture of experts is the same model on every layout, and its balancing losses are those of the documentation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sft.mcore.experts.router import Router, begin
from tests.ranks import scenarios
from tests.ranks.layouts import (
    ALL_ON,
    AUX,
    CP,
    EP,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    MOE,
    NORM_TOLERANCE,
    NUM_EXPERTS,
    PP,
    SP,
    TOP_K,
)
from tests.ranks.pool import Ranks

BALANCE_TOLERANCE = 1e-5  # for balancing losses, which routers compute in fp32


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> dict[str, Any]:
    """Two steps of one process: the reference."""
    (found,) = ranks(1).run(scenarios.train, MOE + AUX, [0, 1])
    return found


# Layouts with three settings that must occur together; a covering set of pairs need not contain them.
LAYOUTS = [
    (2, [*CP, *EP, *ALL_ON]),
    (2, SP),  # both ranks hold all experts whole: their tokens differ, and so do the gradients
    (4, [*PP, *SP, *EP, "train.recompute=selective"]),
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
    """In every layer, every real token has top_k choices; padding inside and after documents would add hundreds."""
    for load, (_, num_real_tokens, _, _) in zip(reference["experts"], reference["counts"], strict=True):
        assert load.chosen.sum(axis=1).tolist() == [TOP_K * num_real_tokens] * 4


def routed(overrides: Sequence[str], packs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Runs a step over `packs`.  Returns gradients, and the inputs and results of each router."""
    with scenarios.running(overrides) as engine:
        corpus = scenarios.SkewedCorpus(scenarios.LENGTHS)
        given: list[Any] = []
        for chunk in engine.chunks:
            for name, module in chunk.named_modules():
                if isinstance(module, Router):
                    module.register_forward_hook(
                        lambda m, a, made, name=name: given.append((name, m.weight, *a, *made))
                    )
        batch = [scenarios.microbatch_of(engine, [corpus.sample(i) for i in ids]) for ids in packs]
        totals, gradients = scenarios.backward(engine, batch)
        seen = engine._expert_load()
        assert seen is not None
        return {
            "gradients": gradients,
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


def definition(name: str, routers: list[Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sums over real tokens of "aux" or "z" for each router, in float64.  weights: the weights of each router"""
    sums = dict.fromkeys(weights, torch.zeros((), dtype=torch.float64))
    for router, _, inputs, documents in routers:
        logits = torch.from_numpy(inputs) @ weights[router].T
        for document in sorted({int(d) for d in documents if d >= 0}):
            rows = logits[torch.from_numpy(documents == document)]
            if name == "z":
                sums[router] = sums[router] + rows.exp().sum(1).log().square().sum()
                continue
            picked = torch.zeros_like(rows).scatter(1, rows.topk(TOP_K).indices, 1.0)
            share = picked.sum(0) / picked.sum()
            sums[router] = sums[router] + len(rows) * NUM_EXPERTS * (share * rows.softmax(1).mean(0)).sum()
    return sums


def weights_of(routers: list[Any]) -> dict[str, Tensor]:
    return {router: torch.from_numpy(matrix) for router, matrix, _, _ in routers}


PACKS = [[1, 2, 3, 5], [0], [11, 10, 6]]  # packs with several documents, with one, and all with padding


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_balancing_losses_are_those_of_the_definition(ranks: Ranks, precision: str) -> None:
    """Also in bf16, for the inputs that a router gets: the router computes in fp32."""
    recipe = [*MOE, *AUX, "train.global_batch_size=3", f"run.precision={precision}"]
    (found,) = ranks(1).run(routed, recipe, PACKS)
    for name in ("aux", "z"):
        sums = definition(name, found["routers"], weights_of(found["routers"]))
        assert len(sums) == 4
        np.testing.assert_allclose(found[name], [s / found["real"] for s in sums.values()], rtol=BALANCE_TOLERANCE)


@pytest.mark.parametrize(
    "name,coefficient,weighting",
    [("aux", 0.1, []), ("z", 0.01, []), ("z", 0.01, ["loss.reduction=sample", "loss.denominator=weights"])],
)
def test_their_gradient_is_that_of_the_definition(
    ranks: Ranks, name: str, coefficient: float, weighting: list[str]
) -> None:
    """Tests the router of the last layer: in backward, only its own balancing loss reaches it besides the
    language-model loss. The balancing loss is a mean over real tokens, although only a quarter of them is supervised,
    and does not depend on their weights."""
    recipe = [*MOE, "train.global_batch_size=3", *weighting]
    (without,) = ranks(1).run(routed, recipe, PACKS)
    (found,) = ranks(1).run(routed, [*recipe, f"model.moe.{name}_loss_coef={coefficient}"], PACKS)
    router = "module.decoder.layers.3.mlp.router"
    key, weights = f"{router}.weight", weights_of(found["routers"])
    added = found["gradients"][key] - without["gradients"][key]
    weights[router].requires_grad_()
    (coefficient * definition(name, found["routers"], weights)[router] / found["real"]).backward()
    expected = weights[router].grad.numpy()
    assert np.linalg.norm(expected) > 1e-3
    # The other part of the gradient, computed in fp32, is subtracted.
    scale = np.linalg.norm(found["gradients"][key])
    assert np.linalg.norm(added - expected) < GRADIENT_TOLERANCE * scale


def test_without_room_choices_are_dropped_and_counted(ranks: Ranks, reference: dict[str, Any]) -> None:
    """The capacity is half of the even share, so at least half of all choices are dropped."""
    tight = [*MOE, "model.moe.capacity_factor=0.5", "data.pad_to_seq_length=false"]
    for world_size, overrides in ((1, []), (2, EP)):
        for found in ranks(world_size).run(scenarios.train, tight + overrides, [0]):
            (load,) = found["experts"]
            share = load.dropped / load.chosen.sum(axis=1)
            # An expert takes t * top_k / experts / 2 tokens of a pack of t tokens; padding is a few percent of t.
            assert ((share > 0.35) & (share < 0.75)).all()
            assert np.isfinite(found["grad_norm"]).all()
    (roomy,) = ranks(1).run(scenarios.train, [*MOE, *AUX, "model.moe.capacity_factor=100"], [0])
    np.testing.assert_allclose(roomy["loss"], reference["loss"][:1], rtol=LOSS_TOLERANCE)
    assert not roomy["experts"][0].dropped.any()


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_an_expert_takes_the_real_tokens_that_weigh_most(ranks: Ranks, factor: float) -> None:
    """An expert takes factor * tokens * top_k / experts tokens of a pack.  Padding tokens go to no expert, and take no
    capacity."""
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
    """Selective recomputation computes the experts again, but routes and sends tokens only once."""
    (found,) = ranks(1).run(routed, [*MOE, "train.global_batch_size=1", f"train.recompute={recompute}"], [[1]])
    assert len(found["routers"]) == 4 * times


def test_evaluation_counts_nothing(ranks: Ranks) -> None:
    (seen,) = ranks(1).run(evaluated, MOE + AUX)
    assert seen == [0.0, 0.0]


def evaluated(overrides: Sequence[str]) -> list[float]:
    with scenarios.running(overrides) as engine:
        begin(engine.chunks, loss_scale=1.0)
        engine.evaluate(scenarios.loader_of(engine).microbatches(0))
        seen = engine._expert_load()
        assert seen is not None
        return [float(seen.chosen.sum()), float(seen.z.sum())]


def test_padding_goes_to_all_experts_in_turn(ranks: Ranks) -> None:
    """Samples of 37, 5 and 2 tokens are in documents of 64, 32 and 32 tokens: 84 of 128 tokens are padding, with 2
    choices each."""
    recipe = [*MOE, "train.global_batch_size=1"]
    (dropless,) = ranks(1).run(routed, recipe, [[1, 3, 6]])
    (capped,) = ranks(1).run(routed, [*recipe, "model.moe.capacity_factor=100"], [[1, 3, 6]])
    for found in (dropless, capped):
        assert len(found["routers"]) == 4
        for (_, _, _, documents), (weights, sent) in zip(found["routers"], found["made"]):
            padding = sent[documents < 0].sum(0)  # padding tokens sent to each expert
            assert sent[documents >= 0].sum() == TOP_K * (37 + 5 + 2)
            assert padding.sum() == (TOP_K * 84 if found is dropless else 0)
            assert padding.max() - padding.min() <= 6  # in each document, the turns may begin at any expert
            assert not weights[documents < 0].any()
