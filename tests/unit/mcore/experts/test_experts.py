"""Scores of experts and sums over documents: their numbers, their gradients, and what they keep."""

from typing import Any

import numpy as np
import torch

from sft.mcore.experts import router


def scores(precision: torch.dtype) -> Any:
    torch.manual_seed(3)
    shapes = ((6, 8), (4, 8), (4,))
    inputs = [torch.randn(shape, dtype=precision, requires_grad=True) for shape in shapes]
    return *inputs, router._Logits.apply(*inputs)


def test_scores_are_products_whose_gradient_is_right() -> None:
    tokens, weight, bias, found = scores(torch.float64)
    assert torch.equal(found, tokens @ weight.T + bias)
    assert torch.equal(router._Logits.apply(tokens, weight, None), tokens @ weight.T)
    assert torch.autograd.gradcheck(router._Logits.apply, (tokens, weight, bias))
    tokens, weight, bias, found = scores(torch.bfloat16)
    assert found.dtype == torch.float32
    expected = tokens.detach().float() @ weight.detach().float().T + bias.detach().float()
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-6)
    kept = {saved.dtype for saved in found.grad_fn.saved_tensors}
    assert kept == {torch.bfloat16}  # no wide copy of the tokens


def test_a_long_document_is_summed_as_float64_would() -> None:
    """Of 131,072 tokens and 8 experts; one after another in fp32 they would be 1e-5 off."""
    generator = torch.Generator().manual_seed(3)
    odds = (2 * torch.randn(1 << 17, 8, generator=generator)).softmax(1)
    index = torch.ones(1 << 17, dtype=torch.int32)
    index[::7] = 2
    found = router._SumOfRows.apply(odds, index, 4)
    for row, expected in ((0, 0.0), (3, 0.0), (1, odds[index == 1].double().sum(0)), (2, odds[::7].double().sum(0))):
        torch.testing.assert_close(found[row], torch.as_tensor(expected).expand(8).double(), rtol=1e-12, atol=0.0)
    few = odds[:9].double().requires_grad_()
    assert torch.autograd.gradcheck(router._SumOfRows.apply, (few, index[:9], 4))
