"""Transformer Engine's modules: products, grouped products and permutation run, in bf16 and in FP8, the host waits as
often as without them, kept attention is not repeated, and a checkpoint goes from plain modules to these and back.
"""

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
    return printed("tests.standin.te_modules", *overrides, models=models)


def printed(program: str, *overrides: str, models: list[str]) -> list[dict[str, Any]]:
    process = launch.start(program, json.dumps(overrides), *models)
    said = launch.finish(process)
    found = [json.loads(line.removeprefix("> ")) for line in said.splitlines() if line.startswith("> ")]
    assert process.returncode == 0 and [one["model"] for one in found] == models, said[-6000:]
    return found


@launch.NEEDS_TE
@pytest.mark.parametrize("fp8", ["null", "blockwise"])
def test_its_modules_run_beside_portable_attention(fp8: str) -> None:
    """Hidden states of 192 numbers are one block and a half, as the 2,880 of gpt-oss are 22 and a half."""
    for found in steps(f"run.fp8={fp8}", models=[*LAYERS]):
        layers = LAYERS[found["model"]]
        assert (found["modules"], found["attention"]) == (
            "te (norms stay torch's)",
            "portable",
        ), found
        assert found["experts"] == ("TEGroupedMLP" if found["model"] in ("qwen3.6", "latent") else "GroupedExperts")
        assert found["grouped products"] == GROUPED * layers, found
        assert found["sorts"] == found["combinations"] == layers, found
        assert found["waits"] == WAITS * layers, found
        assert found["products"] > 0, found


@launch.NEEDS_TE
@pytest.mark.parametrize("recompute, forward", [("attention_kept", 1), ("full", 2)])
def test_attention_that_is_kept_runs_once(recompute: str, forward: int) -> None:
    """In two layers and one microbatch; Transformer Engine's attention, and portable attention among its modules."""
    models = ["dense", "dense, latent", "gpt-oss", "qwen3.6"]
    for found in steps(f"train.recompute={recompute}", models=models):
        softmax = 1 if found["model"] == "qwen3.6" else 2
        assert (found["attention"] == "te") == found["model"].startswith("dense"), found
        assert found["attention forward"] == forward * softmax and found["attention backward"] == softmax, found
        if found["model"] == "qwen3.6":
            assert found["delta rule forward"] == forward and found["delta rule backward"] == 1, found


@launch.NEEDS_TE
@pytest.mark.parametrize(
    "layout, models",
    [
        ([], ["dense", "dense, latent", *LAYERS]),
        (
            ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.ep=2"],
            ["gpt-oss", "qwen3.6", "latent"],
        ),
        (
            [
                "parallel.tp=2",
                "parallel.sequence_parallel=true",
                "parallel.ep=2",
                "parallel.etp=2",
            ],
            ["latent"],
        ),
        (["parallel.cp=2", "parallel.ep=2"], ["gemma"]),
    ],
    ids=["one rank", "tp, ep", "etp", "cp, ep"],
)
def test_a_checkpoint_goes_from_plain_modules_to_its_own_and_back(layout: list[str], models: list[str]) -> None:
    """A rank stores the same parts of the same tensors; on one rank, loading and saving again changes no byte."""
    for found in printed("tests.standin.te_checkpoints", *layout, models=models):
        attention = [name.partition(" ")[0] for name in found["modules"]]
        assert attention == ["local", "te", "local"] and found["tensors"] > 10, found
        assert found["described otherwise"] == [] and found["back"], found
        if not layout:
            assert found["numbers"] > 10 and found["changed"] == [], found


@launch.NEEDS_TE
@pytest.mark.parametrize(
    "layout, models",
    [
        (
            ["parallel.tp=2", "parallel.sequence_parallel=true"],
            ["gpt-oss", "qwen3.6", "latent"],
        ),
        (["parallel.cp=2", "parallel.ep=2"], ["gpt-oss", "gemma", "latent"]),
        (
            [
                "parallel.tp=2",
                "parallel.sequence_parallel=true",
                "parallel.ep=2",
                "parallel.etp=2",
            ],
            ["latent"],
        ),
    ],
    ids=["tp", "cp, ep", "etp"],
)
def test_its_modules_run_on_layouts(layout: list[str], models: list[str]) -> None:
    """Rank 0 of each layout; its collectives do nothing."""
    for found in steps(*layout, models=models):
        layers = LAYERS[found["model"]]
        assert (found["modules"], found["attention"]) == (
            "te (norms stay torch's)",
            "portable",
        ), found
        assert found["grouped products"] == GROUPED * layers and found["sorts"] == layers, found
        assert found["products"] > 0 and found["attention backward"] > 0, found


@launch.NEEDS_TE
def test_repeatable_attention_is_accepted_where_it_is_there() -> None:
    """On Hopper packs of at most 2,400 tokens with 16 heads, and on Blackwell all, by its own choice of kernels."""
    process = launch.start("tests.standin.te_determinism")
    said = launch.finish(process)
    assert process.returncode == 0, said[-6000:]
    found = [json.loads(line) for line in said.splitlines() if line.startswith('{"gpu"')]
    assert [one["te"] for one in found] == [one["ours"] for one in found] == [True, True, False, False] + 4 * [True]
