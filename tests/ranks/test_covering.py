"""One curve with every pair of settings: a covering set of layouts, each against one plain rank."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.covering import Case, all_cases, covering_set
from tests.ranks import layouts, scenarios
from tests.ranks.pool import RankPool

# bf16 keeps 8 bits: one rounding is 4e-3, and a loss is a mean over some 1,400 tokens of such roundings; with experts
# a few tokens choose another one.
BF16_TOLERANCE = {"dense": 2e-3, "tied": 2e-3, "experts": 1e-2}

Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def reference(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[str, dict]]:
    """`reference("tied", "bf16")`: a checkpoint of random weights, and the curve of one plain rank from there."""
    made: dict[tuple[str, str], tuple[str, dict]] = {}

    def get(model: str, precision: str) -> tuple[str, dict]:
        if (model, precision) not in made:
            folder = str(tmp_path_factory.mktemp("weights"))
            ranks(1).run(scenarios.write_checkpoint, layouts.MODELS[model], folder)
            settings = [*layouts.MODELS[model], f"run.precision={precision}"]
            made[model, precision] = folder, ranks(1).run(scenarios.curve, settings, folder)[0]
        return made[model, precision]

    return get


GRID = [pytest.param(case, marks=pytest.mark.grid) for case in layouts.GRID if case not in layouts.COVERING]


@pytest.mark.parametrize("case", [*layouts.COVERING, *GRID], ids=layouts.name)
def test_one_curve(ranks: Ranks, reference: Callable[[str, str], tuple[str, dict]], case: Case) -> None:
    checkpoint, expected = reference(case["model"], case["precision"])
    held: dict[tuple[int, int], set[str]] = {}
    for found in ranks(layouts.world_size(case)).run(scenarios.curve, layouts.overrides(case), checkpoint):
        held.setdefault(found["place"][2:], set()).add(found["hash"])
        if case["precision"] == "fp32":
            np.testing.assert_allclose(found["loss"], expected["loss"], rtol=layouts.LOSS_TOLERANCE)
            np.testing.assert_allclose(found["grad_norm"], expected["grad_norm"], rtol=layouts.NORM_TOLERANCE)
        else:
            np.testing.assert_allclose(found["loss"], expected["loss"], rtol=BF16_TOLERANCE[case["model"]])
        assert found["counts"] == expected["counts"]
        assert found["learning_rate"] == expected["learning_rate"]
        if case["ep"] == 1:  # counted over tp and pp
            assert found["parameters"] == expected["parameters"]
    if case["ep"] == 1:  # ranks that differ in dp and cp only hold the same parameters, bit for bit
        assert all(len(hashes) == 1 for hashes in held.values()), held


def test_every_pair_of_values_meets() -> None:
    """Written out: what must meet in some case of the set, with settings that are easily forgotten."""
    for wanted in (
        {"tp": 2, "cp": 2},
        {"cp": 4, "recompute": "full"},
        {"virtual_stages": 2, "activation_offload": 1},
        {"ep": 2, "optimizer_offload": 1},
        {"loss": "full", "sequence_parallel": True},
        {"model": "tied", "pp": 4},
    ):
        assert any(wanted.items() <= case.items() for case in layouts.COVERING), wanted


def test_a_covering_set() -> None:
    """Three switches: 12 pairs in 4 of 8 cases; with a and b never both on, the pair is not asked for."""
    switches = {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
    assert covering_set(switches, lambda case: True) == [
        {"a": 1, "b": 1, "c": 1},
        {"a": 1, "b": 2, "c": 2},
        {"a": 2, "b": 1, "c": 2},
        {"a": 2, "b": 2, "c": 1},
    ]
    assert all(case["a"] + case["b"] < 4 for case in covering_set(switches, lambda case: case["a"] + case["b"] < 4))
    assert len(all_cases(switches, lambda case: case["a"] + case["b"] < 4)) == 6
