"""A model computes the same as transformers with the same files, on every layout: token losses and gradients.

transformers makes and saves the models, and computes the expected losses and gradients.  On every layout, two steps of
training also have the losses and gradient norms of one process, and a document does not change its neighbours.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from sft.batch import Sample
from tests.builders import answer
from tests.cards import Measured
from tests.ranks import scenarios
from tests.ranks.hf_cases import CASES, pairs
from tests.ranks.hf_comparison import LAYOUTS, Expected, Models, check_gradients, layout_of, saved_once
from tests.ranks.hf_models import (
    GRADIENT_TOLERANCE,
    TOKEN_LOSS_TOLERANCE,
    check_token_losses,
    computed,
    expected_losses,
    load,
    packs_of,
)
from tests.ranks.layouts import LOSS_TOLERANCE, NORM_TOLERANCE
from tests.ranks.pool import Ranks

TRAINED = packs_of()
TOGETHER = TRAINED[1]
PACKS = [*TRAINED, TOGETHER[1:2]]  # with `OTHER` an even number, as virtual stages need
LENGTHS = [len(sample.tokens) for sample in TOGETHER]
OTHER = [TOGETHER[0], answer(LENGTHS[1], LENGTHS[1], seed=4, last=scenarios.VOCAB), TOGETHER[2]]
MIDDLE = slice(96, 160)  # the documents of this pack have 90, 64 and 5 tokens
# Of gradient norms with linear attention, whose gradients differ from those in float64 by up to 1e-5; measured 1.2e-5.
LINEAR_TOLERANCE = 2e-5
On = Callable[[str, str], list[Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return saved_once(tmp_path_factory, {name: case.model for name, case in CASES.items()})


@pytest.fixture(scope="module")
def on(ranks: Ranks, models: Models) -> On:
    """What every rank computes, by the names of a model and a layout."""

    @cache
    def get(name: str, layout: str) -> list[Any]:
        model, (world_size, overrides) = models(name), layout_of(layout)
        recipe = [*model.recipe, *overrides]
        return ranks(world_size).run(computed, recipe, str(model.source), [*PACKS, OTHER], TRAINED)

    return get


@pytest.fixture(scope="module")
def losses(models: Models) -> Callable[[str], list[list[torch.Tensor]]]:
    return cache(lambda name: expected_losses(models(name).exact, PACKS))


@pytest.fixture(scope="module")
def gradients(models: Models) -> Callable[[str], Expected]:
    return cache(lambda name: Expected.of(models(name), [sample for pack in TRAINED for sample in pack]))


@pytest.mark.card("token losses")
@pytest.mark.parametrize("name,layout", pairs())
def test_every_token_has_the_loss_that_transformers_gives_it(
    on: On, losses: Callable[[str], list[list[torch.Tensor]]], measured: Measured, name: str, layout: str
) -> None:
    worst = check_token_losses([result["losses"] for result in on(name, layout)], losses(name), PACKS)
    measured(worst, TOKEN_LOSS_TOLERANCE)


@pytest.mark.card("gradients")
@pytest.mark.parametrize("name,layout", pairs())
def test_loss_and_every_gradient_are_those_of_transformers(
    on: On, models: Models, gradients: Callable[[str], Expected], measured: Measured, name: str, layout: str
) -> None:
    measured(check_gradients(on(name, layout), models(name), gradients(name)), GRADIENT_TOLERANCE)


@pytest.mark.card("isolation")
@pytest.mark.parametrize("name,layout", pairs())
def test_a_document_does_not_change_its_neighbours(on: On, name: str, layout: str) -> None:
    """Bitwise, if the second of three documents is replaced."""
    results = [result["losses"] for result in on(name, layout)]
    before, after = (scenarios.in_pack_order(results, pack, 192) for pack in (1, len(PACKS)))
    assert (before[: MIDDLE.start] == after[: MIDDLE.start]).all()
    assert (before[MIDDLE.stop :] == after[MIDDLE.stop :]).all()
    assert (before[MIDDLE] != after[MIDDLE]).mean() > 0.9  # so the test would see a leak


@pytest.mark.card("layouts")
@pytest.mark.parametrize("name,layout", [pair for pair in pairs() if pair.values[1] != "one"])
def test_every_layout_has_the_curve_of_one_process(
    on: On, models: Models, measured: Measured, name: str, layout: str
) -> None:
    is_linear = any(key.startswith("model.linear_attention.layers=[") for key in models(name).recipe)
    ((first, second),) = (result["curve"] for result in on(name, "one"))
    assert abs(first[0] - second[0]) > 1e-2, "a step that changes no loss shows nothing"
    for result in on(name, layout):
        loss, norm = zip(*result["curve"])
        np.testing.assert_allclose(loss, (first[0], second[0]), rtol=LOSS_TOLERANCE)
        np.testing.assert_allclose(norm, (first[1], second[1]), rtol=LINEAR_TOLERANCE if is_linear else NORM_TOLERANCE)
        measured(max(abs(ours / one - 1) for ours, one in zip(loss, (first[0], second[0]))), LOSS_TOLERANCE)


def statistics(overrides: list[str], folder: str, sample: Sample) -> Any:
    """The log-sum-exp and entropy of each token of one document; needs pp 1."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        microbatch = scenarios.microbatch_of(engine, [sample])
        everywhere = replace(microbatch, loss_weights=torch.ones_like(microbatch.loss_weights))
        ((_, rows),) = engine.measure([everywhere], forward_only=True)
        assert rows.lse is not None and rows.entropy is not None
        return rows.lse.numpy(), rows.entropy.numpy()


@pytest.mark.parametrize("impl", ["fused", "chunked", "full"])
def test_entropy_and_z_loss_are_those_of_the_divided_logits(ranks: Ranks, models: Models, impl: str) -> None:
    model, (sample,) = models("granite"), PACKS[2]
    world_size, layout = LAYOUTS["tp"]
    loss = [f"loss.impl={impl}", "loss.chunk_size=null", "loss.entropy=true", "loss.z_loss_coef=1e-3"]
    with torch.no_grad():
        logits = model.model(input_ids=torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0]
    logprobs = logits.log_softmax(-1)
    expected = logits.logsumexp(-1), -(logprobs.exp() * logprobs).sum(-1)
    for found in ranks(world_size).run(statistics, [*model.recipe, *layout, *loss], str(model.source), sample):
        for ours, theirs in zip(found, expected):
            np.testing.assert_allclose(ours[: len(sample.tokens)], theirs.numpy(), rtol=0, atol=TOKEN_LOSS_TOLERANCE)
