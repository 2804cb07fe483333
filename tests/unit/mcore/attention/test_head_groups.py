"""Head groups: the collectives that run while a kernel computes, and the tensors held.  One process plays one rank of
two."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sft.layers.mixers.softmax_bytes import MAX_HEAD_GROUPS
from sft.mcore.attention import key_source, packed_attention
from sft.mcore.attention.key_source import AllGatheredKeys, KeySource, LocalKeys
from sft.mcore.attention.rope import Rotation

TOKENS, HEADS, GROUPS, WIDTH = 6, 8, 4, 2


class Work:
    """A collective in progress, which holds its tensors until somebody waits for it, as those of NCCL do."""

    def __init__(self, log: list[str], name: str, *held: Tensor) -> None:
        self._log, self._name, self._held = log, name, held

    def wait(self) -> None:
        self._log.append(f"{self._name} done")
        self._held = ()


class Kernel:
    """A kernel that copies values to every head of the group; keys come in the order of ranks."""

    def __init__(self, log: list[str], key_source: KeySource | None = None) -> None:
        self.log, self.key_source = log, key_source or AllGatheredKeys(torch.arange(2 * TOKENS))

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        self.log.append("forward")
        return values[: len(query)].repeat_interleave(query.shape[1] // keys.shape[1], dim=1), query.new_zeros(
            query.shape[1::-1]
        )

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.log.append("backward")
        return torch.zeros_like(query), torch.zeros_like(keys), torch.ones_like(values)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The events in order; and for each sum over ranks, the number of sums that were held when it began."""
    happened: list[str] = []
    totals: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def all_gather_into_tensor(out: Tensor, local: Tensor, group: Any, async_op: bool) -> Work:
        assert async_op
        happened.append("gather")
        out.copy_(torch.cat((local, local)))
        return Work(happened, "gather", out, local)

    def reduce_scatter_tensor(local: Tensor, total: Tensor, group: Any, async_op: bool) -> Work:
        assert async_op
        totals.add(total)
        happened.append(f"sum, {len(totals)} held")
        local.copy_(2 * total[: len(local)])
        return Work(happened, "sum", total)

    collectives = SimpleNamespace(
        all_gather_into_tensor=all_gather_into_tensor, reduce_scatter_tensor=reduce_scatter_tensor
    )
    monkeypatch.setattr(key_source, "dist", collectives)
    return happened


def test_the_next_head_group_is_gathered_while_a_kernel_computes(log: list[str]) -> None:
    query = torch.randn(TOKENS, HEADS, WIDTH, requires_grad=True)
    key, value = (torch.randn(TOKENS, GROUPS, WIDTH, requires_grad=True) for _ in range(2))
    two = SimpleNamespace(size=lambda: 2)
    out = packed_attention.packed_attention(query, key, value, Kernel(log), 1.0, two)
    assert torch.equal(out, value.repeat_interleave(2, dim=1))
    assert log == [
        *["gather", "gather", "gather done", "forward"],
        *["gather", "gather done", "forward"],
        *["gather", "gather done", "forward"],
        *["gather done", "forward"],
    ]
    log.clear()
    out.sum().backward()
    assert log == [
        *["gather", "gather", "gather done", "backward", "sum, 1 held"],
        *["gather", "gather done", "backward", "sum done", "sum, 1 held"],
        *["gather", "gather done", "backward", "sum done", "sum, 1 held"],
        *["gather done", "backward", "sum done", "sum, 1 held"],
        "sum done",
    ]
    assert value.grad is not None and torch.equal(value.grad, torch.full_like(value, 2.0))


@pytest.mark.parametrize("key_heads, groups", [(1, 1), (2, 2), (3, 3), (4, 4), (5, 1), (6, 3), (8, 4)])
def test_head_groups_are_whole_key_heads(key_heads: int, groups: int) -> None:
    assert MAX_HEAD_GROUPS == 4  # the estimate of memory uses the same function
    assert AllGatheredKeys(torch.arange(2)).num_groups(key_heads) == groups
    assert LocalKeys().num_groups(key_heads) == 1


def test_sums_over_chunks_and_ranks_are_in_fp32(log: list[str]) -> None:
    """256 + 1 is 256 in bf16.  Token 0 is a key of both chunks; the other rank adds the same gradient."""
    keys = AllGatheredKeys(torch.tensor([0, 1, 0]))
    dkeys, dvalues = (torch.tensor(x, dtype=torch.bfloat16)[:, None, None] for x in ([256, 2, 1], [512, 4, 1]))
    two: Any = SimpleNamespace(size=lambda: 2)
    found = keys.start_return(dkeys, dvalues, 2, two).result()
    assert [x.dtype for x in found] == [torch.float32] * 2
    assert [x.flatten().tolist() for x in found] == [[514.0, 4.0], [1026.0, 8.0]]


def test_what_was_gathered_is_gone_once_laid_out(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """While a kernel computes, only the next head group is held in gathered form; during the last group, none is."""
    gathered: weakref.WeakSet[Tensor] = weakref.WeakSet()
    held: list[int] = []
    gather, compute = key_source.dist.all_gather_into_tensor, Kernel.forward

    def noted(out: Tensor, *given: Any, **named: Any) -> Any:
        gathered.add(out)
        return gather(out, *given, **named)

    def counted(kernel: Kernel, *given: Any) -> Any:
        held.append(len(gathered))
        return compute(kernel, *given)

    monkeypatch.setattr(key_source.dist, "all_gather_into_tensor", noted)
    monkeypatch.setattr(Kernel, "forward", counted)
    key = torch.randn(TOKENS, GROUPS, WIDTH)
    two: Any = SimpleNamespace(size=lambda: 2)
    packed_attention.packed_attention(torch.randn(TOKENS, HEADS, WIDTH), key, key, Kernel(log), 1.0, two)
    assert held == [1, 1, 1, 0]


def test_rotation_is_part_of_the_function(log: list[str]) -> None:
    """The kernel returns the queries and keys as their gradients: each gradient is rotated back once."""
    rotation = Rotation.of(torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0.5]), torch.float32)
    inputs = [torch.randn(TOKENS, 1, WIDTH, requires_grad=True) for _ in range(3)]
    kernel = Kernel(log, LocalKeys())
    ones = torch.ones(TOKENS, 1, WIDTH)
    kernel.backward = lambda *given: (ones, ones, ones)  # type: ignore[method-assign]
    alone: Any = SimpleNamespace(size=lambda: 1)
    packed_attention.packed_attention(*inputs, kernel, 1.0, alone, rotation).sum().backward()
    cos, sin = rotation.cos[:, 0, 0], rotation.sin[:, 0, 0]
    for rotated in inputs[:2]:
        assert rotated.grad is not None
        torch.testing.assert_close(rotated.grad[:, 0], torch.stack((cos + sin, cos - sin), dim=1))
    assert inputs[2].grad is not None and torch.equal(inputs[2].grad, ones)
