"""megatron-core's own Muon makes the updates of ours, on the weights of which both have the same matrices.

Needs Python 3.12 and `pip install emerging-optimizers`.  Core orthogonalises gate and up of an MLP as one matrix, so
only weights of attention are compared.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.ranks import scenarios
from tests.ranks.layouts import MOE
from tests.ranks.pool import Ranks
from tests.ranks.test_muon import CURVE_TOLERANCE, FP32, STEPS, before

pytest.importorskip("emerging_optimizers", reason="an optional package of Python 3.12: emerging-optimizers")

HEADS = [8, 4, 4]  # rows of query, key and value of each key head of scenarios.RECIPE


def difference(overrides: Sequence[str]) -> float:
    """Trains on one process, and lets core's Muon update copies with the same gradients.  Returns the largest relative
    difference of a weight afterwards."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    with scenarios.running([*overrides, f"train.num_steps={STEPS}"]) as engine:
        weights = {
            n: p for n, p in engine.chunks[0].module.named_parameters() if n.endswith(("qkv.weight", "proj.weight"))
        }
        copies = {name: torch.nn.Parameter(param.detach().clone()) for name, param in weights.items()}
        fused = {id(copy) for name, copy in copies.items() if name.endswith("qkv.weight")}
        assert len(fused) == 2 and len(copies) == 4
        reference = TensorParallelMuon(
            list(copies.values()),
            momentum=0.95,
            weight_decay=0.1,
            split_qkv=True,
            is_qkv_fn=lambda param: id(param) in fused,
            qkv_split_shapes=HEADS,
            fp32_matmul_prec="highest",
            coefficient_type="simple",
            scale_mode="spectral",
            extra_scale_factor=0.2,  # spectral: the square root of the longer side
        )

        def follow() -> None:
            reference.param_groups[0]["lr"] = engine.optimizer.param_groups[-1]["lr"]
            for name, copy in copies.items():
                copy.grad = weights[name].grad.clone()
            reference.step()

        loader = scenarios.loader_of(engine)
        step: Callable[..., Any] = engine.optimizer.step_with_ready_grads
        engine.optimizer.step_with_ready_grads = before(step, follow)
        for number in range(STEPS):
            engine.train_step(loader.microbatches(number % 5))
        return max(float((weights[n].detach() - copy).norm() / copy.norm()) for n, copy in copies.items())


@pytest.mark.parametrize("overrides", [[], MOE], ids=["dense", "experts"])
def test_core_makes_the_same_updates(ranks: Ranks, overrides: list[str]) -> None:
    (found,) = ranks(1).run(difference, [*FP32, *overrides])
    assert found < CURVE_TOLERANCE
