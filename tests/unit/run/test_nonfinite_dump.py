"""A step whose loss or gradient is not finite: what is said, when it ends the run, and what is kept of it."""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sft.config import TrainConfig
from sft.console import Console
from sft.errors import TrainingError
from sft.parallel.position import Position
from sft.run.step_check import StepCheck, dump_step
from tests.unit.metric_values import result

SAMPLES = [{"sample": 3, "row": "chat.jsonl:4"}, {"sample": 7, "row": "ü.jsonl:1"}]


@pytest.fixture
def position() -> Iterator[Position]:
    """A world of one; tests/ranks/test_nonfinite_steps.py has two ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    yield Position(
        device=torch.device("cpu"), rank=0, dp_rank=0, cp_rank=0, tp_rank=0, pp_rank=0, control=group, saving=group
    )
    dist.destroy_process_group()


def test_everything_is_in_one_folder(tmp_path: Path, position: Position) -> None:
    dump_step(tmp_path, 12, samples=[], losses=[1.0], recipe="", position=position)  # by a start before
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
