"""Sorting tokens by expert and adding their rows up again, against loops in float64."""

import pytest
import torch
from torch import Tensor

from sft.mcore.experts import dispatch
from sft.mcore.experts.dispatch import Permutation, sums_of_rows

# Tokens 0 to 3 go to these of four experts; token 3 was dropped by one of its two.
MAP = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 0]], dtype=torch.bool)
ROWS = [(0, 0), (2, 0), (1, 1), (0, 2), (1, 2), (3, 2), (2, 3)]  # (token, expert), sorted by expert


def test_permutation() -> None:
    permutation = Permutation.of(MAP, 2, len(ROWS))
    assert permutation.source.tolist() == [token for token, _ in ROWS]
    assert permutation.rows.tolist() == [[0, 2, 1, 5], [3, 4, 6, -1]]
    probs = torch.arange(16.0).view(4, 4).requires_grad_()
    weights = permutation.weights(probs)
    assert weights.tolist() == [4.0 * token + expert for token, expert in ROWS]
    weights.backward(torch.arange(1.0, 8.0))
    expected = torch.zeros(4, 4)
    for number, pair in enumerate(ROWS):
        expected[pair] = number + 1
    assert probs.grad is not None and torch.equal(probs.grad, expected)


def test_a_sum_is_rounded_once() -> None:
    """1 + 3 * 2^-9 is between two numbers of bf16; added one after another, each 2^-9 would be lost."""
    small = 2.0**-9
    x = torch.tensor([[1.0], [small], [small], [small]], dtype=torch.bfloat16)
    rows = torch.tensor([[0], [1], [2], [3]])
    assert sums_of_rows(x, rows).item() == 1.0078125


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward(dtype: torch.dtype) -> None:
    """Each number is a sum of at most two, in fp32, so its error is one rounding."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(4, 8, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(4, 8, generator=generator).to(dtype)
    permutation = Permutation.of(MAP, 2, len(ROWS))
    sorted_rows: Tensor = dispatch._Sort.apply(tokens, permutation)
    assert torch.equal(sorted_rows, torch.stack([tokens[token] for token, _ in ROWS]))
    output = dispatch._Combine.apply(sorted_rows * 2, permutation)
    output.backward(upstream)
    number = MAP.sum(1, keepdim=True).double()
    rounding = torch.finfo(dtype).eps / 2
    assert tokens.grad is not None
    for computed, right in ((output, 2 * number * tokens.double()), (tokens.grad, 2 * number * upstream.double())):
        torch.testing.assert_close(computed.double(), right, rtol=rounding, atol=0)


def test_without_any_row() -> None:
    permutation = Permutation.of(torch.zeros(3, 4, dtype=torch.bool), 2, 0)
    tokens = torch.ones(3, 8, requires_grad=True)
    rows = dispatch._Sort.apply(tokens, permutation)
    output = dispatch._Combine.apply(rows, permutation)
    assert rows.shape == (0, 8) and not output.any()
    output.sum().backward()
    assert tokens.grad is not None and not tokens.grad.any()
