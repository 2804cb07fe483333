"""optim.moments = bf16 and int8: one curve on every layout, checkpoints, resumed runs, and counted bytes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.estimate import memory
from sft.mcore.checkpoint_io import engine_state
from sft.mcore.optimizer.inner import inner_optimizers
from sft.weights.trained import trained_weights
from tests.ranks import scenarios
from tests.ranks.layouts import CP, EP, LOSS_TOLERANCE, MOE, PP, SHARDED, TP
from tests.ranks.pool import Ranks
from tests.ranks.saving import stored

BF16, INT8 = ["optim.moments=bf16"], ["optim.moments=int8"]
# Rows of 64 elements, so that each tensor-parallel rank holds whole blocks of 64.
WIDE = ["model.hidden_size=128", "model.ffn_hidden_size=128", "model.num_layers=2"]
FIRST, SECOND = "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."
# Gaps between the codes next to the largest: what one rounding may change in an element, as a share of its block's
# largest magnitude.
GAPS = {FIRST: 0.9 / 64, SECOND: 0.9 / 128}
# The rounding of a moment may differ in all its elements if a layout divides rows: a step of Adam then changes by about
# 1 % at random.
OTHER_ROUNDING = 1e-4


def moments(folder: Path) -> dict[str, Any]:
    return {key: tensor for key, tensor in stored(folder).items() if key.startswith((FIRST, SECOND))}


def passed_on(overrides: list[str], source: str, target: str) -> None:
    """Loads a checkpoint and saves it again."""
    with scenarios.running(overrides) as engine:
        plain = engine_state.load(engine, Path(source))
        Path(target).mkdir(exist_ok=True)
        scenarios.save(engine, Path(target), {"iteration": plain["iteration"]})


@pytest.mark.parametrize(
    "recipe",
    [
        [*BF16, *SHARDED, "run.precision=bf16"],
        [*INT8, *SHARDED, *CP],
        [*INT8, *SHARDED, "parallel.shard=weights", "run.precision=bf16"],
        [*INT8, "lora.rank=4", "model.qkv_bias=false"],
    ],
    ids=["bf16", "int8, cp", "int8, sharded weights", "int8, LoRA, no distributed optimizer"],
)
def test_a_run_resumes_bitwise(ranks: Ranks, tmp_path: Path, recipe: list[str]) -> None:
    scenarios.check_bitwise(ranks(2), tmp_path, recipe)


@pytest.mark.parametrize("kind", [BF16, INT8], ids=["bf16", "int8"])
@pytest.mark.parametrize(
    "layout, world_size",
    [
        ([*SHARDED, *CP], 2),
        ([*PP], 2),
        ([*SHARDED], 4),
        ([*SHARDED, "parallel.shard=weights"], 4),
        ([*TP, *SHARDED], 4),
    ],
    ids=["cp", "pp", "dp 4", "sharded weights, dp 4", "tp, dp"],
)
def test_one_curve_and_the_same_checkpoint(
    ranks: Ranks, tmp_path: Path, kind: list[str], layout: list[str], world_size: int
) -> None:
    """With whole blocks on each rank, another layout reads and writes the same values, bit for bit."""
    recipe, source = [*WIDE, *kind], str(tmp_path / "one")
    (one,) = ranks(1).run(scenarios.train, recipe, [0, 1], None, source)
    (rest,) = ranks(1).run(scenarios.train, recipe, [2], source)
    others = ranks(world_size).run(scenarios.train, [*recipe, *layout], [2], source)
    whole = ranks(world_size).run(scenarios.train, [*recipe, *layout], [0, 1, 2])
    tolerance = OTHER_ROUNDING if "parallel.tp=2" in layout else LOSS_TOLERANCE
    for other, uninterrupted in zip(others, whole, strict=True):
        np.testing.assert_allclose(other["loss"], rest["loss"], rtol=LOSS_TOLERANCE)
        np.testing.assert_allclose(uninterrupted["loss"], [*one["loss"], *rest["loss"]], rtol=tolerance)
    ranks(world_size).run(passed_on, [*recipe, *layout], source, str(tmp_path / "other"))
    expected, found = stored(tmp_path / "one"), stored(tmp_path / "other")
    kinds = {tensor.dtype for tensor in moments(tmp_path / "other").values()}
    assert kinds == {torch.bfloat16 if kind == BF16 else torch.float32}
    for key, tensor in moments(tmp_path / "one").items():
        assert torch.equal(found[key], tensor) and tensor.any(), key
    assert len(expected) > 20


def test_blocks_that_a_layout_divides(ranks: Ranks, tmp_path: Path) -> None:
    """Rows of 32 elements on two ranks: each value moves by at most one code."""
    source = str(tmp_path / "one")
    ranks(1).run(scenarios.train, INT8, [0], None, source)
    ranks(2).run(passed_on, [*INT8, *TP], source, str(tmp_path / "other"))
    before, after = moments(tmp_path / "one"), moments(tmp_path / "other")
    assert before.keys() == after.keys() and any(not torch.equal(before[key], after[key]) for key in before)
    for key, tensor in before.items():
        gap = next(gap for prefix, gap in GAPS.items() if key.startswith(prefix))
        assert (after[key] - tensor).abs().max() <= gap / 2 * tensor.abs().max(), key


@pytest.mark.parametrize("before, after", [([], BF16), ([], INT8), (INT8, BF16), (BF16, []), (INT8, [])])
def test_moments_are_converted(ranks: Ranks, tmp_path: Path, before: list[str], after: list[str]) -> None:
    source = str(tmp_path / "one")
    ranks(1).run(scenarios.train, before, [0], None, source)
    ranks(1).run(passed_on, after, source, str(tmp_path / "other"))
    then, now = moments(tmp_path / "one"), moments(tmp_path / "other")
    assert then.keys() == now.keys()
    for key, tensor in then.items():
        if after == BF16:
            assert torch.equal(now[key], tensor.bfloat16()), key
        elif after == INT8:
            gap = next(gap for prefix, gap in GAPS.items() if key.startswith(prefix))
            assert 0 < (now[key] - tensor).abs().max() <= gap / 2 * tensor.abs().max(), key
        else:
            assert torch.equal(now[key], tensor.float()), key


def bytes_of(overrides: list[str]) -> tuple[int, float]:
    """Bytes of this rank's main weights and moments, and the estimate."""
    with scenarios.running(overrides) as engine:
        scenarios.train_steps(engine, [0])
        config, layout = engine.config, engine.layout
        states = [s for adam in inner_optimizers(engine.optimizer) for s in adam.state.values()]
        counted = sum(t.nbytes for s in states for t in s.values() if isinstance(t, torch.Tensor) and t.dim())
        expected = memory.estimate(
            config, layout, scenarios.VOCAB, trained=trained_weights(config, scenarios.VOCAB)
        ).optimizer
        return counted, expected


@pytest.mark.parametrize("kind, each", [([], 8.0), (BF16, 4.0), (INT8, 2.125)], ids=["fp32", "bf16", "int8"])
@pytest.mark.parametrize(
    "recipe, world_size",
    [([], 1), ([*SHARDED, *CP, *MOE, *EP], 2), (["lora.rank=4", "model.qkv_bias=false"], 1)],
    ids=["dense", "experts", "LoRA"],
)
def test_counted_bytes(ranks: Ranks, kind: list[str], each: float, recipe: list[str], world_size: int) -> None:
    """Sums over ranks, which hold unequal slices.  A parameter that does not fill its last block has 8 bytes more."""
    found = ranks(world_size).run(bytes_of, [*WIDE, *recipe, *kind])
    counted, expected = (sum(pair[i] for pair in found) for i in (0, 1))
    assert abs(counted - expected) <= 2e-3 * expected
    assert counted / each > 1000
