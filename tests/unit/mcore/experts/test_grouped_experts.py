"""A grouped product equals a loop over experts, with gradients, also for experts without rows."""

import pytest
import torch
from torch import Tensor

from sft.mcore.experts.grouped import add_biases
from sft.mcore.experts.rows import GroupedProduct, RowsOfExperts

COUNTS, COLUMNS, ROWS = [3, 0, 9, 0], 32, 16
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative to the largest element; sums have other orders


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, matrices, and the gradient of the product, which is not contiguous."""
    generator = torch.Generator().manual_seed(5)
    shapes = (sum(COUNTS), COLUMNS), (len(COUNTS), ROWS, COLUMNS), (ROWS, sum(COUNTS))
    x, matrices, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x.requires_grad_(), matrices.requires_grad_(), grad.t()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_kernel_and_the_loop_are_each_expert_by_itself(dtype: torch.dtype) -> None:
    """Compared with float64.  On the CPU, torch computes what the kernel computes on a GPU."""
    ends = torch.tensor([3, 3, 12, 12], dtype=torch.int32)
    x, matrices, grad = (tensor.detach().double() for tensor in operands(dtype))
    parts = [(x[:3], matrices[0], grad[:3]), (x[3:], matrices[2], grad[3:])]
    expected = [
        torch.cat([rows @ matrix.t() for rows, matrix, _ in parts]),
        torch.cat([of_rows @ matrix for _, matrix, of_rows in parts]),
        torch.stack([m for rows, _, of_rows in parts for m in (of_rows.t() @ rows, torch.zeros(ROWS, COLUMNS))]),
    ]
    for compute in (
        lambda x, matrices: GroupedProduct.apply(x, ends, matrices),
        lambda x, matrices: GroupedProduct.apply(x, ends, *matrices),
        lambda x, matrices: RowsOfExperts.of(COUNTS, CPU).times(x, matrices),
    ):
        rows, stack, upstream = operands(dtype)
        output = compute(rows, stack)
        output.backward(upstream)
        for computed, right in zip((output, rows.grad, stack.grad), expected, strict=True):
            assert computed is not None
            assert computed.dtype is dtype
            torch.testing.assert_close(
                computed.double(), right, rtol=0, atol=TOLERANCE[dtype] * float(right.abs().max())
            )


def test_a_gradient_that_nobody_needs_is_not_computed() -> None:
    x, matrices, grad = operands(torch.float32)
    GroupedProduct.apply(x, torch.tensor([3, 3, 12, 12], dtype=torch.int32), matrices.detach()).backward(grad)
    assert x.grad is not None


def test_no_rows_at_all() -> None:
    """Gradients are zeros, so that every rank of ep joins the same gradient reductions."""
    _, matrices, _ = operands(torch.float32)
    x = torch.empty(0, COLUMNS, requires_grad=True)
    RowsOfExperts.of([0, 0, 0, 0], CPU).times(x, matrices).sum().backward()
    assert matrices.grad is not None and not matrices.grad.any()


@pytest.mark.parametrize("rank", [16, 4], ids=["aligned", "not aligned"])
def test_the_kernel_takes_aligned_matrices(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """bf16 on a GPU of compute capability 9; on a rank of tp 4, rows have 8 bytes."""
    called = []
    monkeypatch.setattr(GroupedProduct, "apply", lambda x, ends, matrices: called.append(ends) or x[:, :1])
    rows = RowsOfExperts(COUNTS, torch.tensor([3, 3, 12, 12], dtype=torch.int32))
    x = torch.ones(sum(COUNTS), COLUMNS, dtype=torch.bfloat16)
    rows.times(x, torch.ones(len(COUNTS), rank, COLUMNS, dtype=torch.bfloat16))
    assert len(called) == (rank == 16)


@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_biases_of_experts(is_weighted: bool) -> None:
    """Against autograd of a loop in float64."""
    generator = torch.Generator().manual_seed(6)
    shapes = (sum(COUNTS), COLUMNS), (len(COUNTS), COLUMNS), (sum(COUNTS),), (sum(COUNTS), COLUMNS)
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    results = []
    for dtype in (torch.float32, torch.float64):
        output, biases, weights, grad = (tensor.clone().to(dtype).requires_grad_() for tensor in given)
        factors = weights if is_weighted else None
        if dtype is torch.float32:
            total = add_biases(output * 1, biases.unbind(), COUNTS, factors)
        else:
            by_row = torch.cat([bias.expand(count, -1) for bias, count in zip(biases, COUNTS)])
            total = output + (by_row if factors is None else by_row * factors[:, None])
        total.backward(grad.detach())
        results.append([total, output.grad, biases.grad, *([weights.grad] if is_weighted else [])])
    for computed, right in zip(*results, strict=True):
        torch.testing.assert_close(computed.double(), right, rtol=1e-5, atol=1e-5)
    assert add_biases(given[0], None, COUNTS, None) is given[0]
