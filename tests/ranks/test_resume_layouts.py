"""A run that resumes on another layout stays on its curve, up to rounding.

The layouts of the covering set are trained in pairs: a step on the first layout from random weights, a save, a load on
the second layout, and two more steps.  Each pair is compared with one plain rank, which also shows one curve on every
layout.  `make test` runs `COVERING`, which has every pair of values that fits on at most four ranks.  `make test-all`
also runs `GRID`: every way to divide the work of a dense model and of a mixture of experts.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.covering import Case, all_cases, covering_set
from tests.ranks import layouts, scenarios
from tests.ranks.pool import Ranks

# bf16 has 8 significant bits, so one rounding is up to 4e-3, and a loss is a mean over some 1,400 rounded tokens.  With
# experts, a few tokens also choose other experts.
BF16_LOSS_TOLERANCE = {
    "dense": 2e-3,
    "gemma": 2e-3,
    "linear": 2e-3,
    "latent": 2e-3,
    **dict.fromkeys(layouts.MIXTURES, 1e-2),
}
BF16_NORM_TOLERANCE = 5e-2
BALANCE_TOLERANCE = 1e-5  # for balancing losses, which routers compute in fp32
DIVIDED = ("tp", "sequence_parallel", "cp", "dynamic_cp", "pp", "virtual_stages", "dp", "ep")
PLAIN = {key: values[:1] for key, values in layouts.DIMENSIONS.items()}
MANY = {**PLAIN, "model": ["dense", "experts"], **{key: layouts.DIMENSIONS[key] for key in DIVIDED}}
SAME = ("model", "precision", "trees")  # what a resumed run may not change
COVERING = covering_set(layouts.DIMENSIONS, layouts.RULES, SAME)
GRID = all_cases(MANY, layouts.RULES)


@pytest.fixture(scope="module")
def uninterrupted(ranks: Ranks) -> Callable[[Case], dict[str, Any]]:
    """Three steps of one plain rank with the same model, precision and data."""
    made: dict[Any, dict[str, Any]] = {}

    def get(case: Case) -> dict[str, Any]:
        plain = {name: values[0] for name, values in layouts.DIMENSIONS.items()}
        same = {name: case[name] for name in SAME}
        key = tuple(same.values())
        if key not in made:
            (made[key],) = ranks(1).run(scenarios.train, layouts.overrides({**plain, **same}))
        return made[key]

    return get


def rings(cases: Iterable[Case]) -> list[list[Case]]:
    """The cases of each model, precision and data, as one list each."""
    found: dict[Any, list[Case]] = {}
    for case in cases:
        found.setdefault(tuple(case[name] for name in SAME), []).append(case)
    return list(found.values())


def in_pairs(ring: list[Case]) -> list[tuple[Case, Case]]:
    """a b c -> a b, b c, c a"""
    return list(zip(ring, [*ring[1:], ring[0]]))


def covering_pairs() -> Iterator[Any]:
    """Pairs of layouts.  Each layout is once saved or once loaded; the pairs in which it is the other are `grid`.

    A second Python version runs the first pair of each model.
    """
    models: set[str] = set()
    for ring in sorted(rings(COVERING), key=len, reverse=True):  # models with a single layout come last
        for number, pair in enumerate(in_pairs(ring)):
            model, marks = pair[0]["model"], []
            if number % 2 == 1:
                marks = [pytest.mark.grid]
            elif model in models:
                marks = [pytest.mark.one_version]
            models.add(model)
            yield pytest.param(*pair, marks=marks)


REST = [pair for ring in rings(case for case in GRID if case not in COVERING) for pair in in_pairs(ring)]


@pytest.mark.parametrize(
    "before,after",
    [*covering_pairs(), *(pytest.param(*pair, marks=pytest.mark.grid) for pair in REST)],
    ids=layouts.name,
)
def test_another_layout_continues_the_curve(
    ranks: Ranks, uninterrupted: Callable[[Case], dict[str, Any]], tmp_path: Path, before: Case, after: Case
) -> None:
    reference = uninterrupted(after)
    first = ranks(layouts.world_size(before)).run(scenarios.train, layouts.overrides(before), [0], None, str(tmp_path))
    check(before, first, reference, slice(0, 1))
    second = ranks(layouts.world_size(after)).run(scenarios.train, layouts.overrides(after), [1, 2], str(tmp_path))
    check(after, second, reference, slice(1, 3))


def check(case: Case, results: list[dict[str, Any]], reference: dict[str, Any], steps: slice) -> None:
    is_fp32 = case["precision"] == "fp32"
    loss_tolerance = layouts.LOSS_TOLERANCE if is_fp32 else BF16_LOSS_TOLERANCE[case["model"]]
    norm_tolerance = layouts.NORM_TOLERANCE if is_fp32 else BF16_NORM_TOLERANCE
    held: dict[tuple[int, int], set[str]] = {}
    for found in results:
        held.setdefault(found["place"][2:], set()).add(found["parameters"])
        np.testing.assert_allclose(found["loss"], reference["loss"][steps], rtol=loss_tolerance)
        np.testing.assert_allclose(found["grad_norm"], reference["grad_norm"][steps], rtol=norm_tolerance)
        assert found["counts"] == reference["counts"][steps]
        assert (min(found["cp_sizes"]) < case["cp"]) == case["dynamic_cp"]
        assert found["learning_rate"] == reference["learning_rate"][steps]
        assert found["adam_steps"] == {float(steps.stop)}
        # Counts over tp and pp.  Each tp rank holds whole experts.
        if case["ep"] == 1 and (case["tp"] == 1 or case["model"] not in layouts.MIXTURES):
            assert found["num_parameters"] == reference["num_parameters"]
        if case["model"] in layouts.MIXTURES and is_fp32:
            for load, expected in zip(found["experts"], reference["experts"][steps], strict=True):
                np.testing.assert_array_equal(load.chosen, expected.chosen)
                np.testing.assert_allclose(load.aux, expected.aux, rtol=BALANCE_TOLERANCE)
                np.testing.assert_allclose(load.z, expected.z, rtol=BALANCE_TOLERANCE)
                assert not load.dropped.any()
    if case["ep"] == 1:  # ranks that differ only in dp and cp hold the same parameters, bit for bit
        assert all(len(hashes) == 1 for hashes in held.values()), held


def test_without_the_grid_each_layout_is_trained_and_each_model_once_on_a_second_version() -> None:
    pairs = [(param.values, {mark.name for mark in param.marks}) for param in covering_pairs()]
    tried = [case for values, marks in pairs if "grid" not in marks for case in values]
    assert {layouts.name(case) for case in tried} == {layouts.name(case) for case in COVERING}
    assert sorted(values[0]["model"] for values, marks in pairs if not marks) == sorted(layouts.DIMENSIONS["model"])
    assert (len(pairs), sum("grid" not in marks for _, marks in pairs)) == (57, 30)
    for name, known in layouts.DIMENSIONS.items():  # each value is saved, and each value is loaded
        for side in (0, 1):
            assert {values[side][name] for values, marks in pairs if "grid" not in marks} == {*known}, name
