"""Losses that are reported as spikes; and non-finite steps: the report, the end of the run, and the saved files."""

import io
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sft.config import TrainConfig
from sft.console import Console
from sft.errors import TrainingError
from sft.parallel.position import Position
from sft.run.step_check import LossSpikes, StepCheck, dump_step
from tests.unit.metric_values import result

SAMPLES = [{"sample": 3, "row": "chat.jsonl:4"}, {"sample": 7, "row": "ü.jsonl:1"}]


@pytest.fixture
def position() -> Iterator[Position]:
    """The position in a world of one rank; tests/ranks/test_nonfinite_steps.py has two ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    yield Position(
        device=torch.device("cpu"), rank=0, dp_rank=0, cp_rank=0, tp_rank=0, pp_rank=0, control=group, saving=group
    )
    dist.destroy_process_group()


def test_everything_is_in_one_folder(tmp_path: Path, position: Position) -> None:
    dump_step(tmp_path, 12, samples=[], losses=[1.0], recipe="", position=position)  # a previous start wrote this file
    losses = [3.5, float("nan")]
    made = dump_step(tmp_path, 12, samples=SAMPLES, losses=losses, recipe="run: {dir: a}\n", position=position)
    assert made == tmp_path / "bad_steps" / "step_0000012"
    assert sorted(os.listdir(made)) == ["ranks.json", "recipe.yaml", "samples.json"]
    assert json.loads((made / "samples.json").read_text()) == SAMPLES
    assert json.loads((made / "ranks.json").read_text()) == [
        {
            "rank": 0, "summed loss of each microbatch": ["3.5", "nan"],
            "dp_rank": 0, "cp_rank": 0, "tp_rank": 0, "pp_rank": 0, "ep_rank": 0,
        }
    ]  # fmt: skip
    assert (made / "recipe.yaml").read_text() == "run: {dir: a}\n"


def step_check() -> tuple[StepCheck, io.StringIO]:
    stream = io.StringIO()
    config = TrainConfig(num_steps=9, global_batch_size=1, max_nonfinite_steps=2)
    return StepCheck(config, Console(0, stream)), stream


def test_one_step_more_than_allowed_ends_the_run(tmp_path: Path) -> None:
    check, stream = step_check()
    nan = result(objective=float("nan"))
    for in_a_row in (1, 2):
        check.check(7 + in_a_row, nan, in_a_row, lambda: pytest.fail("nothing is kept of it"))
    line = (
        "WARNING: step {}: lm loss nan, gradient norm 0.5: the step is skipped and updates no weight "
        "({} non-finite in a row, at most 2 allowed)"
    )
    assert stream.getvalue().splitlines() == [line.format(8, 1), line.format(9, 2)]
    with pytest.raises(TrainingError, match=f"step 10: lm loss nan.*after 2 non-finite steps .*are in {tmp_path}"):
        check.check(10, nan, 3, lambda: tmp_path)


def test_a_spike_is_told_and_a_skipped_step_is() -> None:
    check, stream = step_check()
    for step in range(1, 18):
        check.check(step, result(), 0, lambda: pytest.fail("nothing is kept of it"))
    assert stream.getvalue() == ""
    check.check(18, result(objective=300.0), 0, lambda: pytest.fail("nothing is kept of it"))
    warning = "WARNING: loss spike in step 18: 15.0000, the median of earlier losses is 1.5000"
    assert stream.getvalue().startswith(warning)


# Loss spikes


def noise(count: int) -> list[float]:
    rng = random.Random(11)
    return [rng.gauss(2.0, 0.05) for _ in range(count)]


SPIKES = {50: 1000.0, 51: 1000.0, 52: 1000.0, 60: 1000.0, 70: 3.0}


@pytest.mark.parametrize(
    "losses, places",
    [
        # A spike does not hide the next one.  Noise lies within six standard deviations, except two in a billion
        # values.
        ([SPIKES.get(place, loss) for place, loss in enumerate(noise(100))], [50, 51, 52, 60, 70]),
        ([2.0] * 15 + [50.0], []),  # the first 16 losses are never reported
        ([2.0] * 16 + [50.0], [16]),
        ([2.0] * 100, []),
        ([0.0] * 100, []),
        # if losses do not vary, a hundredth of the loss counts as their deviation: six times this is usual
        ([2.0] * 30 + [2.11], []),
        ([2.0] * 30 + [2.13], [30]),
        (noise(30) + [0.1] + noise(30), []),  # a fall is not a spike
        ([5.0 - 0.04 * step for step in range(120)], []),
        # Only the last 64 losses count: when 32 of them have the new level, the median is 3.0, and 6 * 1.4826 above it
        # is usual.
        ([2.0] * 64 + [4.0] * 100, [*range(64, 96)]),
    ],
)
def test_which_losses_are_told(losses: list[float], places: list[int]) -> None:
    spikes = LossSpikes()
    assert [place for place, loss in enumerate(losses) if spikes.check(loss) is not None] == places


def test_the_line_names_the_loss_and_what_is_usual() -> None:
    """The distances from the median 2.05 are 0, 0.05 / 31 twice, ...; the middle one of 63 is 16 * 0.05 / 31 =
    0.0258."""
    spikes = LossSpikes()
    usual = [2.0 + 0.1 * i / 62 for i in range(63)]
    assert [spikes.check(loss) for loss in usual] == [None] * 63
    assert spikes.check(4.0) == "4.0000, the median of earlier losses is 2.0500 +- 0.0383"
