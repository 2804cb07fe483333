"""One curve on every layout: the same recipe and checkpoint give the same numbers, however ranks divide the work."""

from typing import Any

import numpy as np
import pytest

from tests.ranks import scenarios
from tests.ranks.layouts import GRADIENT_TOLERANCE, LOSS_TOLERANCE, NORM_TOLERANCE
from tests.ranks.pool import Ranks


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> dict[str, Any]:
    """Five steps of one process."""
    (found,) = ranks(1).run(scenarios.train, [], range(5))
    return found


def check(results: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    """Checks that the first two steps equal the reference."""
    for result in results:
        np.testing.assert_allclose(result["loss"], reference["loss"][:2], rtol=LOSS_TOLERANCE)
        np.testing.assert_allclose(result["grad_norm"], reference["grad_norm"][:2], rtol=NORM_TOLERANCE)
        assert result["counts"] == reference["counts"][:2]
        assert result["num_parameters"] == reference["num_parameters"]


def test_the_reference_learns(reference: dict[str, Any]) -> None:
    # The rate peaks after one step of warm-up, and decays linearly to 0 at the last of five steps.
    np.testing.assert_allclose(reference["learning_rate"], [1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0], atol=1e-12)
    assert 5.6 < reference["loss"][0] < 5.8  # ln 301 = 5.71: the loss of uniform predictions
    assert len(set(reference["loss"])) == 5
    samples = scenarios.SkewedCorpus(scenarios.LENGTHS)
    # The padded vocabulary has 384 rows in the embedding and in the output; attention 32 x (32 + 2 x 16) + 32 x 32 with
    # its biases and two head norms; MLP 3 x 32 x 64; two norms in each layer, one at the end.
    layer = 32 * 64 + 64 + 2 * 4 + 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert reference["num_parameters"] == 2 * 384 * 32 + 4 * layer + 32
    supervised = sum(samples.sample(i).num_supervised for i in range(len(samples)))
    assert sum(count[0] for count in reference["counts"]) == supervised
    assert sum(count[1] for count in reference["counts"]) == sum(scenarios.LENGTHS)


@pytest.mark.parametrize(
    "world_size,overrides",
    [(1, ["loss.chunk_size=null"]), (2, ["parallel.cp=2", "data.pad_to_seq_length=true"])],
    ids=["one chunk", "filled up"],
)
def test_what_the_covering_set_does_not_have(
    ranks: Ranks, reference: dict[str, Any], world_size: int, overrides: list[str]
) -> None:
    check(ranks(world_size).run(scenarios.train, overrides, [0, 1]), reference)


def widths(overrides: list[str]) -> dict[str, float]:
    """The standard deviation of every new matrix, by the last two parts of its name."""
    with scenarios.running(overrides) as engine:
        named = [(n, p) for n, p in engine.chunks[0].named_parameters() if p.dim() > 1]
        return {".".join(name.split(".")[-2:]): float(param.std()) for name, param in named}


def test_random_weights_are_as_wide_as_they_are_said_to_be(ranks: Ranks) -> None:
    """It is init_std; for matrices that write to the residual stream, which sums 2 x 4 of them, init_std / sqrt(8)."""
    (found,) = ranks(1).run(widths, ["model.init_std=0.1"])
    assert len(found) == 6
    for name, width in found.items():
        residual = name in ("linear_proj.weight", "linear_fc2.weight")
        assert width == pytest.approx(0.1 / 8**0.5 if residual else 0.1, rel=0.1), name


@pytest.mark.parametrize("cp_size", [2, 4])
def test_gradients_equal_those_of_documents_run_alone(ranks: Ranks, cp_size: int) -> None:
    """Compares packs, padded and split over cp, with one process that computes every document alone and unpadded."""
    packs = [[0, 1], [4, 5, 6, 2], [7], [3, 8, 9]]
    alone = [[i] for pack in packs for i in pack]
    (reference,) = ranks(1).run(scenarios.gradients, ["train.global_batch_size=10"], alone, 1)
    for result in ranks(cp_size).run(scenarios.gradients, [f"parallel.cp={cp_size}"], packs):
        assert result["num_tokens"] == reference["num_tokens"]
        assert result["loss"] == pytest.approx(reference["loss"], rel=LOSS_TOLERANCE)
        scenarios.check_parameters(result["gradients"], reference["gradients"], GRADIENT_TOLERANCE)
