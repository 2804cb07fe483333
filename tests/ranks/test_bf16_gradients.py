"""optim.grad_dtype = bf16: gradients are those of fp32 buffers, rounded; checkpoints and resumed runs do not depend on
it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.mcore.gradients import gradient_chunks
from tests.ranks import mtp_models, scenarios
from tests.ranks.hf_models import assembled
from tests.ranks.layouts import CP, MODELS, PP, SHARDED, SP
from tests.ranks.pool import Ranks

BF16, HALF = ["run.precision=bf16", "model.init_std=0.2"], ["optim.grad_dtype=bf16"]
SAMPLES = [[1, 2, 3], [5, 8, 10]]
# A bf16 number has 8 significant bits, so one rounding is at most 2^-8 of it.  On one rank, the sum over chunks or
# tiles is rounded, and its quotient by the denominator.
TWO_ROUNDINGS = 2**-7 * (1 + 2**-6)
# Of a gradient's norm: a sum over ranks rounds larger terms that cancel, as do the sums of two uses of a weight.
NORM_TOLERANCE = 1e-2


def gradients(overrides: list[str]) -> dict[str, Any]:
    """This rank's parts of the gradients of a step with one microbatch on each rank, and the dtypes of the sums."""
    with scenarios.running([*BF16, *overrides]) as engine:
        corpus = scenarios.SkewedCorpus(scenarios.LENGTHS)
        packs = [[corpus.sample(i) for i in ids] for ids in SAMPLES[: engine.layout.dp]]
        engine.measure(scenarios.microbatches_of(engine, packs), forward_only=False)
        params = [param for chunk in engine.chunks for param in chunk.parameters() if param.requires_grad]
        parts = [(c.parameter, c.shape, c.offset, c.data.float().numpy().copy()) for c in gradient_chunks(engine)]
        return {"parts": parts, "dtypes": {str(param.main_grad.dtype) for param in params}}


def both(ranks: Ranks, world_size: int, recipe: list[str]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Whole gradients with bf16 and with fp32 sums."""
    found, expected = (ranks(world_size).run(gradients, [*recipe, *more]) for more in (HALF, []))
    assert {dtype for result in found for dtype in result["dtypes"]} == {"torch.bfloat16"}
    assert {dtype for result in expected for dtype in result["dtypes"]} == {"torch.float32"}
    half, whole = (assembled(part for result in results for part in result["parts"]) for results in (found, expected))
    assert half.keys() == whole.keys()
    return half, whole


@pytest.mark.parametrize(
    "recipe",
    [
        ["train.mlp_tile=24", "train.recompute=attention_kept", "loss.chunk_size=8"],
        [*MODELS["linear_experts"], "loss.chunk_size=8"],
        ["lora.rank=4", "train.mlp_tile=24", "model.qkv_bias=false"],
    ],
    ids=["tiles", "experts", "lora"],
)
def test_sums_over_tiles_and_chunks_are_rounded_once(ranks: Ranks, recipe: list[str]) -> None:
    half, whole = both(ranks, 1, ["train.global_batch_size=1", *recipe])
    for name, expected in whole.items():
        assert (np.abs(half[name] - expected) <= TWO_ROUNDINGS * np.abs(expected)).all(), name
        assert torch.equal(torch.from_numpy(half[name]).bfloat16().float(), torch.from_numpy(half[name])), name


@pytest.mark.parametrize(
    "recipe",
    [
        [*CP, *SHARDED, "train.global_batch_size=2", *MODELS["gemma4"]],
        [*SP, *SHARDED, "train.global_batch_size=2"],
        [*PP, *SHARDED, "train.global_batch_size=2", *MODELS["gemma"]],
    ],
    ids=["cp", "tp", "pp, tied"],
)
def test_sums_over_ranks(ranks: Ranks, recipe: list[str]) -> None:
    half, whole = both(ranks, 4, recipe)
    scenarios.check_parameters(half, whole, NORM_TOLERANCE)


def test_sums_of_two_heads(ranks: Ranks, tmp_path: Path) -> None:
    """Both heads of multi-token prediction use the output weight, and model and block the embedding."""
    half, whole = both(ranks, 1, [*mtp_models.joint(tmp_path), "train.global_batch_size=1"])
    scenarios.check_parameters(half, whole, NORM_TOLERANCE)


@pytest.mark.parametrize("more", [[], ["optim.offload_fraction=0.5"]], ids=["device", "host"])
def test_a_run_resumes_exactly_and_with_the_other_dtype(ranks: Ranks, tmp_path: Path, more: list[str]) -> None:
    """The first step after a load has the same loss with both dtypes, because the state is the same."""
    recipe = [*BF16, *SHARDED, *more, "train.global_batch_size=2"]
    scenarios.check_bitwise(ranks(2), tmp_path, [*recipe, *HALF])
    here, other = (ranks(2).run(scenarios.train, [*recipe, *half], [1], str(tmp_path)) for half in (HALF, []))
    for one, two in zip(here, other, strict=True):
        assert one["loss"] == two["loss"] and one["optimizer"] != two["optimizer"]
        np.testing.assert_allclose(one["grad_norm"], two["grad_norm"], rtol=NORM_TOLERANCE)
