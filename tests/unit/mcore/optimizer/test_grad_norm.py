"""Sums of squares of gradients: exact to float64, with little memory, for any lists of gradients."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from sft.mcore.optimizer.build import sum_of_squares

CPU = torch.device("cpu")
TOLERANCE = 1e-12  # for float64 sums of as many numbers, in two orders


def test_written_out() -> None:
    found = sum_of_squares([torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])], CPU)
    assert found.item() == 169.0 and found.dtype == torch.float64 and found.shape == ()
    assert sum_of_squares([], CPU).item() == 0.0
    assert sum_of_squares([torch.zeros(0), torch.tensor([2.0]), torch.zeros(0, 3)], CPU).item() == 4.0
    narrow = torch.tensor([1.0, 2**-4], dtype=torch.bfloat16)  # a sum in bf16 would lose 2^-8 beside 1
    assert sum_of_squares([narrow, torch.tensor([2.0]), narrow], CPU).item() == 2 * (1 + 2**-8) + 4


@pytest.mark.parametrize("size", [(1 << 16) - 1, 1 << 16, (1 << 16) + 1, 3 << 16])
def test_pieces_leave_nothing_out(size: int) -> None:
    found = sum_of_squares([torch.full((size,), 3.0)], CPU).item()
    assert found == pytest.approx(9.0 * size, rel=TOLERANCE)


def test_what_is_no_number_or_large_stays() -> None:
    assert sum_of_squares([torch.tensor([1.0, float("nan")])], CPU).isnan()
    assert sum_of_squares([torch.tensor([float("-inf")])], CPU).item() == float("inf")
    assert sum_of_squares([torch.tensor([2.0**100])], CPU).item() == 2.0**200  # does not fit into fp32


def test_no_wide_copy_is_made() -> None:
    """A float64 copy of 32 MiB of gradients would take 64 MiB.  The test counts bytes that torch requests from its
    allocator, also inside kernels."""
    gradient = torch.ones(8 << 20)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        sum_of_squares([gradient], CPU)
    assert 0 < most_alive(profiled) <= 1 << 20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        torch.linalg.vector_norm(gradient, dtype=torch.float64)
    assert most_alive(profiled) >= 64 << 20  # the test sees a copy if there is one


def most_alive(profiled: Any) -> int:
    """The peak of the bytes that were allocated since profiling began."""
    alive = most = 0
    for _, size in sorted(allocations(profiled.profiler.kineto_results.experimental_event_tree())):
        alive += size
        most = max(most, alive)
    return most


def allocations(events: Any) -> Iterator[tuple[int, int]]:
    """(time, bytes; negative if they are freed)"""
    for event in events:
        if hasattr(event.extra_fields, "alloc_size"):
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from allocations(event.children)
