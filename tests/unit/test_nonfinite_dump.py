"""What is kept of a step whose loss or gradient was not finite."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sft.parallel.position import Position
from sft.run.step_check import dump_step

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
    made = dump_step(
        tmp_path, 12, samples=SAMPLES, losses=[3.5, float("nan")], recipe="run: {dir: a}\n", position=position
    )
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


def test_the_same_step_again_takes_the_place(tmp_path: Path, position: Position) -> None:
    """Resumed, and not finite once more."""
    for losses in ([1.0, 2.0], [3.0]):
        made = dump_step(tmp_path, 12, samples=SAMPLES, losses=losses, recipe="", position=position)
    assert json.loads((made / "ranks.json").read_text())[0]["summed loss of each microbatch"] == ["3.0"]
    other = dump_step(tmp_path, 13, samples=[], losses=[], recipe="", position=position)
    assert made.is_dir() and other.name == "step_0000013"
