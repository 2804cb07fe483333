"""Models whose attention is portable train with Transformer Engine's modules: its products, grouped products and
permutation run, in bf16 and in FP8, and the host waits as often as without them."""

import json
from typing import Any

import pytest

from tests.standin import launch

LAYERS = {"gpt-oss": 2, "gemma": 2, "qwen3.6": 2, "latent": 1}  # with experts
# In a layer and microbatch: forward and recomputation of two projections, then two products each in backward.
GROUPED = 2 * (1 + 1 + 2)
# The dispatcher waits once a layer for the numbers of tokens; one_rank.py, which sets the numbers, waits twice.
WAITS = 3


def steps(*overrides: str, models: list[str]) -> list[dict[str, Any]]:
    process = launch.start("tests.standin.te_modules", json.dumps(overrides), *models)
    said = launch.finish(process)
    assert process.returncode == 0, said[-6000:]
    return [json.loads(line.removeprefix("> ")) for line in said.splitlines() if line.startswith("> ")]


@launch.NEEDS_TE
@pytest.mark.parametrize("fp8", ["null", "blockwise"])
def test_its_modules_run_beside_portable_attention(fp8: str) -> None:
    """Hidden states of 192 numbers are one block and a half, as the 2,880 of gpt-oss are 22 and a half."""
    for found in steps(f"run.fp8={fp8}", models=[*LAYERS]):
        layers = LAYERS[found["model"]]
        assert (found["modules"], found["attention"]) == ("te (norms stay torch's)", "portable"), found
        assert found["experts"] == ("TEGroupedMLP" if found["model"] in ("qwen3.6", "latent") else "GroupedExperts")
        assert found["grouped products"] == GROUPED * layers, found
        assert found["sorts"] == found["combinations"] == layers, found
        assert found["waits"] == WAITS * layers, found
        assert found["products"] > 0, found
