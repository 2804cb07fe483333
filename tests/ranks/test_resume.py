"""A run cut in two is the run: 5 steps = 2 steps, save, load into new weights, 3 steps."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sft.mcore.checkpoint_io import engine_state, torch_dist_files
from tests.ranks import scenarios
from tests.ranks.pool import RankPool
from tests.ranks.resuming import CUT, NORM_TOLERANCE, SHARDED, TOLERANCE, WHOLE, check_bitwise, part

Ranks = Callable[[int], RankPool]

SAME = [
    (1, []),
    (1, [SHARDED]),
    (1, ["run.precision=bf16"]),
    (1, ["run.precision=bf16", SHARDED]),
    (2, ["parallel.cp=2", SHARDED]),
    (2, [SHARDED, "run.precision=bf16"]),
    (2, ["parallel.pp=2", "parallel.virtual_stages=2"]),
    (4, ["parallel.tp=2", "parallel.cp=2", "parallel.sequence_parallel=true", SHARDED]),
]
LAYOUTS = {
    "1": (1, [WHOLE]),
    "dp2": (2, [WHOLE]),
    "dp2 sharded": (2, [SHARDED]),
    "cp2 sharded": (2, ["parallel.cp=2", SHARDED]),
    "tp2 sp": (2, ["parallel.tp=2", "parallel.sequence_parallel=true", WHOLE]),
    "pp2 sharded": (2, ["parallel.pp=2", SHARDED]),
    "dp4 sharded": (4, [SHARDED]),
    "cp4": (4, ["parallel.cp=4", WHOLE]),
    "tp2 cp2 sp sharded": (4, ["parallel.tp=2", "parallel.cp=2", "parallel.sequence_parallel=true", SHARDED]),
    "tp2 pp2": (4, ["parallel.tp=2", "parallel.pp=2", WHOLE]),
    "pp2 cp2 sharded": (4, ["parallel.pp=2", "parallel.cp=2", SHARDED]),
}
BF16 = [("cp2 sharded", "tp2 sp"), ("tp2 sp", "pp2 sharded"), ("tp2 cp2 sp sharded", "1"), ("1", "dp4 sharded")]


CHUNK_BYTES = 1000


def part_in_pieces(overrides: list[str], steps: list[int], load: str | None, save: str | None) -> dict[str, Any]:
    """The same, of which no stored part is larger than CHUNK_BYTES where a row is not."""
    with mock.patch.object(torch_dist_files, "CHUNK_BYTES", CHUNK_BYTES):
        return part(overrides, steps, load, save)


def test_large_tensors_are_stored_in_pieces(ranks: Ranks, tmp_path: Path) -> None:
    """And read as if they were not: bitwise on the same layout, on the curve on another."""
    uninterrupted = ranks(2).run(part, [SHARDED], [0, 1, 2, 3], None, None)
    ranks(2).run(part_in_pieces, [SHARDED], [0, 1], None, str(tmp_path / "pieces"))
    index = FileSystemReader(tmp_path / "pieces").read_metadata()
    sizes = [
        math.prod(chunk.sizes) * entry.properties.dtype.itemsize
        for entry in index.state_dict_metadata.values()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    ]
    assert max(sizes) <= CHUNK_BYTES and len(sizes) > 400
    for whole, found in zip(uninterrupted, ranks(2).run(part, [SHARDED], [2, 3], str(tmp_path / "pieces"), None)):
        assert found["loss"] == whole["loss"][2:]
        assert (found["parameters"], found["optimizer"]) == (whole["parameters"], whole["optimizer"])
    for found in ranks(2).run(part, ["parallel.pp=2", WHOLE], [2, 3], str(tmp_path / "pieces"), None):
        np.testing.assert_allclose(found["loss"], uninterrupted[0]["loss"][2:], rtol=TOLERANCE["fp32"])


@pytest.mark.parametrize("world_size,overrides", SAME, ids=str)
def test_resuming_on_the_same_layout_is_bitwise(
    ranks: Ranks, tmp_path: Path, world_size: int, overrides: list[str]
) -> None:
    check_bitwise(ranks(world_size), tmp_path, overrides)


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, dict[str, Any]]]:
    """Two steps done on a layout, in a folder; and all five on one rank, in the same precision."""
    made: dict[tuple[str, str], Path] = {}
    whole: dict[str, dict[str, Any]] = {}

    def make(layout: str, precision: str) -> tuple[Path, dict[str, Any]]:
        kept = [f"run.precision={precision}"]
        if precision not in whole:
            (whole[precision],) = ranks(1).run(part, [*LAYOUTS["1"][1], *kept], [0, 1, 2, 3, 4], None, None)
        if (layout, precision) not in made:
            folder = made[layout, precision] = tmp_path_factory.mktemp("saved")
            world_size, overrides = LAYOUTS[layout]
            ranks(world_size).run(part, [*overrides, *kept], [0, 1], None, str(folder))
        return made[layout, precision], whole[precision]

    return make


# In every run of the tests each layout is left once and entered once; the other pairs are a grid.
ORDER = list(LAYOUTS)
RING = set(zip(ORDER, [*ORDER[1:], ORDER[0]]))
PAIRS = [
    pytest.param(before, after, "fp32", marks=[] if (before, after) in RING else pytest.mark.grid)
    for before in LAYOUTS
    for after in LAYOUTS
    if after != before
] + [pytest.param(before, after, "bf16") for before, after in BF16]


@pytest.mark.parametrize("before,after,precision", PAIRS, ids=lambda name: name.replace(" ", "-"))
def test_resuming_on_another_layout_continues_the_curve(
    ranks: Ranks, saved: Any, before: str, after: str, precision: str
) -> None:
    folder, reference = saved(before, precision)
    world_size, overrides = LAYOUTS[after]
    for result in ranks(world_size).run(part, [*overrides, f"run.precision={precision}"], [2, 3, 4], str(folder), None):
        np.testing.assert_allclose(result["loss"], reference["loss"][CUT:], rtol=TOLERANCE[precision])
        np.testing.assert_allclose(result["grad_norm"], reference["grad_norm"][CUT:], rtol=NORM_TOLERANCE[precision])
        assert result["learning_rate"] == reference["learning_rate"][CUT:]
        assert result["adam_steps"] == {5.0}


@pytest.mark.parametrize("before,after", [("pp2 sharded", "1"), ("tp2 pp2", "pp2 sharded"), ("1", "pp2 cp2 sharded")])
def test_tied_embeddings_that_live_on_two_stages(ranks: Ranks, tmp_path: Path, before: str, after: str) -> None:
    """Both stages keep moments of their copy; one is stored, and both are restored."""
    tied = ["model.tie_embeddings=true", "run.precision=fp32"]
    (reference,) = ranks(1).run(part, [*LAYOUTS["1"][1], *tied], [0, 1, 2, 3, 4], None, None)
    ranks(LAYOUTS[before][0]).run(part, [*LAYOUTS[before][1], *tied], [0, 1], None, str(tmp_path))
    for result in ranks(LAYOUTS[after][0]).run(part, [*LAYOUTS[after][1], *tied], [2, 3, 4], str(tmp_path), None):
        np.testing.assert_allclose(result["loss"], reference["loss"][CUT:], rtol=TOLERANCE["fp32"])


def test_generators_go_on_where_they_were_on_the_same_layout_only(ranks: Ranks, tmp_path: Path) -> None:
    before = ranks(2).run(draw_and_save, ["parallel.cp=2"], str(tmp_path))
    assert before[0] != before[1]  # each rank has a stream of its own
    assert ranks(2).run(load_and_draw, ["parallel.cp=2"], str(tmp_path)) == before
    for other in (["parallel.tp=2"], ["parallel.pp=2"]):
        assert ranks(2).run(load_and_draw, other, str(tmp_path)) != before


def draw_and_save(overrides: list[str], folder: str) -> list[float]:
    with scenarios.running(overrides) as engine:
        seed = 100 + engine.groups.rank
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        scenarios.save(engine, Path(folder), {"iteration": 0})
        return draws()


def load_and_draw(overrides: list[str], folder: str) -> list[float]:
    with scenarios.running(overrides) as engine:
        engine_state.load(engine, Path(folder))
        return draws()


def draws() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(1))]


def test_a_checkpoint_of_step_0_resumes(ranks: Ranks, tmp_path: Path) -> None:
    for name, overrides in (("plain", [WHOLE]), ("sharded", [SHARDED])):
        folder = tmp_path / name
        folder.mkdir()
        (whole,) = ranks(1).run(part, overrides, [0, 1], None, None)
        ranks(1).run(save_untrained, overrides, str(folder))
        (resumed,) = ranks(1).run(part, overrides, [0, 1], str(folder), None)
        assert resumed == whole


def save_untrained(overrides: list[str], folder: str) -> None:
    with scenarios.running(overrides) as engine:
        scenarios.save(engine, Path(folder), {"iteration": 0})


def test_weights_of_another_shape_are_refused_in_our_words(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(scenarios.write_checkpoint, [], str(tmp_path))
    (message,) = ranks(1).run(refusal, ["model.ffn_hidden_size=96"], str(tmp_path))
    assert message == (
        f"{tmp_path} is of another model: "
        "decoder.layers.mlp.linear_fc1.weight: (4, 128, 32) stored, (4, 192, 32) wanted; "
        "decoder.layers.mlp.linear_fc2.weight: (4, 32, 64) stored, (4, 32, 96) wanted; "
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight: (4, 128, 32) stored, (4, 192, 32) wanted; "
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight: (4, 32, 64) stored, (4, 32, 96) wanted; "
        "optimizer.state.exp_avg_sq.decoder.layers.mlp.linear_fc1.weight: (4, 128, 32) stored, (4, 192, 32) wanted; "
        "and 1 more."
    )


def refusal(overrides: list[str], folder: str) -> str:
    from sft.errors import CheckpointError

    with scenarios.running(overrides) as engine:
        with pytest.raises(CheckpointError) as error:
            engine_state.load(engine, Path(folder))
        return str(error.value)
