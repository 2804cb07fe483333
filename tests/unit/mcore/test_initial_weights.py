"""Random parts of a parameter equal parts of the whole parameter that plain torch draws at once."""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sft.mcore import initial_weights
from sft.mcore.initial_weights import draw_by_block, draw_in_sequence

NAME, STD = "7:decoder.layers.mlp.linear_fc1.weight(3,)", 0.02
Draw = Callable[..., None]


class Drawn(TorchDispatchMode):
    """sizes: the number of values of every random draw; largest: the number of elements of the largest tensor"""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket._qualified_op_name == "aten::empty":
            self.largest = max(self.largest, result.numel())
        if func.overloadpacket._qualified_op_name == "aten::normal_":
            self.sizes.append(result.numel())
        return result


def drawn(draw: Draw, shape: Sequence[int], offset: Sequence[int], size: Sequence[int], block_size: int) -> Tensor:
    part = torch.full(tuple(size), math.nan)
    with mock.patch.dict(initial_weights._BLOCK_SIZE, cpu=block_size, cuda=block_size):
        draw(part, NAME, STD, shape=shape, offset=offset)
    return part


@pytest.mark.parametrize("shape", [(100, 48), (301, 7), (5, 3), (17, 1), (64, 2, 5)], ids=str)
@pytest.mark.parametrize("block_size", [1, 300, 1 << 22])
def test_in_sequence_is_one_draw_of_torch(shape: tuple[int, ...], block_size: int) -> None:
    """Bitwise: in earlier versions, CPU runs drew whole parameters."""
    seed = int.from_bytes(hashlib.sha256(NAME.encode()).digest()[:7], "big")
    expected = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * STD
    found = drawn(draw_in_sequence, shape, (0,) * len(shape), shape, block_size)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("draw", [draw_in_sequence, draw_by_block])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("axis", [0, 1])
def test_ranks_draw_the_parts_of_one_parameter(draw: Draw, tp: int, axis: int) -> None:
    """Split by rows or by columns; blocks of 20 or 16 rows end inside the parts of 25 and 50 rows."""
    whole = drawn(draw, (100, 40), (0, 0), (100, 40), block_size=800)
    parts = []
    for rank in range(tp):
        size, offset = [100, 40], [0, 0]
        size[axis] //= tp
        offset[axis] = rank * size[axis]
        parts.append(drawn(draw, (100, 40), offset, size, block_size=800))
    assert torch.equal(torch.cat(parts, dim=axis), whole)


def test_blocks_are_normal_and_differ() -> None:
    """200,000 values: mean and standard deviation are within five standard errors, and no block repeats another one."""
    whole = drawn(draw_by_block, (2000, 100), (0, 0), (2000, 100), block_size=1000)
    assert abs(float(whole.mean())) < 5 * STD / 200_000**0.5
    assert abs(float(whole.std()) / STD - 1) < 5 / 400_000**0.5
    assert len(whole[::10, 0].unique()) == 200  # each block has ten rows


def test_a_rank_draws_only_the_blocks_of_its_rows() -> None:
    """Rows 25 to 50 lie in the blocks of 10 rows that begin at rows 20, 30 and 40."""
    with Drawn() as found:
        drawn(draw_by_block, (100, 40), (25, 0), (25, 40), block_size=400)
    assert found.sizes == [400, 400, 400]


@pytest.mark.parametrize("draw,largest", [(draw_in_sequence, 2 * 16 * 64), (draw_by_block, 2 * 15 * 64)])
def test_no_more_than_two_blocks_exist_beside_the_model(draw: Draw, largest: int) -> None:
    with Drawn() as found:
        drawn(draw, (1000, 64), (0, 0), (1000, 64), block_size=1000)
    assert sum(found.sizes) == 64_000 and 0 < found.largest < largest
