"""RMSNorm's kernel on a GPU against plain torch: eps and weight reach it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft.mcore.norm import RMSNorm, _RMSNorm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the norm


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_the_kernel_is_plain_torch(dtype: torch.dtype, eps: float) -> None:
    torch.manual_seed(4)
    config: Any = SimpleNamespace(params_dtype=dtype, sequence_parallel=False)
    norm = RMSNorm(config, 256, eps=eps).cuda()
    norm.weight.data.normal_()
    weight = norm.weight.detach().clone().requires_grad_()
    x, grad = (torch.randn(300, 2, 256, device="cuda").to(dtype) for _ in range(2))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = norm(a), _RMSNorm.apply(b, weight, eps)
    found.backward(grad)
    expected.backward(grad)
    assert norm.weight.grad is not None
    for mine, theirs in ((found, expected), (a.grad, b.grad), (norm.weight.grad, weight.grad)):
        assert mine.dtype == dtype
        assert (mine.float() - theirs.float()).norm() <= TOLERANCE[dtype] * theirs.float().norm()
