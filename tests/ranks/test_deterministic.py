"""run.deterministic on a CPU: two runs have equal numbers, from kernels that are also deterministic on a GPU.

torch then also fills new tensors with NaN, so a number read from uninitialised memory would be NaN.
"""

from collections.abc import Sequence

import pytest
import torch

from tests.ranks import scenarios
from tests.ranks.layouts import CP, EP, MOE, SHARDED, SP
from tests.ranks.pool import Ranks

LAYOUTS = {
    "cp, recompute, tied": [*CP, "train.recompute=selective", "model.tie_embeddings=true"],
    "tp": [*SP, *SHARDED],
    "experts": [*MOE, "model.moe.z_loss_coef=0.01", *EP],
}


def end(overrides: Sequence[str]) -> tuple[bool, list[tuple[float, float]], str]:
    """Whether torch uses deterministic algorithms; loss and gradient norm of each step; and a hash of the weights."""
    with scenarios.running(overrides) as engine:
        results = scenarios.train_steps(engine, [0, 1])
        is_on = torch.are_deterministic_algorithms_enabled()
        assert engine.core_config.deterministic_mode is is_on
        return is_on, [(r.objective, r.grad_norm) for r in results], scenarios.parameter_hash(engine)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_numbers_with_and_without(ranks: Ranks, layout: str) -> None:
    with_it = ranks(2).run(end, [*LAYOUTS[layout], "run.deterministic=true"])
    without = ranks(2).run(end, LAYOUTS[layout])
    assert [found[0] for found in with_it + without] == [True, True, False, False]
    assert [found[1:] for found in with_it] == [found[1:] for found in without]
