"""Constants that a calibration computes from given seconds, compared with values by hand.

tests/ranks/test_calibration.py tests the measurements.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sft.calibration import fit, links, steps
from sft.calibration.links import Links, exposed_share
from sft.calibration.sizes import SIZES
from sft.cli import main
from sft.estimate import gpus
from sft.estimate.constants import Constant, Constants, assumed
from sft.estimate.lengths import Lengths
from sft.estimate.step_time import step_time
from sft.parallel.layout import Layout

SOURCE = "measured 2026-11-24 on a test"


def short_steps(constants: Constants, added_s: float = 0.0) -> list[steps.Step]:
    """Short steps on one rank whose time follows from these constants, plus `added_s` for each layer and microbatch."""
    taken = []
    for name, config in steps.recipes(SIZES["cpu"], "cpu", 1).items():
        layout, model = Layout.resolve(config, 1), config.model
        lengths = Lengths.all_of(config.data.seq_length)
        seconds = step_time(config, layout, model.vocab_size or 0, lengths, constants).step_s
        added = added_s * model.num_layers * layout.num_microbatches
        taken.append(steps.Step(name, config, layout, seconds + added))
    return taken


def test_the_fit_finds_the_constants_that_made_the_steps() -> None:
    start = assumed(gpus.gpu("cpu"), 1.0)
    values = {"elementwise_gb_s": 3.0, "optimizer_gb_s": 2.0, "layer_overhead_us": 700.0, "grouped_gemm": 0.4}
    real = replace(start, **{name: Constant(value, "real") for name, value in values.items()})
    found = fit.fitted(start, short_steps(real), SOURCE)
    assert {name: getattr(found, name).value for name in values} == pytest.approx(values)
    assert {getattr(found, name).source for name in values} == {SOURCE}
    assert fit.errors(found, short_steps(real)) == pytest.approx(
        dict.fromkeys(steps.recipes(SIZES["cpu"], "cpu", 1), 0)
    )
    assert fit.errors(found, short_steps(real, added_s=1.0))["layers"] < -0.5  # slower than predicted


def test_time_of_each_layer_and_microbatch_is_overhead() -> None:
    """2 ms more for each layer and microbatch: the overhead changes from 100 us to 2,100 us, and nothing else
    changes."""
    start = assumed(gpus.gpu("cpu"), 1.0)
    found = fit.fitted(start, short_steps(start, added_s=2e-3), SOURCE)
    assert found.layer_overhead_us.value == pytest.approx(2100)
    assert found.elementwise_gb_s.value == pytest.approx(7.5)
    assert found.gemm_tflops == start.gemm_tflops


def test_a_part_that_steps_do_not_show_is_never_free() -> None:
    """If steps take no time at all, rates are 100 times the assumed ones, and the overhead is 0."""
    start = assumed(gpus.gpu("cpu"), 1.0)
    found = fit.fitted(start, [step._replace(seconds=1e-9) for step in short_steps(start)], SOURCE)
    assert found.elementwise_gb_s.value == found.optimizer_gb_s.value == 750 and found.layer_overhead_us.value == 0


def test_least_squares_without_negative_numbers() -> None:
    """x + y = 1, x + 2 y = 3, x = 0: the least squares are at (-1/6, 3/2), and without negative numbers at x = 0, y =
    7/5."""
    matrix, target = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 0.0]]), np.array([1.0, 3.0, 0.0])
    assert fit.least_squares(matrix, target) == pytest.approx([0, 1.4])
    assert fit.least_squares(np.eye(2), np.array([2.0, -1.0])) == pytest.approx([2, 0])
    assert fit.least_squares(np.eye(2), np.array([-2.0, -1.0])).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("both_s", "message_s", "products_s", "share"),
    [(5, 4, 2, 0.5), (4, 4, 2, 0), (6, 4, 2, 1), (9, 4, 2, 1), (3, 4, 2, 0), (5, 2, 4, 0.5)],
)
def test_what_of_a_message_is_exposed(both_s: float, message_s: float, products_s: float, share: float) -> None:
    assert exposed_share(both_s, message_s, products_s) == share


def test_a_link_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of 4 ranks.  1 ms of each time is latency; 3 x 4 MB in 6 ms -> 2 GB/s; a sum takes twice as long; a
    single rank sends 4 MB in 1 ms -> 4 GB/s."""
    monkeypatch.setattr(links.dist, "get_world_size", lambda group: 4)
    taken = {("_gather_s", 256): 1e-3, ("_gather_s", 4_000_000): 7e-3, ("_scatter_s", 4_000_000): 13e-3}
    taken |= {("_send_s", 4_000_000): 2e-3}
    for name in ("_gather_s", "_scatter_s", "_send_s"):
        monkeypatch.setattr(Links, name, lambda self, size, name=name: taken[name, size])
    monkeypatch.setattr(Links, "_exposed", lambda self: 0.25)
    link = Links(4_000_000, None).measure()  # type: ignore[arg-type]
    assert link._asdict() == pytest.approx(
        {"gb_s": 2.0, "latency_us": 1000.0, "reduce_scatter": 0.5, "send": 2.0, "exposed": 0.25}
    )


def test_a_calibration_is_for_all_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--calibrate", "--model", "a.yaml", "--gpus", "8", "run.seed=1"]) == 2
    assert "does not read --model, --gpus, run.seed=1.  Run sft plan --calibrate first" in capsys.readouterr().err
