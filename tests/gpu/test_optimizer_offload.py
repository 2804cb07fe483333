"""Adam in host memory on one GPU: where its tensors are, and that the curve does not tell.

What CPU runs show of it is in tests/ranks/test_optimizer_offload.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from sft.mcore.optimizer import offload
from sft.mcore.optimizer.offload import adam_instances
from tests.gpu import test_training
from tests.gpu.runs import BF16_TOLERANCE, losses
from tests.ranks import scenarios

BF16 = ["run.precision=bf16", "parallel.distributed_optimizer=true"]


def share(fraction: float) -> list[str]:
    return [*BF16, f"optim.offload_fraction={fraction}"]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_the_curve_does_not_tell_the_share(fraction: float) -> None:
    np.testing.assert_allclose(losses(share(fraction)), losses(share(0.0)), rtol=BF16_TOLERANCE)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_the_share_leaves_the_device(fraction: float) -> None:
    sizes = {"cpu": 0, "cuda": 0}
    with test_training.running(share(fraction)) as engine:
        loader = scenarios.loader_of(engine, scenarios.SkewedCorpus(scenarios.LENGTHS))
        engine.train_step(loader.microbatches(0))
        (part,) = offload.chained_optimizers(engine.optimizer)
        for adam in adam_instances(part):
            for tensor, state in adam.state.items():
                sizes[tensor.device.type] += tensor.numel()
                assert tensor.dtype == torch.float32
                assert state["exp_avg"].device == state["exp_avg_sq"].device == tensor.device
                assert tensor.grad is not None and tensor.grad.is_pinned() == (tensor.device.type == "cpu")
        for group in part.optimizer.param_groups:
            assert all(param.is_cuda and param.dtype == torch.bfloat16 for param in group["params"])
    total = sum(sizes.values())
    assert total > 50_000 and fraction * total <= sizes["cpu"] <= total
    assert (sizes["cuda"] == 0) == (fraction == 1.0)


@pytest.mark.parametrize("before,after", [(0.0, 1.0), (1.0, 0.5), (0.5, 0.0)])
def test_a_checkpoint_goes_on_with_another_share(tmp_path: Path, before: float, after: float) -> None:
    with test_training.running(share(before)) as engine:
        loader = scenarios.loader_of(engine, scenarios.SkewedCorpus(scenarios.LENGTHS))
        for step in range(2):
            engine.train_step(loader.microbatches(step))
        scenarios.save(engine, tmp_path, {"iteration": 2})
        results = [engine.train_step(loader.microbatches(step)) for step in range(2, 5)]
        expected = [r.objective / r.num_tokens for r in results]
    np.testing.assert_allclose(losses(share(after), range(2, 5), tmp_path), expected, rtol=BF16_TOLERANCE)
