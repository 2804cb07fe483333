"""A run of a mixture of experts cut in two is the run, on any layout of its experts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from sft.errors import CheckpointError, StorageError
from sft.mcore.checkpoint_io import engine_state, metadata_index, safe_reader, torch_dist_files
from tests.ranks import scenarios
from tests.ranks.layouts import AUX, MOE
from tests.ranks.pool import RankPool
from tests.ranks.resuming import CUT, NORM_TOLERANCE, SHARDED, TOLERANCE, WHOLE, check_bitwise, optimizer_hash, part

Ranks = Callable[[int], RankPool]
MODEL = [*MOE, *AUX]
EP2, EP4 = "parallel.ep=2", "parallel.ep=4"
CP2, TP2 = ["parallel.cp=2"], ["parallel.tp=2", "parallel.sequence_parallel=true"]
BF16 = "run.precision=bf16"
# In bf16 some tokens' experts are decided by the last bit, and runs of two layouts part by as much without any cut.
LOSS = {**TOLERANCE, "bf16": 5e-3}
NORM = {**NORM_TOLERANCE, "bf16": 5e-2}

SAME = [
    (1, [WHOLE]),
    (1, [SHARDED, BF16]),
    (2, [EP2, WHOLE]),
    (2, [EP2, SHARDED, BF16]),
    (2, [*CP2, EP2, SHARDED]),
    (2, [*TP2, EP2, WHOLE]),
    (2, [*TP2, WHOLE]),  # experts whole on both, reduced over a group of their own: two optimizers in a chain
    (2, [*TP2, SHARDED]),
    (2, ["parallel.pp=2", WHOLE]),
    (4, ["parallel.pp=2", *CP2, EP2, SHARDED]),
    (4, ["parallel.pp=2", "parallel.virtual_stages=2", EP2, WHOLE]),
]
LAYOUTS = {
    "1": (1, [WHOLE]),
    "dp2 ep2 sharded": (2, [EP2, SHARDED]),
    "tp2 sp": (2, [*TP2, WHOLE]),
    "pp2 cp2 ep2": (4, ["parallel.pp=2", *CP2, EP2, WHOLE]),
    "tp2 cp2 sp ep2 sharded": (4, [*TP2, *CP2, EP2, SHARDED]),
    "cp2 dp2 ep4": (4, [*CP2, EP4, WHOLE]),
}


@pytest.mark.parametrize("world_size,overrides", SAME, ids=lambda v: " ".join(v) if isinstance(v, list) else str(v))
def test_the_same_layout_continues_bitwise(ranks: Ranks, tmp_path: Path, world_size: int, overrides: list[str]) -> None:
    check_bitwise(ranks(world_size), tmp_path, MODEL + overrides)


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, dict[str, Any]]]:
    """Two steps done on a layout, in a folder; and all five on one rank, in the same precision."""
    made: dict[tuple[str, str], Path] = {}
    whole: dict[str, dict[str, Any]] = {}

    def make(layout: str, precision: str) -> tuple[Path, dict[str, Any]]:
        recipe = [*MODEL, f"run.precision={precision}"]
        if precision not in whole:
            (whole[precision],) = ranks(1).run(part, recipe, [0, 1, 2, 3, 4], None, None)
        if (layout, precision) not in made:
            folder = made[layout, precision] = tmp_path_factory.mktemp("saved")
            world_size, overrides = LAYOUTS[layout]
            ranks(world_size).run(part, recipe + overrides, [0, 1], None, str(folder))
        return made[layout, precision], whole[precision]

    return make


# Each layout to the next and back, and one process to the next but one: what all 30 pairs can show (they were run
# once) in half the time.
ORDER = list(LAYOUTS)
NEIGHBOURS = [*zip(ORDER, [*ORDER[1:], ORDER[0]]), ("1", "tp2 sp")]
PAIRS = [(b, a, "fp32") for pair in NEIGHBOURS for b, a in (pair, pair[::-1])] + [
    ("dp2 ep2 sharded", "tp2 sp", "bf16"),
    ("tp2 cp2 sp ep2 sharded", "1", "bf16"),
]


@pytest.mark.parametrize("before,after,precision", PAIRS, ids=lambda name: name.replace(" ", "-"))
def test_another_layout_continues_the_curve(ranks: Ranks, saved: Any, before: str, after: str, precision: str) -> None:
    folder, reference = saved(before, precision)
    world_size, overrides = LAYOUTS[after]
    recipe = [*MODEL, *overrides, f"run.precision={precision}"]
    for result in ranks(world_size).run(part, recipe, [2, 3, 4], str(folder), None):
        np.testing.assert_allclose(result["loss"], reference["loss"][CUT:], rtol=LOSS[precision])
        np.testing.assert_allclose(result["grad_norm"], reference["grad_norm"][CUT:], rtol=NORM[precision])
        assert result["learning_rate"] == reference["learning_rate"][CUT:]
        assert result["adam_steps"] == {5.0}


def refused(overrides: list[str], folder: str) -> str:
    """What `engine_state.load` says; it has changed nothing."""
    with scenarios.running(overrides) as engine:
        before = [scenarios.parameter_hash(engine), optimizer_hash(engine), engine.scheduler.num_steps]
        with pytest.raises(CheckpointError) as error:
            engine_state.load(engine, Path(folder))
        assert [scenarios.parameter_hash(engine), optimizer_hash(engine), engine.scheduler.num_steps] == before
        return str(error.value)


@pytest.mark.parametrize(
    "there,here,tensors",
    [
        (
            MOE,
            [],
            "decoder.layers.mlp.linear_fc1.layer_norm_weight: missing; "
            "decoder.layers.mlp.linear_fc1.weight: missing; decoder.layers.mlp.linear_fc2.weight: missing",
        ),
        (
            [],
            MOE,
            "decoder.layers.mlp.experts.experts.linear_fc1.weight: missing; "
            "decoder.layers.mlp.experts.experts.linear_fc2.weight: missing; "
            "decoder.layers.mlp.router.weight: missing; decoder.layers.pre_mlp_layernorm.weight: missing",
        ),
        (
            [*MOE, "model.moe.num_experts=8"],
            MOE,
            "decoder.layers.mlp.experts.experts.linear_fc1.weight: (4, 8, 48, 32) stored, (4, 4, 48, 32) wanted; "
            "decoder.layers.mlp.experts.experts.linear_fc2.weight: (4, 8, 32, 24) stored, (4, 4, 32, 24) wanted; "
            "decoder.layers.mlp.router.weight: (4, 8, 32) stored, (4, 4, 32) wanted",
        ),
    ],
    ids=["experts-to-dense", "dense-to-experts", "8-to-4"],
)
def test_another_number_of_experts_is_refused(
    ranks: Ranks, tmp_path: Path, there: list[str], here: list[str], tensors: str
) -> None:
    ranks(1).run(scenarios.write_checkpoint, there, str(tmp_path))
    layouts = [(1, []), (2, [EP2] if here else ["parallel.tp=2"])]
    for world_size, layout in layouts:
        for message in ranks(world_size).run(refused, [*here, *layout], str(tmp_path)):
            assert message.startswith(f"{tmp_path} is of another model: {tensors}; ")


def index_reads(overrides: list[str], folder: str) -> int:
    """How often this rank reads the index of a checkpoint to load it."""
    with (
        scenarios.running(overrides) as engine,
        mock.patch.object(safe_reader, "read_index", wraps=metadata_index.read_index) as read,
    ):
        engine_state.load(engine, Path(folder))
        return int(read.call_count)


def test_the_index_of_many_parts_is_read_once(ranks: Ranks, tmp_path: Path) -> None:
    recipe = [*MODEL, EP2, SHARDED]
    ranks(2).run(part, recipe, [0], None, str(tmp_path))
    assert ranks(2).run(index_reads, recipe, str(tmp_path)) == [1, 1]


def write_half(folder: str) -> str:
    with scenarios.running([]) as engine:
        half = ShardedTensor.from_rank_offsets("a", torch.ones(2, 3), (0, 0, 2))
        one = torch_dist_files.select_shards([half], [], engine.groups.collection.dp_cp, {})
        with pytest.raises(StorageError) as error:
            torch_dist_files.write(one, Path(folder), None)
        return str(error.value)


def test_a_tensor_that_is_not_whole_is_never_written(ranks: Ranks, tmp_path: Path) -> None:
    (message,) = ranks(1).run(write_half, str(tmp_path))
    assert message == f"{tmp_path.name} was not written: rank 0: ValueError: a (4, 3) is not whole"
    assert not (tmp_path / ".metadata").exists()
