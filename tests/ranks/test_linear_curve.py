"""Models with linear attention: four steps of AdamW on every layout agree with float64.

The norm in Gated DeltaNet divides a head's output by its root mean square, which is small in these models.  With the
released norm_epsilon, the norm multiplies rounding errors by up to 1,000, and Adam turns them into other updates. With
norm_epsilon 1e-2, it multiplies them by at most 10: then layouts differ no more than those of other models, so this
factor alone explains the larger differences.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks import mtp_models, scenarios
from tests.ranks.hf_models import load, recipe_of
from tests.ranks.layouts import CURVE_TOLERANCES, SLOW_CP
from tests.ranks.pool import Ranks
from tests.unit.fixtures import hf

Models = Callable[[str, float], Path]
RELEASED, LARGE = 1e-6, 1e-2  # norm_epsilon
TOLERANCES = {
    eps: CURVE_TOLERANCES[f"linear attention, `norm_epsilon` {text}"]
    for eps, text in ((RELEASED, "1e-6"), (LARGE, "1e-2"))
}
OPTIM = ["optim.lr=1e-3", "optim.schedule=constant", "optim.warmup_steps=0"]
MTP = ["train.mtp=joint", f"train.mtp_loss_weight={mtp_models.WEIGHT}"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "tp 2": (2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    "dp 2": (2, []),
    "ep 2": (2, ["parallel.ep=2"]),
    "cp 2": (2, ["parallel.cp=2"]),
    "dynamic cp": (2, ["parallel.cp=2", "parallel.dynamic_cp=true", *SLOW_CP]),
    "cp 4": (4, ["parallel.cp=4"]),
}
# Losses and gradient norms in float64 with torch.optim.AdamW: of transformers models, and of the block by hand.
CURVES: dict[tuple[str, float], tuple[list[float], list[float]]] = {
    ("qwen3_5_text", LARGE): (
        [5.830906867, 5.776655233, 5.799061463, 5.847039886],
        [1.131848568, 1.263708452, 1.184157794, 1.073737380],
    ),
    ("qwen3_5_text", RELEASED): (
        [5.801414477, 5.886111508, 5.892247301, 5.878600001],
        [6.234708750, 6.280997946, 6.832327345, 6.719273912],
    ),
    ("qwen3_next", LARGE): (
        [5.724067661, 5.813313002, 5.787354283, 5.780471452],
        [0.798091170, 0.916651650, 0.853671524, 0.797073135],
    ),
    ("qwen3_next", RELEASED): (
        [5.825144682, 5.922746712, 5.828886572, 5.860407014],
        [5.365606103, 5.683931368, 6.964335175, 5.867364339],
    ),
    ("tied, MTP", LARGE): (
        [5.853577222, 5.764168967, 5.879229428, 5.828438155],
        [1.292216548, 1.298634354, 1.297936854, 1.238736740],
    ),
    ("tied, MTP", RELEASED): (
        [5.889249856, 5.861644348, 5.870246462, 5.827804709],
        [7.884719951, 10.707397726, 7.338217505, 7.740519785],
    ),
}
CASES = [
    *(("qwen3_next", LARGE, layout) for layout in ("one", "tp 2", "ep 2", "dynamic cp")),
    *(("qwen3_5_text", LARGE, layout) for layout in ("dp 2", "cp 2")),
    *(("tied, MTP", eps, "tp 2") for eps in (LARGE, RELEASED)),
    *(("qwen3_5_text", RELEASED, layout) for layout in ("one", "tp 2")),
]
GRID = [
    (name, eps, layout)
    for name, eps in CURVES
    for layout in LAYOUTS
    if (layout != "ep 2" or name == "qwen3_next") and (name, eps, layout) not in CASES
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The folder of a small random model with this norm_epsilon."""

    @cache
    def get(name: str, eps: float) -> Path:
        folder = tmp_path_factory.mktemp("model") / "source"
        if name == "tied, MTP":
            mtp_models.save(folder, "qwen3_5_text", tied=True, rms_norm_eps=eps)
        else:
            hf.save(folder, name, seed=8, rms_norm_eps=eps)
        return folder

    return get


def curve(overrides: list[str], folder: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the steps."""
    with scenarios.running(overrides, has_weights=False) as engine:
        load(engine, folder)
        results = scenarios.train_steps(engine, range(4))
        return [r.objective / r.num_tokens for r in results], [r.grad_norm for r in results]


@pytest.mark.parametrize("name,eps,layout", [*CASES, *(pytest.param(*case, marks=pytest.mark.grid) for case in GRID)])
def test_every_layout_has_the_curve_of_float64(
    ranks: Ranks, models: Models, name: str, eps: float, layout: str
) -> None:
    folder, (world_size, overrides) = models(name, eps), LAYOUTS[layout]
    own = [*recipe_of(folder), "train.global_batch_size=4", *OPTIM, *(MTP if name == "tied, MTP" else [])]
    results: list[Any] = ranks(world_size).run(curve, own + overrides, str(folder))
    for found in results:
        for numbers, expected, tolerance in zip(found, CURVES[name, eps], TOLERANCES[eps], strict=True):
            np.testing.assert_allclose(numbers, expected, rtol=tolerance)


def test_the_page_has_these_tolerances() -> None:
    page = (Path(__file__).parents[2] / "docs/concepts/numerics.md").read_text()
    for kind, (loss, norm) in CURVE_TOLERANCES.items():
        assert f"| {kind} | {written(loss)} | {written(norm)} |" in page


def written(number: float) -> str:
    """1e-06 -> "1e-6" """
    return f"{number:.0e}".replace("e-0", "e-")
