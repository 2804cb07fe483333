"""The reports of the lifecycle about a save."""

from pathlib import Path
from typing import Any

import pytest

from sft.config import CheckpointConfig
from sft.run import lifecycle
from sft.run.lifecycle import Lifecycle
from tests.builders import layout_config
from tests.unit.fixtures.logs import console

NOWHERE: Any = None  # the test does not use the position


def test_a_status_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    """The checkpoint is published; only scripts that restart the run lack the status."""
    said, stream = console()
    run = Lifecycle(layout_config(), tmp_path / "gone", NOWHERE, said, next_step=lambda: 0)
    run.step_s = 2.0
    run.report_published(4, 120.0)
    first, second = stream.getvalue().splitlines()
    grace = "stopping takes a step (2.0 s) and up to two saves (120.0 s each); run.grace_s is 100 s"
    assert first == f"WARNING: {grace}.  This is too short: the last steps would be lost"
    assert second.startswith(f"WARNING: {tmp_path}/gone/run_state.json cannot be written: ")


def test_the_time_of_a_save_is_compared_with_the_grace_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (said, stream), reported = console(), []
    monkeypatch.setattr(lifecycle.status, "progress", lambda *_, step, **seconds: reported.append((step, seconds)))
    run = Lifecycle(layout_config(), tmp_path, NOWHERE, said, next_step=lambda: 0)
    run.step_s = 1.5
    run.report_published(4, 99.0)
    run.report_published(8, 101.0)
    assert reported == [(4, {"step_s": 1.5, "save_s": 99.0}), (8, {"step_s": 1.5, "save_s": 101.0})]
    assert stream.getvalue().count("stopping takes a step (1.5 s) and up to two saves (99.0 s each)") == 1
    assert stream.getvalue().count("stopping takes") == 1


@pytest.mark.parametrize(
    "background,save_s,is_too_long", [(True, 49.0, False), (True, 49.5, True), (False, 49.5, False)]
)
def test_a_save_in_the_background_counts_against_the_grace(background: bool, save_s: float, is_too_long: bool) -> None:
    """The step takes 2 s, and the last save begins after the background save."""
    line = lifecycle._grace_warning(2.0, save_s, 100, CheckpointConfig(async_save=background))
    assert (line is not None) == is_too_long and (line is None or line.startswith("WARNING"))
