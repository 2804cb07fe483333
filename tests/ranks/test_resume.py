"""A run cut in two is the run: 5 steps = 2 steps, save, load into new weights, 3 steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.mcore import shards
from tests.ranks import scenarios
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]
CUT = 2
# Another layout takes fp32 sums in another order.
TOLERANCE = 1e-6

SAME = [
    (1, []),
    (1, ["parallel.distributed_optimizer=true"]),
    (1, ["run.precision=bf16"]),
    (1, ["run.precision=bf16", "parallel.distributed_optimizer=true"]),
    (2, ["parallel.cp=2", "parallel.distributed_optimizer=true"]),
    (2, ["parallel.pp=2", "parallel.virtual_stages=2"]),
    (
        4,
        [
            "parallel.tp=2",
            "parallel.cp=2",
            "parallel.sequence_parallel=true",
            "parallel.distributed_optimizer=true",
        ],
    ),
]
SHARDED = ["parallel.distributed_optimizer=true", "parallel.sequence_parallel=true"]
OTHER = [
    ((2, ["parallel.cp=2"]), (2, ["parallel.tp=2"])),
    ((2, ["parallel.tp=2"]), (2, ["parallel.pp=2"])),
    ((4, ["parallel.cp=2", "parallel.tp=2"]), (1, [])),
    ((1, []), (4, ["parallel.pp=2", "parallel.cp=2"])),
]


def part(overrides: list[str], steps: list[int], load: str | None, save: str | None) -> dict[str, Any]:
    """Train the given steps (counted from 0), from `load` on and into `save`."""
    with scenarios.running(overrides) as engine:
        if load:
            plain = shards.load(engine, Path(load))
            assert plain["iteration"] == steps[0]
        loader = scenarios.loader_of(engine, scenarios.SkewedCorpus(scenarios.LENGTHS))
        results = [engine.train_step(loader.microbatches(step)) for step in steps]
        if save:
            shards.save(engine, Path(save), {"iteration": steps[-1] + 1})
        adam_steps = {
            float(state["step"])
            for optimizer in shards._parts(engine.optimizer)
            for state in optimizer.optimizer.state.values()
        }
        return {
            "loss": [r.totals.loss / r.totals.num_tokens for r in results],
            "grad_norm": [r.grad_norm for r in results],
            "learning_rate": [r.learning_rate for r in results],
            "hash": scenarios.parameter_hash(engine),
            "adam_steps": adam_steps,
        }


@pytest.mark.parametrize("world_size,overrides", SAME, ids=str)
def test_resuming_on_the_same_layout_is_bitwise(
    ranks: Ranks, tmp_path: Path, world_size: int, overrides: list[str]
) -> None:
    pool = ranks(world_size)
    whole = pool.run(part, overrides, [0, 1, 2, 3, 4], None, None)
    first = pool.run(part, overrides, [0, 1], None, str(tmp_path))
    second = pool.run(part, overrides, [2, 3, 4], str(tmp_path), None)
    for w, f, s in zip(whole, first, second):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert f[name] + s[name] == w[name]
        assert s["hash"] == w["hash"]
        assert f["adam_steps"] == {2.0} and s["adam_steps"] == w["adam_steps"] == {5.0}


@pytest.mark.parametrize("before,after", OTHER, ids=str)
def test_resuming_on_another_layout_continues_the_curve(ranks: Ranks, tmp_path: Path, before: Any, after: Any) -> None:
    (reference,) = ranks(1).run(part, SHARDED, [0, 1, 2, 3, 4], None, None)
    ranks(before[0]).run(part, before[1] + SHARDED, [0, 1], None, str(tmp_path))
    for result in ranks(after[0]).run(part, after[1] + SHARDED, [2, 3, 4], str(tmp_path), None):
        np.testing.assert_allclose(result["loss"], reference["loss"][CUT:], rtol=TOLERANCE)
        np.testing.assert_allclose(result["grad_norm"], reference["grad_norm"][CUT:], rtol=10 * TOLERANCE)
        assert result["learning_rate"] == reference["learning_rate"][CUT:]
        assert result["adam_steps"] == {5.0}


def test_a_checkpoint_of_step_0_resumes(ranks: Ranks, tmp_path: Path) -> None:
    for name, overrides in (("plain", []), ("sharded", SHARDED)):
        folder = tmp_path / name
        folder.mkdir()
        (whole,) = ranks(1).run(part, overrides, [0, 1], None, None)
        ranks(1).run(save_untrained, overrides, str(folder))
        (resumed,) = ranks(1).run(part, overrides, [0, 1], str(folder), None)
        assert resumed == whole


def save_untrained(overrides: list[str], folder: str) -> None:
    with scenarios.running(overrides) as engine:
        shards.save(engine, Path(folder), {"iteration": 0})


def test_weights_of_another_shape_are_refused_in_our_words(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(scenarios.write_checkpoint, [], str(tmp_path))
    (message,) = ranks(1).run(refusal, ["model.ffn_hidden_size=96"], str(tmp_path))
    assert message == (
        f"{tmp_path} is of another model: decoder.layers.mlp.linear_fc1.weight: (4, 128, 32) there, (4, 192, 32) here; "
        "decoder.layers.mlp.linear_fc2.weight: (4, 32, 64) there, (4, 32, 96) here; "
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight: (4, 128, 32) there, (4, 192, 32) here; "
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight: (4, 32, 64) there, (4, 32, 96) here; "
        "optimizer.state.exp_avg_sq.decoder.layers.mlp.linear_fc1.weight: (4, 128, 32) there, (4, 192, 32) here; "
        "and 1 more."
    )
    (message,) = ranks(1).run(refusal, ["parallel.distributed_optimizer=true"], str(tmp_path))
    assert "written with parallel.distributed_optimizer = false and cannot be resumed with true" in message


def refusal(overrides: list[str], folder: str) -> str:
    from sft.errors import CheckpointError

    with scenarios.running(overrides) as engine:
        with pytest.raises(CheckpointError) as error:
            shards.load(engine, Path(folder))
        return str(error.value)
