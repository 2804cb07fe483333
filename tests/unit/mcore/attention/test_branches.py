"""Attention of branches equals attention of each text by itself, with any kernel on any number of ranks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sft.layers.mixers.parent_bytes import parent_keys
from sft.layers.rank_share import RankShare
from sft.layers.tree_share import TreeDocuments, TreeShare
from sft.mcore.attention import packed_attention as packed_attention_module
from sft.mcore.attention import torch_kernel
from sft.mcore.attention.flash_kernel import FlashKernel, Operators
from sft.mcore.attention.key_source import AllGatheredKeys, LocalKeys
from sft.mcore.attention.packed_attention import packed_attention
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.parallel.branches import Branches
from sft.parallel.context_parallel import local_indices
from sft.parallel.halo import Halo
from tests.plain_flash import PLAIN
from tests.ranks.alive import Alive
from tests.trees import random_tree, text_by_text

CPU, SCALE, HEADS = torch.device("cpu"), 0.4, 4
FLOAT64_TOLERANCE = 1e-12  # sums in another order
# Of the norm, for outputs and for gradients.  Measured 1.9e-3 and 5.8e-3; merged in bf16, 2.8e-3 and 7.6e-3.
ROUNDED_TOLERANCE = 2.3e-3, 6.7e-3
KERNELS: dict[str, Any] = {"torch": TorchKernel.of, "flash": partial(FlashKernel.of, operators=PLAIN)}
# name: window, soft cap, sinks, key heads, width of keys, width of values
LAYERS: dict[str, tuple[int | None, float | None, bool, int, int, int]] = {
    "full": (None, None, False, 2, 8, 8),
    "capped, with sinks": (None, 2.0, True, 4, 8, 8),
    "latent": (None, None, False, 4, 12, 8),
    "window 1": (1, None, False, 2, 8, 8),
    "window 5": (5, None, True, 2, 8, 8),
    "window 30": (30, 2.0, False, 1, 8, 8),
    "window 500": (500, None, False, 2, 8, 8),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernel, "QUERY_TILE", 9)
    monkeypatch.setattr(torch_kernel, "KEY_TILE", 13)
    monkeypatch.setattr(packed_attention_module, "SINK_TOKENS", 50)


def tensors(tokens: int, key_heads: int, key_width: int, value_width: int) -> list[Tensor]:
    """Query, key, value, sinks and a gradient of the output, in float64."""
    generator = torch.Generator().manual_seed(5)
    shapes = (tokens, HEADS, key_width), (tokens, key_heads, key_width), (tokens, key_heads, value_width)
    made = [2 * torch.randn(x, generator=generator, dtype=torch.float64) for x in (*shapes, (HEADS,))]
    return [*made, torch.randn((tokens, HEADS, value_width), generator=generator, dtype=torch.float64)]


class Ranks:
    """All cp ranks in one process.  A rank gets keys in its kernel's order, and their gradients are summed."""

    def __init__(self, cu_seqlens: np.ndarray, cp_size: int, window: int | None, branches: Branches) -> None:
        self.local = [torch.from_numpy(local_indices(cu_seqlens, cp_size, rank)) for rank in range(cp_size)]
        self._halos = [Halo.of(cu_seqlens, window or 1, cp_size, rank, branches) for rank in range(cp_size)]

    def rows(self, rank: int, kernel: Any) -> Tensor:
        """The row of the pack of each of the kernel's keys."""
        source = kernel.key_source
        if not hasattr(source, "key_order"):
            return self.local[rank]
        if not hasattr(source, "send"):
            return torch.cat(self.local)[source.key_order]
        sent = [self.local[other][halo.send].split(halo.num_sent) for other, halo in enumerate(self._halos)]
        return torch.cat([self.local[rank], *(parts[rank] for parts in sent)])[source.key_order]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", KERNELS)
def test_outputs_and_gradients(name: str, layer: str, cp_size: int) -> None:
    window, softcap, has_sinks, *sizes = LAYERS[layer]
    cu_seqlens, branches = random_tree(seed=cp_size, multiple=2 * cp_size)
    query, key, value, sinks, grad = tensors(int(cu_seqlens[-1]), *sizes)
    whole = [x.requires_grad_() for x in (query, key, value, *([sinks] if has_sinks else []))]
    options: Any = {"window": window, "softcap": softcap}
    expected = text_by_text(*whole[:3], cu_seqlens, branches, SCALE, sinks=sinks if has_sinks else None, **options)
    gradients = torch.autograd.grad(expected, whole, grad)
    ranks = Ranks(cu_seqlens, cp_size, window, branches)
    sums = [torch.zeros_like(x) for x in whole[1:]]
    for rank, here in enumerate(ranks.local):
        kernel = KERNELS[name](cu_seqlens, cp_size, rank, CPU, branches=branches, **options)
        rows = ranks.rows(rank, kernel)
        given = [x.detach().requires_grad_() for x in (query[here], key[rows], value[rows], *whole[3:])]
        out = packed_attention(
            *given[:3], replace(kernel, key_source=LocalKeys()), SCALE, None, sinks=given[3] if has_sinks else None
        )
        close(out, expected[here])
        dquery, dkeys, dvalues, *dsinks = torch.autograd.grad(out, given, grad[here])
        close(dquery, gradients[0][here])
        sums[0].index_add_(0, rows, dkeys)
        sums[1].index_add_(0, rows, dvalues)
        for total, part in zip(sums[2:], dsinks):
            total += part
    for found, theirs in zip(sums, gradients[1:]):
        close(found, theirs)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


# A trunk of 40 tokens with 8 branches behind 7 forks.  A plain document follows.
TRUNK, FORKS = np.array([0, 40, *range(48, 112, 8), 128], dtype=np.int32), [5, 10, 15, 20, 25, 30, 35, 35]
BRANCHES = Branches.of([-1, *[0] * 8, -1], [0, *FORKS, 0])


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", KERNELS)
def test_a_branch_does_not_know_its_siblings(name: str, window: int | None) -> None:
    """Bitwise, outputs and gradients of queries; the trunk behind a fork is a sibling, too."""
    query, key, value, _, grad = tensors(128, 2, 8, 8)
    kernel = KERNELS[name](TRUNK, 1, 0, CPU, window=window, branches=BRANCHES)
    before = both(kernel, query, key, value, grad)
    for changed in (slice(48, 56), slice(35, 40)):  # the branch of fork 10, and the trunk's end
        others = torch.ones(128, dtype=torch.bool)
        others[changed] = False
        inputs = [x.clone() for x in (query, key, value)]
        for x in inputs:
            x[changed] = 7.0
        for ours, theirs in zip(both(kernel, *inputs, grad), before):
            assert torch.equal(ours[others], theirs[others])
            assert not torch.equal(ours[changed], theirs[changed])


def both(kernel: Any, query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the gradient of queries."""
    query = query.clone().requires_grad_()
    out = packed_attention(query, key, value, kernel, SCALE, None)
    return out.detach(), torch.autograd.grad(out, query, grad)[0]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_calls_and_pairs_of_a_flash_kernel(cp_size: int) -> None:
    """7 forks of a trunk are log2(7 + 1) = 3 calls.  Each pair of a query and a key is computed once."""
    calls: list[Any] = []

    def forward(query: Tensor, keys: Tensor, values: Tensor, *sizes: Any, scale: float, causal: bool = True) -> Any:
        calls.append((causal, *sizes))
        return query, query.new_zeros(1, len(query))

    def backward(grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, *rest: Any, **options: Any) -> Any:
        return forward(query, keys, values, *rest[2:], **options)[0], keys, values

    boundaries = TRUNK * np.int32(cp_size)
    branches = Branches.of(BRANCHES.parents, BRANCHES.forks * cp_size)
    pairs = 0
    for rank in range(cp_size):
        kernel = FlashKernel.of(
            boundaries, cp_size, rank, CPU, operators=Operators(forward, backward), branches=branches
        )
        query = torch.zeros(128, 1, 8)
        keys = torch.zeros(len(getattr(kernel.key_source, "key_order", query)), 1, 8)
        out, lse = kernel.forward(query, keys, keys, 1.0)
        assert [causal for causal, *_ in calls] == [True, False, False, False]
        without_mask = [np.diff(x) for _, *edges, _, _ in calls[1:] for x in edges]
        pairs += sum(int(q @ k) for q, k in zip(without_mask[::2], without_mask[1::2]))
        kernel.backward(query, query, keys, keys, out, lse, 1.0)
        assert len(calls) == 8
        calls.clear()
    assert pairs == sum(8 * cp_size * fork * cp_size for fork in FORKS)


def test_keys_of_a_parent_are_gathered_once_more() -> None:
    """Document 0 with 8 tokens, a branch behind its token 2, cp 2, rank 0: chunks 0 1 | 6 7 | 8 | 11.

    The parts of the ranks hold 0 1 6 7 8 11 | 2 3 4 5 9 10.
    """
    boundaries, branches = np.array([0, 8, 12], dtype=np.int32), Branches.of([-1, 0], [0, 3])
    kernel = FlashKernel.of(boundaries, 2, 0, CPU, operators=PLAIN, branches=branches)
    assert isinstance(kernel.key_source, AllGatheredKeys)
    of_sequences = [0, 1, 0, 1, 6, 7, 8, 9, 2, 3, 4, 4, 10, 11, 5]
    assert kernel.key_source.key_order.tolist() == [*of_sequences, 0, 1, 6]
    assert kernel.parent_keys is not None
    assert (kernel.parent_keys.queries, kernel.parent_keys.keys) == (slice(4, 6), slice(15, 18))
    (call,) = kernel.parent_keys.calls
    assert (call.queries, call.keys) == (slice(0, 2), slice(0, 3))


def test_calls_are_merged_in_fp32() -> None:
    """In bf16, 32 forks of a trunk are 6 calls, whose results would be rounded 6 times more."""
    boundaries = np.array([0, 64, *range(66, 130, 2)], dtype=np.int32)
    branches = Branches.of([-1, *[0] * 32], [0, *range(2, 66, 2)])
    *tensors_, _, grad = (x.bfloat16() for x in tensors(128, 2, 8, 8))
    whole = [x.double().requires_grad_() for x in tensors_]
    expected = text_by_text(*whole, boundaries, branches, SCALE)
    kernel = FlashKernel.of(boundaries, 1, 0, CPU, operators=PLAIN, branches=branches)
    out, lse = kernel.forward(*tensors_, SCALE)
    found = [out, *kernel.backward(grad, *tensors_, out, lse, SCALE)]
    assert [x.dtype for x in (*found, lse)] == [torch.bfloat16] * 4 + [torch.float32]
    exact = [expected.detach(), *torch.autograd.grad(expected, whole, grad.double())]
    errors = [float((ours.double() - theirs).norm() / theirs.norm()) for ours, theirs in zip(found, exact)]
    assert errors[0] < ROUNDED_TOLERANCE[0] and max(errors[1:]) < ROUNDED_TOLERANCE[1]


def allocated(lengths: list[int], branches: Branches | None) -> tuple[int, int]:
    """The most bytes that forward and backward allocate, in bf16 with operators that only make results, and in backward
    fp32 sums of queries."""

    def forward(query: Tensor, keys: Tensor, values: Tensor, *sizes: Any, **options: Any) -> Any:
        return torch.empty_like(query), query.new_zeros((query.shape[1], len(query)), dtype=torch.float32)

    def backward(grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, *rest: Any, **options: Any) -> Any:
        sums = torch.empty_like(query, dtype=torch.float32)
        return sums.to(query.dtype), torch.empty_like(keys), torch.empty_like(values)

    edges = np.cumsum([0, *lengths]).astype(np.int32)
    kernel = FlashKernel.of(edges, 1, 0, CPU, operators=Operators(forward, backward), branches=branches)
    query, keys = (torch.zeros(int(edges[-1]), heads, 8, dtype=torch.bfloat16) for heads in (4, 2))
    with Alive() as of_forward:
        out, lse = kernel.forward(query, keys, keys, 1.0)
    with Alive() as of_backward:
        kernel.backward(query, query, keys, keys, out, lse, 1.0)
    return of_forward.peak, of_backward.peak


def more_bytes(lengths: list[int], branches: Branches) -> list[int]:
    """`allocated` with a tree, beyond that without."""
    return [tree - alone for tree, alone in zip(allocated(lengths, branches), allocated(lengths, None))]


def test_sums_of_several_calls_are_for_branches_and_the_keys_before_them() -> None:
    """A plain document needs no memory more.  The tree has a trunk of 160 tokens, and branches of 80 after 80 and after
    all.  The first call has 160 queries, which follow each other, and 80 keys.

    Forward: outputs in fp32, 160 x 32 x 4 bytes; outputs of the call, 160 x 32 x 2; three log-sum-exps, two shares
    and a difference of the same size, 160 x 4 x 4.  Backward: the causal call's sums are free by then, and larger.
    """
    of_forward = 160 * 32 * 4 + 160 * 32 * 2 + (3 + 2 + 1) * 160 * 4 * 4
    for plain in (800, 1600):
        tree = Branches.of([-1, -1, 1, 1], [0, 0, 80, 160])
        assert more_bytes([plain, 160, 80, 80], tree) == [of_forward, 0]


@pytest.mark.parametrize("forks, keys", [(range(32, 960, 32), 928), ([640] * 29, 640)], ids=["trace", "best of 29"])
def test_the_estimate_has_the_bytes_of_branches(forks: Sequence[int], keys: int) -> None:
    """What the causal call has at most, its sums in fp32, is added.  The estimate leaves out log-sum-exps."""
    counted = more_bytes([960, *[48] * len(forks)], Branches.of([-1, *[0] * len(forks)], [0, *forks]))[1]
    counted += (960 + 48 * len(forks)) * 4 * 8 * 4
    trees = TreeShare((TreeDocuments(len(forks), 48, 500),), forks=len({*forks}), keys=keys)
    predicted = parent_keys(RankShare(trees=trees), queries=4 * 8, pairs=2 * 2 * 8)
    assert counted / predicted == pytest.approx(1.0, abs=0.1)
