"""Cutting a run of elements of a flat tensor into rectangular chunks, and finding the step in a stored optimizer."""

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.mcore.checkpoint_io.optimizer_shards import stored_step
from sft.mcore.sharding.parts import rectangular_chunks

GROUPS = [{"lr": 1e-3, "wd_mult": 1.0}, {"lr": 1e-3, "wd_mult": 0.0}]


def at_step(step: float) -> list[dict[str, Any]]:
    return [{**group, "step": step} for group in GROUPS]


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape, and a run of its flat elements."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    first, last = sorted(draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    return shape, first, last


@settings(max_examples=500, deadline=None)
@given(runs())
def test_boxes_hold_the_run_once_in_order_and_are_few(run: tuple[tuple[int, ...], int, int]) -> None:
    shape, first, last = run
    whole = np.arange(prod(shape)).reshape(shape)
    found = list(rectangular_chunks(first, last, shape))
    held: list[int] = []
    for offset, size in found:
        assert len(offset) == len(size) == len(shape) and all(n > 0 for n in size)
        assert all(o + n <= whole_n for o, n, whole_n in zip(offset, size, shape))
        held += whole[tuple(slice(o, o + n) for o, n in zip(offset, size))].flatten().tolist()
    assert held == list(range(first, last))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    "first,last,shape,expected",
    [
        (3, 16, (4, 5), [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 1))]),
        (5, 15, (4, 5), [((1, 0), (2, 5))]),
        (4, 6, (4, 5), [((0, 4), (1, 1)), ((1, 0), (1, 1))]),
        (0, 1, (), [((), ())]),
        # At most five chunks for three axes: a part of a row, rows, planes, rows, a part of a row.
        (
            1, 23, (4, 3, 2),
            [((0, 0, 1), (1, 1, 1)), ((0, 1, 0), (1, 2, 2)), ((1, 0, 0), (2, 3, 2)), ((3, 0, 0), (1, 2, 2)),
             ((3, 2, 0), (1, 1, 1))],
        ),
    ],
)  # fmt: skip
def test_boxes_written_out(first: int, last: int, shape: tuple[int, ...], expected: list[Any]) -> None:
    assert list(rectangular_chunks(first, last, shape)) == expected


FORMS = {  # name: (stored content, step in this content)
    "fp32": ({"state": {"common_step": torch.tensor(7.0)}, "param_groups": GROUPS}, 7),
    "fp32 at step 0": ({"state": {}, "param_groups": GROUPS}, 0),
    "fp32, counted by group": ({"state": {}, "param_groups": at_step(7)}, 7),
    "bf16": ({"optimizer": {"state": {"common_step": torch.tensor(7.0)}, "param_groups": GROUPS}}, 7),
    "bf16 at step 0": ({"optimizer": {"state": {}, "param_groups": GROUPS}}, 0),
    "distributed": ({"optimizer": {"param_groups": at_step(7.0)}, "param_state_sharding_type": "fully_reshardable"}, 7),
    "distributed at step 0": ({"optimizer": {"param_groups": at_step(0.0)}}, 0),
    "distributed, some groups without parameters": ({"optimizer": {"param_groups": [GROUPS[0], *at_step(7.0)]}}, 7),
    "chained": ({i: {"optimizer": {"param_groups": at_step(7.0)}} for i in (0, 1)}, 7),
    "chained fp32": ({0: {"state": {"common_step": torch.tensor(7.0)}, "param_groups": GROUPS}}, 7),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_the_step_of_every_form(name: str) -> None:
    stored, expected = FORMS[name]
    found = stored_step(stored)
    assert found == expected and type(found) is int


@pytest.mark.parametrize("stored", [{}, {"optimizer": {}}, {"optimizer": {"param_groups": GROUPS}}, {0: {}}], ids=str)
def test_a_form_without_a_step_is_no_step_0(stored: Any) -> None:
    with pytest.raises(KeyError):
        stored_step(stored)
