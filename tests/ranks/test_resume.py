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
from tests.covering import Case
from tests.ranks import layouts, scenarios
from tests.ranks.pool import RankPool
from tests.ranks.resuming import CUT, NORM_TOLERANCE, SHARDED, TOLERANCE, WHOLE, check_bitwise, part

Ranks = Callable[[int], RankPool]

SAME = [
    (1, []),
    (1, ["run.precision=bf16"]),
    (2, [SHARDED, "run.precision=bf16"]),
    (2, ["parallel.pp=2", "parallel.virtual_stages=2"]),
    (4, ["parallel.tp=2", "parallel.cp=2", "parallel.sequence_parallel=true", SHARDED]),
]
# With experts, in bf16 some tokens' are decided by the last bit: two layouts part by as much without any cut.
LOSS = {"fp32": TOLERANCE["fp32"], "bf16": 5e-3}
NORM = {"fp32": NORM_TOLERANCE["fp32"], "bf16": 5e-2}


def in_pairs() -> list[tuple[Case, Case]]:
    """The cases of the covering set, each after the one before it of the same model and precision, in a ring."""
    rings: dict[Any, list[Case]] = {}
    for case in layouts.COVERING:
        rings.setdefault((case["model"], case["precision"]), []).append(case)
    return [(before, after) for ring in rings.values() for before, after in zip(ring, [*ring[1:], ring[0]])]


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
def uninterrupted(ranks: Ranks) -> Callable[[str, str], dict[str, Any]]:
    """`uninterrupted("tied", "bf16")`: all five steps of one plain rank."""
    made: dict[tuple[str, str], dict[str, Any]] = {}

    def get(model: str, precision: str) -> dict[str, Any]:
        if (model, precision) not in made:
            recipe = [*layouts.MODELS[model], f"run.precision={precision}"]
            (made[model, precision],) = ranks(1).run(part, recipe, [0, 1, 2, 3, 4], None, None)
        return made[model, precision]

    return get


@pytest.mark.parametrize("before,after", in_pairs(), ids=layouts.name)
def test_another_layout_continues_the_curve(
    ranks: Ranks, uninterrupted: Callable[[str, str], dict[str, Any]], tmp_path: Path, before: Case, after: Case
) -> None:
    precision = after["precision"]
    reference = uninterrupted(after["model"], precision)
    ranks(layouts.world_size(before)).run(part, layouts.overrides(before), [0, 1], None, str(tmp_path))
    for found in ranks(layouts.world_size(after)).run(part, layouts.overrides(after), [2, 3, 4], str(tmp_path), None):
        np.testing.assert_allclose(found["loss"], reference["loss"][CUT:], rtol=LOSS[precision])
        np.testing.assert_allclose(found["grad_norm"], reference["grad_norm"][CUT:], rtol=NORM[precision])
        assert found["learning_rate"] == reference["learning_rate"][CUT:]
        assert found["adam_steps"] == {5.0}


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
