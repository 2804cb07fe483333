"""The first hour on a GPU machine, with toy sizes: every command runs on "cuda" as it does on a GPU."""

import json
from pathlib import Path

from tests.standin import launch

TIMEOUT_S = 900
# Kernels compute nothing: tests of numbers fail, and probes find no gradient.
OF_NUMBERS = {"probe-leak", "probe-parity", "tests", "attention"}


def test_every_step_ends(tmp_path: Path) -> None:
    said = launch.finish(launch.start("tools.gpu_hour", "--tiny", "--out", str(tmp_path)), TIMEOUT_S)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["machine"]["num_gpus"] == 8
    status = {step["name"]: step["status"] for step in report["steps"]}
    assert {name for name, ended in status.items() if ended != "done"} <= {*OF_NUMBERS, "backends"}, said
    assert (status["backends"] == "skipped") == (not launch.HAS_TE)
