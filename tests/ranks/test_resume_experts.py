"""A run of a mixture of experts cut in two is the run, on any layout of its experts."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from sft.errors import CheckpointError, StorageError
from sft.mcore.checkpoint_io import engine_state, metadata_index, safe_reader, torch_dist_files
from tests.ranks import scenarios
from tests.ranks.layouts import AUX, MOE
from tests.ranks.pool import RankPool
from tests.ranks.resuming import SHARDED, WHOLE, check_bitwise, optimizer_hash, part

Ranks = Callable[[int], RankPool]
MODEL = [*MOE, *AUX]
EP2 = "parallel.ep=2"
CP2, TP2 = ["parallel.cp=2"], ["parallel.tp=2", "parallel.sequence_parallel=true"]
BF16 = "run.precision=bf16"

SAME = [
    (2, [EP2, SHARDED, BF16]),
    (2, [*CP2, EP2, SHARDED]),
    (2, [*TP2, WHOLE]),  # experts whole on both, reduced over a group of their own: two optimizers in a chain
    (2, [*TP2, SHARDED]),
    (4, ["parallel.pp=2", "parallel.virtual_stages=2", EP2, WHOLE]),
]


@pytest.mark.parametrize("world_size,overrides", SAME, ids=lambda v: " ".join(v) if isinstance(v, list) else str(v))
def test_the_same_layout_continues_bitwise(ranks: Ranks, tmp_path: Path, world_size: int, overrides: list[str]) -> None:
    check_bitwise(ranks(world_size), tmp_path, MODEL + overrides)


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
