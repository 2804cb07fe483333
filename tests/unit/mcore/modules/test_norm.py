"""RMSNorm in plain torch: value and gradients equal those of torch, and 16-bit results are rounded once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from sft.mcore.modules.norm import RMSNorm

FLOAT64_TOLERANCE = 1e-12
OF_OTHER_ORDERS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # sums over 500 rows in another order, then one rounding


def norm(weight: Tensor, eps: float, sequence_parallel: bool = False, zero_centered: bool = False) -> RMSNorm:
    config: Any = SimpleNamespace(
        params_dtype=weight.dtype, sequence_parallel=sequence_parallel, layernorm_zero_centered_gamma=zero_centered
    )
    made = RMSNorm(config, len(weight), eps=eps)
    made.weight.data.copy_(weight)
    return made


def test_written_out() -> None:
    """The mean square is 12.5, plus 3.5 of epsilon: x / 4."""
    found = norm(torch.tensor([1.0, 2.0]), eps=3.5)(torch.tensor([[3.0, 4.0], [-4.0, 3.0]]))
    assert found.tolist() == [[0.75, 2.0], [-1.0, 1.5]]


@pytest.mark.parametrize("shape, eps", [((7, 6), 1e-6), ((3, 2, 4, 6), 0.5)])
def test_gradients_are_those_of_torch(shape: tuple[int, ...], eps: float) -> None:
    torch.manual_seed(2)
    weight = torch.randn(6, dtype=torch.float64)
    x, grad = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    mine, theirs = norm(weight, eps), weight.clone().requires_grad_()
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = mine(a), torch.nn.functional.rms_norm(b, (6,), theirs, eps)
    found.backward(grad)
    expected.backward(grad)
    for pair in ((found, expected), (a.grad, b.grad), (mine.weight.grad, theirs.grad)):
        torch.testing.assert_close(*pair, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


def test_bf16_is_computed_in_fp32_and_rounded_once() -> None:
    torch.manual_seed(3)
    weight = torch.randn(64).bfloat16()
    x, grad = (torch.randn(500, 64).bfloat16() for _ in range(2))
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        mine, a = norm(weight.to(dtype), 1e-6), x.detach().to(dtype).clone().requires_grad_()
        out = mine(a)
        assert out.dtype == dtype
        out.backward(grad.to(dtype))
        results.append((out, a.grad, mine.weight.grad))
    for narrow, wide in zip(*results):
        assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_weight_tells_whether_it_saw_a_slice_of_the_tokens(sequence_parallel: bool) -> None:
    made = norm(torch.ones(4), 1e-6, sequence_parallel)
    assert made.weight.sequence_parallel is sequence_parallel  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_that_is_an_offset_from_1_is_that_of_gemma(dtype: torch.dtype) -> None:
    """Value and gradients agree; most sums 1 + w cannot be represented in bf16, and are not rounded to it."""
    torch.manual_seed(4)
    weight = (0.3 * torch.randn(64)).to(dtype)
    x, grad = (torch.randn(500, 64).to(dtype) for _ in range(2))
    theirs = Gemma3RMSNorm(64, eps=1e-6).to(dtype)
    theirs.weight.data.copy_(weight)
    results = []
    for module in (norm(weight, 1e-6, zero_centered=True), theirs):
        a = x.clone().requires_grad_()
        out = module(a)
        out.backward(grad)
        results.append((out, a.grad, module.weight.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=OF_OTHER_ORDERS[dtype], atol=OF_OTHER_ORDERS[dtype])
    if dtype is torch.bfloat16:
        assert torch.equal(results[0][0], results[1][0])


def test_a_new_weight_does_not_change_its_input() -> None:
    made = norm(torch.zeros(4), 1e-6, zero_centered=True)
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    torch.testing.assert_close(made(x), x)
