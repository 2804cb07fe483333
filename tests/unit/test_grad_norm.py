"""Sums of squares of gradients: exact to float64, in little memory, and of whatever lists of gradients there are."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.profiler import ProfilerActivity, profile

from sft.mcore.optimizer.build import sum_of_squares

CPU = torch.device("cpu")
TOLERANCE = 1e-12  # of float64 sums of 20 million numbers, in two orders: 1e-15 was found
MOST_EXTRA = 64 << 20  # bytes
VOCAB, HIDDEN = 151_936, 128


def of_embedding() -> Tensor:
    """A gradient [vocabulary, hidden]: the rows of a few frequent tokens are large, all others small."""
    rows = 1e-4 * torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    rows[:5] += 1.0
    return rows


def exact(gradient: Tensor) -> float:
    return sum(row.double().square().sum().item() for row in gradient.view(-1).split(HIDDEN * 64))


def test_written_out() -> None:
    found = sum_of_squares([torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])], CPU)
    assert found.item() == 169.0 and found.dtype == torch.float64 and found.shape == ()


def test_none_and_empty_ones() -> None:
    assert sum_of_squares([], CPU).item() == 0.0
    assert sum_of_squares([torch.zeros(0), torch.tensor([2.0]), torch.zeros(0, 3)], CPU).item() == 4.0


def test_two_precisions_together() -> None:
    """2^-8 is lost beside 1 where bf16 is summed in bf16."""
    narrow = torch.tensor([1.0, 2**-4], dtype=torch.bfloat16)
    assert sum_of_squares([narrow, torch.tensor([2.0]), narrow], CPU).item() == 2 * (1 + 2**-8) + 4


@pytest.mark.parametrize("size", [(1 << 16) - 1, 1 << 16, (1 << 16) + 1, 3 << 16])
def test_pieces_leave_nothing_out(size: int) -> None:
    found = sum_of_squares([torch.full((size,), 3.0)], CPU).item()
    assert found == pytest.approx(9.0 * size, rel=TOLERANCE)


def test_what_is_no_number_or_large_stays() -> None:
    assert sum_of_squares([torch.tensor([1.0, float("nan")])], CPU).isnan()
    assert sum_of_squares([torch.tensor([float("-inf")])], CPU).item() == float("inf")
    assert sum_of_squares([torch.tensor([2.0**100])], CPU).item() == 2.0**200  # no fp32


def test_of_a_real_vocabulary() -> None:
    gradient = of_embedding()
    expected = exact(gradient)
    assert sum_of_squares([gradient], CPU).item() == pytest.approx(expected, rel=TOLERANCE)
    assert abs(get_total_norm([gradient]).item() / expected**0.5 - 1) > 1e-5  # torch's, which this is in place of


def test_no_wide_copy_is_made() -> None:
    """Of 74 MiB of gradient float64 would be 148.  Bytes that torch asked its allocator for, within its kernels too."""
    gradient = of_embedding()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        sum_of_squares([gradient], CPU)
    assert 0 < most_alive(profiled) <= 1 << 20 < MOST_EXTRA
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        torch.linalg.vector_norm(gradient, dtype=torch.float64)
    assert most_alive(profiled) > 2 * gradient.nbytes - (1 << 20)  # it is seen where there is one


def most_alive(profiled: Any) -> int:
    """Bytes, at the most, of what was allocated since profiling began."""
    alive = most = 0
    for _, size in sorted(allocations(profiled.profiler.kineto_results.experimental_event_tree())):
        alive += size
        most = max(most, alive)
    return most


def allocations(events: Any) -> Iterator[tuple[int, int]]:
    """(when, bytes; below 0 where they are freed)"""
    for event in events:
        if hasattr(event.extra_fields, "alloc_size"):
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from allocations(event.children)
