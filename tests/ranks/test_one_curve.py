"""One curve, every layout: the same recipe and checkpoint give the same numbers however the work is divided."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.ranks import scenarios
from tests.ranks.layouts import ALL_ON, GRADIENT_TOLERANCE, LOSS_TOLERANCE, NORM_TOLERANCE, THREE, sizes
from tests.ranks.pool import RankPool

TWO = [["tp"], ["cp"], ["pp"], ["dp"]]
FOUR = [["tp", "tp"], ["cp", "cp"], ["pp", "pp"], ["dp", "dp"], ["tp", "cp"], ["tp", "pp"], ["tp", "dp"]] + [
    ["cp", "pp"],
    ["cp", "dp"],
    ["pp", "dp"],
]
CHUNKED = ["loss.impl=chunked", "loss.chunk_size=24"]
MORE = [  # what the dimensions of layouts.py do not have
    (1, ["loss.chunk_size=null"]),
    (4, ["parallel.cp=4", "data.pad_to_seq_length=true"]),
]
GRID = [  # (ranks, overrides)
    *((2, sizes(d) + on) for d in TWO for on in ([], ALL_ON)),
    *((4, sizes(d) + on) for d in FOUR for on in ([], ALL_ON)),
    (1, ["train.recompute=selective"]),
    (1, ["loss.impl=full", "loss.chunk_size=null"]),
    (2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    (2, ["parallel.tp=2", "loss.impl=full", "loss.chunk_size=null", "parallel.sequence_parallel=true"]),
    (1, CHUNKED),
    (2, ["parallel.cp=2", *CHUNKED]),
    (2, ["parallel.tp=2", "parallel.sequence_parallel=true", *CHUNKED]),
    (4, ["parallel.pp=2", "parallel.tp=2", *CHUNKED]),
    (2, ["parallel.cp=2", "train.recompute=selective"]),
    (2, ["parallel.pp=2", "parallel.virtual_stages=2"]),
    (4, ["parallel.pp=2", "parallel.virtual_stages=2", "parallel.cp=2", *ALL_ON]),
    (4, ["parallel.tp=2", "parallel.cp=2", "loss.impl=full", "loss.chunk_size=null"]),
]
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
    [*MORE, *(pytest.param(*layout, marks=pytest.mark.grid) for layout in GRID)],
    ids=lambda v: " ".join(v) if isinstance(v, list) else str(v),
)
def test_every_layout_gives_the_same_curve(
    ranks: Ranks, shared: tuple[str, dict], world_size: int, overrides: list[str]
) -> None:
    folder, reference = shared
    check(ranks(world_size).run(scenarios.curve, overrides, folder), reference)


@pytest.mark.parametrize("dimension", ["tp", "cp", "pp", "dp"])
@pytest.mark.parametrize("on", [[], ALL_ON], ids=["plain", "all on"])
def test_three_ranks_give_the_same_curve_from_random_weights(
    ranks: Ranks, three: dict, dimension: str, on: list[str]
) -> None:
    """Initial weights are a function of seed and name, so that no checkpoint is needed to compare layouts."""
    check(ranks(3).run(scenarios.curve, THREE + sizes([dimension], 3) + on), three)


def test_random_weights_do_not_depend_on_the_layout(ranks: Ranks, shared: tuple[str, dict]) -> None:
    _, reference = shared
    check(ranks(4).run(scenarios.curve, sizes(["pp", "tp"])), reference)


@pytest.mark.parametrize("tie", ["true", "false"])
@pytest.mark.parametrize("overrides", [["pp"], ["tp"], ["cp"]], ids=str)
def test_tied_embeddings_on_layouts(ranks: Ranks, tie: str, overrides: list[str]) -> None:
    tied = [f"model.tie_embeddings={tie}"]
    (reference,) = ranks(1).run(scenarios.curve, tied)
    check(ranks(2).run(scenarios.curve, tied + sizes(overrides)), reference)


@pytest.mark.parametrize("overrides", [["pp", "cp"], ["tp", "dp"]], ids=str)
def test_bf16_layouts_stay_close(ranks: Ranks, overrides: list[str]) -> None:
    bf16 = ["run.precision=bf16", "parallel.distributed_optimizer=true"]
    (reference,) = ranks(1).run(scenarios.curve, bf16)
    for result in ranks(4).run(scenarios.curve, bf16 + sizes(overrides)):
        # bf16 keeps 8 bits: one rounding is 4e-3; a loss is a mean over some 1,400 tokens of such roundings.
        np.testing.assert_allclose(result["loss"], reference["loss"], rtol=2e-3)
        assert result["counts"] == reference["counts"]


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


@pytest.mark.parametrize("overrides", [["dp", "dp"], ["cp", "dp"], ["cp", "cp"], ["tp", "cp"], ["pp", "dp"]], ids=str)
def test_replicas_agree_after_training(ranks: Ranks, overrides: list[str]) -> None:
    """Ranks that differ in dp and cp only hold the same parameters, bit for bit."""
    for distributed in ("true", "false"):
        held: dict[tuple[int, int], set[str]] = {}
        more = [f"parallel.distributed_optimizer={distributed}", "parallel.sequence_parallel=true"]
        for result in ranks(4).run(scenarios.curve, sizes(overrides) + more):
            held.setdefault(result["place"][2:], set()).add(result["hash"])
        assert all(len(hashes) == 1 for hashes in held.values()), held


def test_the_curve_is_repeatable_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    first = ranks(2).run(scenarios.curve, ["parallel.cp=2"])
    second = ranks(2).run(scenarios.curve, ["parallel.cp=2"])
    assert [(r["loss"], r["grad_norm"], r["hash"]) for r in first] == [
        (r["loss"], r["grad_norm"], r["hash"]) for r in second
    ]
