"""Checkpoints of earlier versions resume in this version, on another layout, with the recorded losses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests import golden
from tests.launching import records, start

# The recorded losses come from another machine and version of torch: fp32 sums in another order, over three updates.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
LAYOUTS = {  # the layout of the checkpoint, and another one
    "1-dense-fp32": [(2, []), (2, ["parallel.cp=1", "parallel.tp=2"])],
    "1-experts-bf16": [(2, []), (1, ["parallel.ep=1"])],
    "1-lora-fp32": [(2, []), (1, ["parallel.ep=1"])],
    "1-muon-fp32": [(2, []), (1, ["parallel.tp=1"])],
}


@pytest.mark.parametrize(
    "name, world_size, overrides",
    [
        pytest.param(name, *layout, marks=[] if layout[1] else pytest.mark.grid)
        for name, layouts in LAYOUTS.items()
        for layout in layouts
    ],
    ids=str,
)
def test_it_goes_on_as_it_did_then(tmp_path: Path, name: str, world_size: int, overrides: list[str]) -> None:
    expected, tolerance = golden.expected(name), TOLERANCE[name.rpartition("-")[2]]
    shutil.copy2(golden.FOLDER / name / "chat.jsonl", tmp_path)
    shutil.copytree(golden.FOLDER / name / "checkpoints", tmp_path / "run/checkpoints")
    if (golden.FOLDER / name / "model").exists():
        shutil.copytree(golden.FOLDER / name / "model", tmp_path / "model")
    overrides = [*expected["overrides"], *golden.with_base(tmp_path), *overrides]
    for code, out, err in start(tmp_path, overrides, world_size):
        assert code == 0, out + err
    train = records(tmp_path, "train")
    assert [record["step"] for record in train] == [4, 5, 6]
    np.testing.assert_allclose([record["lm loss"] for record in train], expected["lm loss"], rtol=tolerance)
    np.testing.assert_allclose([record["grad-norm"] for record in train], expected["grad-norm"], rtol=10 * tolerance)
    log = [json.loads(line) for line in (tmp_path / "run/seen.jsonl").read_text().splitlines()]
    assert [row["samples"] for row in log if row["step"] > golden.CUT] == expected["samples"]
    np.testing.assert_allclose(
        [record["learning-rate"] for record in train], expected["learning-rate"], rtol=1e-12, atol=1e-18
    )
