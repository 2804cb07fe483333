"""On the same layout, a run that is stopped and resumed equals an uninterrupted run, bit for bit.  Other layouts are in
test_resume_layouts.py."""

import math
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sft.errors import CheckpointError, StorageError
from sft.mcore.checkpoint_io import engine_state, metadata_index, rng, safe_reader, save_plans, torch_dist_files
from tests.ranks import layouts, scenarios
from tests.ranks.layouts import AUX, CP, LINEAR, MOE, SP
from tests.ranks.pool import Ranks

SHARDED, WHOLE = "parallel.distributed_optimizer=true", "parallel.distributed_optimizer=false"
BF16, EP2 = "run.precision=bf16", "parallel.ep=2"
SAME = [
    (1, []),
    (2, [SHARDED, BF16]),
    (2, [*SP, SHARDED]),
    (2, CP),
    (2, [*CP, "data.turns=each", *LINEAR]),
    (2, [*MOE, *AUX, EP2, SHARDED, BF16]),
    (2, [*MOE, *AUX, *SP, WHOLE]),  # experts are reduced over a group of their own: two optimizers in a chain
    (4, [*MOE, *AUX, "parallel.pp=2", "parallel.virtual_stages=2", EP2, WHOLE]),
]


@pytest.mark.parametrize("world_size,overrides", SAME, ids=str)
def test_resuming_on_the_same_layout_is_bitwise(
    ranks: Ranks, tmp_path: Path, world_size: int, overrides: list[str]
) -> None:
    scenarios.check_bitwise(ranks(world_size), tmp_path, overrides)


CHUNK_BYTES = 1000


def train_in_pieces(*given: Any) -> dict[str, Any]:
    """`train`, with stored parts of at most CHUNK_BYTES, unless a single row is larger."""
    with mock.patch.object(torch_dist_files, "CHUNK_BYTES", CHUNK_BYTES):
        return scenarios.train(*given)


def test_large_tensors_are_stored_in_pieces(ranks: Ranks, tmp_path: Path) -> None:
    """The parts are read as if they were whole: bitwise on the same layout, on the same curve on another."""
    uninterrupted = ranks(2).run(scenarios.train, [SHARDED], [0, 1])
    ranks(2).run(train_in_pieces, [SHARDED], [0], None, str(tmp_path))
    index = FileSystemReader(tmp_path).read_metadata()
    sizes = [
        math.prod(chunk.sizes) * entry.properties.dtype.itemsize
        for entry in index.state_dict_metadata.values()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    ]
    assert max(sizes) <= CHUNK_BYTES and len(sizes) > 400
    for whole, found in zip(uninterrupted, ranks(2).run(scenarios.train, [SHARDED], [1], str(tmp_path))):
        assert found["loss"] == whole["loss"][1:]
        assert (found["parameters"], found["optimizer"]) == (whole["parameters"], whole["optimizer"])
    for found in ranks(2).run(scenarios.train, ["parallel.pp=2", WHOLE], [1], str(tmp_path)):
        np.testing.assert_allclose(found["loss"], uninterrupted[0]["loss"][1:], rtol=layouts.LOSS_TOLERANCE)


def test_generators_go_on_where_they_were_on_the_same_layout_only(ranks: Ranks, tmp_path: Path) -> None:
    before = ranks(2).run(draw_and_save, ["parallel.cp=2"], str(tmp_path))
    assert before[0] != before[1]  # each rank has a random stream of its own
    assert ranks(2).run(load_and_draw, ["parallel.cp=2"], str(tmp_path)) == before
    for other in (["parallel.tp=2"], ["parallel.pp=2"], ["parallel.cp=1"]):  # the last layout has the same groups
        drawn = ranks(2).run(load_and_draw, other, str(tmp_path))
        assert not any(now == then for now, then in zip(drawn, before, strict=True))


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


def drawn_after_a_load(folder: str) -> tuple[float, float]:
    """The next random number of torch before and after a checkpoint is loaded that has a state of CUDA's generator."""
    of_cuda = torch.arange(16, dtype=torch.uint8)  # seed and offset, 8 bytes each
    with scenarios.running([]) as engine:
        state = rng._state() | {"cuda_rng_state": of_cuda}
        with mock.patch.object(rng, "_state", lambda: state):
            scenarios.save(engine, Path(folder), {"iteration": 2})
        before = torch.get_rng_state()
        torch.rand(7)
        expected = torch.rand(1, generator=torch.Generator().set_state(torch.get_rng_state()))
        engine_state.load(engine, Path(folder))
        assert not torch.equal(before, torch.get_rng_state())
        return float(expected), float(torch.rand(1))


def test_a_checkpoint_of_a_gpu_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    """The generators of the CPU keep their states.  tests/gpu/test_training.py tests the other direction."""
    ((expected, found),) = ranks(1).run(drawn_after_a_load, str(tmp_path))
    assert found == expected


@pytest.mark.parametrize("optimizer", [WHOLE, SHARDED])
def test_a_checkpoint_of_step_0_resumes(ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
    (whole,) = ranks(1).run(scenarios.train, [optimizer], [0])
    ranks(1).run(scenarios.write_checkpoint, [optimizer], str(tmp_path))
    (resumed,) = ranks(1).run(scenarios.train, [optimizer], [0], str(tmp_path))
    assert resumed == whole


def refused(overrides: list[str], folder: str) -> str:
    """The error of `engine_state.load`, after which the engine is unchanged."""
    with scenarios.running(overrides) as engine:
        before = [scenarios.parameter_hash(engine), scenarios.optimizer_hash(engine), engine.scheduler.num_steps]
        with pytest.raises(CheckpointError) as error:
            engine_state.load(engine, Path(folder))
        after = [scenarios.parameter_hash(engine), scenarios.optimizer_hash(engine), engine.scheduler.num_steps]
        assert after == before
        return str(error.value)


@pytest.mark.parametrize(
    "there,here,tensors",
    [
        (
            [],
            ["model.ffn_hidden_size=96"],
            "decoder.layers.mlp.linear_fc1.weight: (4, 128, 32) in the checkpoint, (4, 192, 32) in the model; "
            "decoder.layers.mlp.linear_fc2.weight: (4, 32, 64) in the checkpoint, (4, 32, 96) in the model; "
            "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight: (4, 128, 32) in the checkpoint, (4, 192, "
            "32) in the model; optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight: (4, 32, 64) in the "
            "checkpoint, (4, 32, 96) in the model; optimizer.state.exp_avg_sq.decoder.layers.mlp.linear_fc1.weight: "
            "(4, 128, 32) in the checkpoint, (4, 192, 32) in the model; and 1 more.",
        ),
        (
            MOE,
            [],
            "decoder.layers.mlp.linear_fc1.layer_norm_weight: missing; "
            "decoder.layers.mlp.linear_fc1.weight: missing; decoder.layers.mlp.linear_fc2.weight: missing; ",
        ),
        (
            [*MOE, "model.moe.num_experts=8"],
            [*MOE, EP2],
            "decoder.layers.mlp.experts.experts.linear_fc1.weight: (4, 8, 48, 32) in the checkpoint, (4, 4, 48, 32) "
            "in the model; decoder.layers.mlp.experts.experts.linear_fc2.weight: (4, 8, 32, 24) in the checkpoint, "
            "(4, 4, 32, 24) in the model; decoder.layers.mlp.router.weight: (4, 8, 32) in the checkpoint, (4, 4, 32) "
            "in the model; ",
        ),
    ],
    ids=["another width", "experts to dense", "8 to 4 experts"],
)
def test_another_model_is_refused_in_our_words(
    ranks: Ranks, tmp_path: Path, there: list[str], here: list[str], tensors: str
) -> None:
    ranks(1).run(scenarios.write_checkpoint, there, str(tmp_path))
    for message in ranks(2).run(refused, here, str(tmp_path)):
        assert message.startswith(f"{tmp_path} is of another model: {tensors}")


def index_reads(overrides: list[str], folder: str) -> int:
    """How often this rank reads the index of a checkpoint to load it."""
    with (
        scenarios.running(overrides) as engine,
        mock.patch.object(safe_reader, "read_index", wraps=metadata_index.read_index) as read,
    ):
        engine_state.load(engine, Path(folder))
        return int(read.call_count)


def test_the_index_of_many_parts_is_read_once(ranks: Ranks, tmp_path: Path) -> None:
    recipe = [*MOE, EP2, SHARDED]
    ranks(2).run(scenarios.write_checkpoint, recipe, str(tmp_path))
    assert ranks(2).run(index_reads, recipe, str(tmp_path)) == [1, 1]


def write_half(folder: str) -> str:
    with scenarios.running([]) as engine:
        half = ShardedTensor.from_rank_offsets("a", torch.ones(2, 3), (0, 0, 2))
        plans = save_plans.SavePlans()
        one = torch_dist_files.select_shards([half], [], engine.groups, {}, plans)
        with pytest.raises(StorageError) as error:
            torch_dist_files.write(one, Path(folder), engine.groups.control, plans)
        return str(error.value)


def test_a_tensor_that_is_not_whole_is_never_written(ranks: Ranks, tmp_path: Path) -> None:
    (message,) = ranks(1).run(write_half, str(tmp_path))
    assert message == f"{tmp_path.name} was not written: rank 0: ValueError: a (4, 3) lacks chunks"
    assert not (tmp_path / ".metadata").exists()
