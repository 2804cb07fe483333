"""A checkpoint that a GPU has written goes on on a CPU.  Of the other direction: tests/gpu/test_training.py."""

from pathlib import Path
from unittest import mock

import torch

from sft.mcore.checkpoint_io import engine_state, rng
from tests.ranks import scenarios
from tests.ranks.pool import Ranks

OF_CUDA = torch.arange(16, dtype=torch.uint8)  # a state of CUDA's generator: seed and offset, 8 bytes each


def drawn_after_a_load(folder: str) -> tuple[float, float]:
    """The next random number of torch before and after loading a checkpoint with a state of CUDA's generator."""
    with scenarios.running([]) as engine:
        state = rng._state() | {"cuda_rng_state": OF_CUDA}
        with mock.patch.object(rng, "_state", lambda: state):
            scenarios.save(engine, Path(folder), {"iteration": 2})
        before = torch.get_rng_state()
        torch.rand(7)
        expected = torch.rand(1, generator=torch.Generator().set_state(torch.get_rng_state()))
        engine_state.load(engine, Path(folder))
        assert not torch.equal(before, torch.get_rng_state())
        return float(expected), float(torch.rand(1))


def test_a_checkpoint_of_a_gpu_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    """And the generators stay as they are: a state of another kind of device means nothing here."""
    ((expected, found),) = ranks(1).run(drawn_after_a_load, str(tmp_path))
    assert found == expected
