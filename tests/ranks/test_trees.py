"""Trees of texts: losses, gradients and statistics are those of the same texts as separate samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sft.batch import Sample
from tests.builders import answer
from tests.ranks import scenarios
from tests.ranks.layouts import AUX, CP, LATENT, LINEAR, MODELS, MOE
from tests.ranks.pool import Ranks
from tests.tree_samples import nested

# fp32 on other shapes: sums over keys have another order.  Relative to the largest gradient of the model.
TOLERANCE = 1e-5


def samples(is_tree: bool) -> list[Sample]:
    """A tree between two plain samples, or its texts as separate samples."""
    before, after = answer(40, 10, seed=11, last=scenarios.VOCAB), answer(33, 33, seed=12, last=scenarios.VOCAB)
    tree, texts = nested(5, scenarios.VOCAB)
    return [before, tree, after] if is_tree else [before, *texts, after]


def passes(overrides: Sequence[str], is_tree: bool) -> dict[str, Any]:
    with scenarios.running(overrides) as engine:
        pack = scenarios.microbatch_of(engine, samples(is_tree))
        totals, gradients = scenarios.backward(engine, [pack])
        experts = engine._expert_load()
        return {
            "gradients": gradients,
            "loss": totals.objective,
            "denominator": totals.denominator,
            "nll": totals.nll,
            "tokens": totals.num_tokens,
            "experts": None if experts is None else [np.asarray(x) for x in (experts.chosen, experts.aux, experts.z)],
        }


CASES = {
    "full": [],
    "tokens": ["loss.denominator=tokens", "loss.reduction=sqrt"],
    "experts": [*MOE, *AUX],
    "gemma": MODELS["gemma"],
    "gpt_oss": MODELS["gpt_oss"],
    "latent": LATENT,
    "routers": MODELS["routers"],
    "linear": LINEAR,
    "linear_experts": MODELS["linear_experts"],
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_tree_has_the_losses_and_gradients_of_its_texts(ranks: Ranks, case: str, world_size: int) -> None:
    overrides = [*CASES[case], *(CP if world_size == 2 else [])]
    (whole,) = ranks(1).run(passes, CASES[case], False)
    found = ranks(world_size).run(passes, overrides, True)[0]
    assert found["tokens"] == whole["tokens"]
    assert found["denominator"] == pytest.approx(whole["denominator"], rel=1e-12)
    assert found["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert found["nll"] == pytest.approx(whole["nll"], rel=1e-6)
    largest = max(np.abs(gradient).max() for gradient in whole["gradients"].values())
    for name, gradient in whole["gradients"].items():
        assert np.abs(found["gradients"][name] - gradient).max() <= TOLERANCE * largest, name
    for mine, theirs in zip(found["experts"] or [], whole["experts"] or []):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
