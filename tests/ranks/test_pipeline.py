"""Pipeline stages exchange packs of various lengths without sending shapes, so the host never waits for a device.

tests/ranks/test_one_curve.py checks that the numbers are those of one stage.
"""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sft.mcore.pipeline import PackCommunicator
from tests.builders import answer
from tests.ranks import scenarios
from tests.ranks.pool import Ranks

PIPELINES = [["parallel.pp=2"], ["parallel.pp=2", "parallel.virtual_stages=2"]]
LENGTHS = [32, 64, 96, 128]  # of the four packs of a step


def packs(engine: Any) -> list[Any]:
    samples = [answer(length, 8, seed=length, last=scenarios.VOCAB) for length in LENGTHS]
    return [scenarios.microbatch_of(engine, [sample]) for sample in samples]


def waits(overrides: list[str]) -> tuple[int, int]:
    """How often a training step and a held-out pass would have waited for a GPU, and how many shapes were sent."""
    sent: list[torch.dtype] = []
    batch = dist.batch_isend_irecv

    def recording(ops: list[Any]) -> Any:
        sent.extend(op.tensor.dtype for op in ops)
        return batch(ops)

    with scenarios.running(overrides) as engine:
        with (
            mock.patch.object(torch.cuda, "synchronize") as synchronize,
            mock.patch.object(dist, "batch_isend_irecv", recording),
        ):
            engine.train_step(packs(engine))
            engine.evaluate(packs(engine))
        return synchronize.call_count, sent.count(torch.int64)


@pytest.mark.parametrize("overrides", PIPELINES)
def test_an_exchange_does_not_wait(ranks: Ranks, overrides: list[str]) -> None:
    assert ranks(2).run(waits, overrides) == [(0, 0)] * 2


def received(overrides: list[str]) -> tuple[list[int], list[int]]:
    """The number of tokens in the hidden states from the previous stage, and in the gradients from the next stage, in
    order."""
    with scenarios.running(overrides) as engine:
        exchange = PackCommunicator(packs(engine), engine.layout, engine.groups, engine.core_config)
        rows = []
        for shapes in exchange._from_previous, exchange._from_next:
            tokens, ones, hidden = zip(*shapes) if (shapes := list(shapes)) else ((), (), ())
            assert {*ones} <= {1} and {*hidden} <= {32}
            rows.append(list(tokens))
        return rows[0], rows[1]


@pytest.mark.parametrize(
    "world_size, overrides, expected",
    [
        (2, PIPELINES[0], [([], [32, 64, 96, 128]), ([32, 64, 96, 128], [])]),
        # Two packs at a time go through both chunks of a rank: the second rank receives each pack twice.
        (2, PIPELINES[1], [(LENGTHS, [32, 64] * 2 + [96, 128] * 2), ([32, 64] * 2 + [96, 128] * 2, LENGTHS)]),
        # A tp rank has half of the tokens, a rank of tp and cp a quarter.
        (4, [*PIPELINES[0], "parallel.tp=2", "parallel.sequence_parallel=true"], [([], [16, 32, 48, 64])] * 2),
        (4, [*PIPELINES[0], "parallel.cp=2"], [([], [16, 32, 48, 64])] * 2),
    ],
)
def test_shapes_in_order(
    ranks: Ranks, world_size: int, overrides: list[str], expected: list[tuple[list[int], list[int]]]
) -> None:
    found = ranks(world_size).run(received, overrides)
    assert found[: len(expected)] == expected


def outputs(overrides: list[str]) -> list[int]:
    """The number of tokens in each output of this stage's layers that waits for backward, after a step of four
    packs."""
    made: list[torch.Tensor] = []
    with scenarios.running(overrides) as engine:
        for chunk in engine.chunks:
            chunk.module.decoder.register_forward_hook(lambda module, given, output: made.append(output))
        engine.train_step(packs(engine))
        return [output.numel() // 32 for output in made]


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (PIPELINES[0], [[0, 0, 0, 0], LENGTHS]),  # of a sent output, a single number stays
        (PIPELINES[1], [[32, 64] * 2 + [96, 128] * 2] * 2),  # these may still be in transfer
    ],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_stage_frees_what_it_has_sent(
    ranks: Ranks, overrides: list[str], expected: list[list[int]], recompute: str
) -> None:
    assert ranks(2).run(outputs, [*overrides, f"train.recompute={recompute}"]) == expected


def kept_inputs(overrides: list[str]) -> list[bool]:
    """Whether each model chunk of this rank still holds, after a step, the hidden states that it received."""
    with scenarios.running(overrides) as engine:
        engine.train_step(packs(engine))
        return [chunk.module.decoder.input_tensor is not None for chunk in engine.chunks]


@pytest.mark.parametrize("overrides", PIPELINES)
def test_no_chunk_keeps_what_it_has_received(ranks: Ranks, overrides: list[str]) -> None:
    chunks = 2 if "parallel.virtual_stages=2" in overrides else 1
    assert ranks(2).run(kept_inputs, overrides) == [[False] * chunks] * 2
