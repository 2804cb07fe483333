"""The first hour on a GPU machine, with toy sizes: its commands run on "cuda" as they do on a GPU.

Kernels compute nothing, so steps that compare numbers fail; the others must not, and every step must be reported.
"""

import json
from pathlib import Path

import pytest

from tests.standin import launch

TIMEOUT_S = 1500


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_every_step_is_run_and_reported(tmp_path: Path) -> None:
    said = launch.finish(launch.start("tools.gpu_hour", "--tiny", "--out", str(tmp_path)), TIMEOUT_S)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["machine"]["num_gpus"] == 8
    status = {step["name"]: step["status"] for step in report["steps"]}
    assert "not ended" not in status.values(), said
    assert "failed" not in [status[name] for name in ("probe-data", "layouts", "deterministic")], said
    assert (status["backends"] == "skipped") == (not launch.HAS_TE)
