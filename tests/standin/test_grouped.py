"""Adapters beside Transformer Engine's grouped layers of experts: both passes, with frozen weights, also in FP8."""

import json

import pytest

from tests.standin import launch


@launch.NEEDS_TE
@pytest.mark.parametrize("fp8", ["null", "delayed", "tensorwise", "blockwise"])
def test_experts_with_adapters(fp8: str) -> None:
    """In two microbatches: of gate, up and down two products forward, and two times two backward."""
    process = launch.start("tests.standin.grouped", f"run.fp8={fp8}", ranks=1)
    printed = launch.finish(process)
    lines = [line.removeprefix("> ") for line in printed.splitlines() if line.startswith("> ")]
    assert process.returncode == 0 and len(lines) == 1, printed[-6000:]
    assert json.loads(lines[0]) == {
        "layers": [f"AdaptedExperts TE{kind}ParallelGroupedLinear" for kind in ("Column", "Row")],
        "output": [112, 64],
        "input has a gradient": True,
        "frozen weights have gradients": False,
        "factors": [[4, 8, 64], [4, 64, 8]] * 3,
        "grouped products": 2 * 3 * (2 + 4),
    }
