"""Products with matrices of experts in low bits: equal to those with the matrices, one group of experts at a time."""

import pytest
import torch
from torch import Tensor

from sft.mcore.experts import rows
from sft.mcore.experts.rows import RowsOfExperts


class Matrix:
    """A stored matrix.  `written` collects the numbers of the experts whose matrices were dequantised."""

    is_held = True

    def __init__(self, number: int, values: Tensor, written: list[int]) -> None:
        self.number, self.values, self.written = number, values, written
        self.param = torch.nn.Parameter(values.new_zeros(values.shape), requires_grad=False)

    def write_to(self, whole: Tensor) -> None:
        self.written.append(self.number)
        whole.copy_(self.values)


def test_groups_give_the_product_of_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 experts of 6 x 4 numbers in fp32, in groups of 2.  Experts 2 and 3, a whole group, have no rows."""
    monkeypatch.setattr(rows, "GROUP_BYTES", 2 * 6 * 4 * 4)
    generator, written = torch.Generator().manual_seed(1), list[int]()
    matrices = torch.randn(5, 6, 4, generator=generator)
    stored = [Matrix(number, values, written) for number, values in enumerate(matrices)]
    division = RowsOfExperts([3, 1, 0, 0, 2], None)
    x = torch.randn(6, 4, generator=generator)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    output, expected = division.times_stored(leaves[0], stored), division.times(leaves[1], matrices)
    grad = torch.randn(6, 6, generator=generator)
    output.backward(grad)
    expected.backward(grad)
    assert torch.equal(output, expected) and torch.equal(leaves[0].grad, leaves[1].grad)  # type: ignore[arg-type]
    assert written == [0, 1, 4, 0, 1, 4]


def test_a_group_has_at_most_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "GROUP_BYTES", 2 * 6 * 4 * 4)
    stored = [Matrix(number, torch.ones(6, 4), []) for number in range(5)]
    division = RowsOfExperts([1, 1, 1, 1, 1], torch.arange(1, 6, dtype=torch.int32))
    groups = [(span, own.counts, own.ends.tolist(), len(values)) for span, own, values in division.groups(stored)]
    assert groups == [
        (slice(0, 2), [1, 1], [1, 2], 2),
        (slice(2, 4), [1, 1], [1, 2], 2),
        (slice(4, 5), [1], [1], 1),
    ]
