"""One curve, every layout: the same recipe and checkpoint give the same numbers however the work is divided."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.ranks import scenarios
from tests.ranks.layouts import ALL_ON, GRADIENT_TOLERANCE, LOSS_TOLERANCE, NORM_TOLERANCE, THREE, sizes
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def shared(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """A checkpoint of random weights, and the curve of one process from there."""
    folder = tmp_path_factory.mktemp("shared")
    ranks(1).run(scenarios.write_checkpoint, [], str(folder))
    (reference,) = ranks(1).run(scenarios.curve, [], str(folder))
    return str(folder), reference


@pytest.fixture(scope="module")
def three(ranks: Ranks) -> dict:
    (reference,) = ranks(1).run(scenarios.curve, THREE)
    return reference


def check(results: list[dict], reference: dict) -> None:
    for result in results:
        np.testing.assert_allclose(result["loss"], reference["loss"], rtol=LOSS_TOLERANCE)
        np.testing.assert_allclose(result["grad_norm"], reference["grad_norm"], rtol=NORM_TOLERANCE)
        assert result["counts"] == reference["counts"]
        assert result["learning_rate"] == reference["learning_rate"]
        assert result["parameters"] == reference["parameters"]


def test_the_reference_learns(shared: tuple[str, dict]) -> None:
    _, reference = shared
    # Peak after one step of warm-up, then linearly down to 0 at the last of five.
    np.testing.assert_allclose(reference["learning_rate"], [1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0], atol=1e-12)
    assert 5.6 < reference["loss"][0] < 5.8  # ln 301 = 5.71: nothing is known yet
    assert len(set(reference["loss"])) == scenarios.NUM_STEPS
    samples = scenarios.SkewedCorpus(scenarios.LENGTHS)
    # 384 rows of the padded vocabulary in and out; attention 32 x (32 + 2 x 16) + 32 x 32 with its biases and two
    # head norms; MLP 3 x 32 x 64; two norms a layer, one at the end.
    layer = 32 * 64 + 64 + 2 * 4 + 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert reference["parameters"] == 2 * 384 * 32 + 4 * layer + 32
    supervised = sum(samples.sample(i).num_supervised for i in range(len(samples)))
    assert sum(count[0] for count in reference["counts"]) == supervised
    assert sum(count[1] for count in reference["counts"]) == sum(scenarios.LENGTHS)


@pytest.mark.parametrize(
    "world_size,overrides",
    [(1, ["loss.chunk_size=null"]), (4, ["parallel.cp=4", "data.pad_to_seq_length=true"])],
    ids=["one chunk", "filled up"],
)
def test_what_the_covering_set_does_not_have(
    ranks: Ranks, shared: tuple[str, dict], world_size: int, overrides: list[str]
) -> None:
    folder, reference = shared
    check(ranks(world_size).run(scenarios.curve, overrides, folder), reference)


@pytest.mark.parametrize("dimension", ["tp", "cp", "pp", "dp"])
def test_three_ranks_give_the_same_curve_from_random_weights(ranks: Ranks, three: dict, dimension: str) -> None:
    """Initial weights are a function of seed and name, so that no checkpoint is needed to compare layouts."""
    check(ranks(3).run(scenarios.curve, THREE + sizes([dimension], 3) + ALL_ON), three)


def widths(overrides: list[str]) -> dict[str, float]:
    """Standard deviation of every matrix of new weights, by the last two parts of its name."""
    with scenarios.running(overrides) as engine:
        named = [(n, p) for n, p in engine.chunks[0].named_parameters() if p.dim() > 1]
        return {".".join(name.split(".")[-2:]): float(param.std()) for name, param in named}


def test_random_weights_are_as_wide_as_they_are_said_to_be(ranks: Ranks) -> None:
    """init_std; what writes to the residual stream, which sums 2 x 4 of them, less by sqrt(8)."""
    (found,) = ranks(1).run(widths, ["model.init_std=0.1"])
    assert len(found) == 6
    for name, width in found.items():
        residual = name in ("linear_proj.weight", "linear_fc2.weight")
        assert width == pytest.approx(0.1 / 8**0.5 if residual else 0.1, rel=0.1), name


def test_random_weights_do_not_depend_on_the_layout(ranks: Ranks, shared: tuple[str, dict]) -> None:
    _, reference = shared
    check(ranks(4).run(scenarios.curve, sizes(["pp", "tp"])), reference)


@pytest.mark.parametrize("cp_size", [2, 4])
def test_gradients_equal_those_of_documents_run_alone(ranks: Ranks, cp_size: int) -> None:
    """Packed, padded and split over cp, against one process that sees every document alone and unpadded."""
    packs = [[0, 1], [4, 5, 6, 2], [7], [3, 8, 9]]
    alone = [[i] for pack in packs for i in pack]
    (reference,) = ranks(1).run(scenarios.gradients, ["train.global_batch_size=10"], alone, 1)
    for result in ranks(cp_size).run(scenarios.gradients, [f"parallel.cp={cp_size}"], packs):
        assert result["num_tokens"] == reference["num_tokens"]
        assert result["loss"] == pytest.approx(reference["loss"], rel=LOSS_TOLERANCE)
        for name, expected in reference["gradients"].items():
            difference = np.linalg.norm(result["gradients"][name] - expected)
            assert difference <= GRADIENT_TOLERANCE * np.linalg.norm(expected), name


def test_the_curve_is_repeatable_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    first = ranks(2).run(scenarios.curve, ["parallel.cp=2"])
    second = ranks(2).run(scenarios.curve, ["parallel.cp=2"])
    assert [(r["loss"], r["grad_norm"], r["hash"]) for r in first] == [
        (r["loss"], r["grad_norm"], r["hash"]) for r in second
    ]
