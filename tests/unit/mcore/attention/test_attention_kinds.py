"""Sliding windows, sinks and soft caps on one process, against attention with one matrix of scores."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sft.mcore.attention import packed_attention as packed_attention_module
from sft.mcore.attention import torch_kernel
from sft.mcore.attention.flash_kernel import FlashKernel, Operators
from sft.mcore.attention.packed_attention import packed_attention
from sft.mcore.attention.torch_kernel import TorchKernel
from tests.reference_attention import in_one_piece

BOUNDARIES = np.array([0, 48, 49, 64, 144, 176], dtype=np.int32)  # one document of one token
TOKENS, HEADS, GROUPS, WIDTH, SCALE = 176, 4, 2, 8, 0.4
FLOAT64_TOLERANCE = 1e-12
CPU = torch.device("cpu")
ALONE: Any = SimpleNamespace(size=lambda: 1)
SINKS = torch.tensor([6.0, -2.0, 0.5, 3.0], dtype=torch.float64)  # large ones: with zero, a sink that is ignored hides


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernel, "QUERY_TILE", 9)
    monkeypatch.setattr(torch_kernel, "KEY_TILE", 13)
    monkeypatch.setattr(packed_attention_module, "SINK_TOKENS", 50)


def inputs() -> list[Tensor]:
    """Query, key, value and a gradient of the output."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(TOKENS, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [3 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(
    "window, softcap, has_sinks",
    [*itertools.product((1, 2, 12, 13, 50, 80, 500), (None,), (False,))]
    + [(None, 2.0, False), (None, None, True), (12, 2.0, True), (50, None, True), (None, 0.5, True)],
)
def test_outputs_and_gradients(window: int | None, softcap: float | None, has_sinks: bool) -> None:
    *tensors, grad = inputs()
    if has_sinks:
        tensors.append(SINKS)
    expected, found = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    kernel = TorchKernel.of(BOUNDARIES, 1, 0, CPU, window=window, softcap=softcap)
    whole, _ = in_one_piece(
        *expected[:3], BOUNDARIES, SCALE, window=window, softcap=softcap, sinks=expected[3] if has_sinks else None
    )
    out = packed_attention(*found[:3], kernel, SCALE, ALONE, sinks=found[3] if has_sinks else None)
    close(out, whole)
    for ours, theirs in zip(torch.autograd.grad(out, found, grad), torch.autograd.grad(whole, expected, grad)):
        close(ours, theirs)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


@pytest.mark.parametrize("window", [1, 5, 30])
def test_a_window_computes_no_more_than_its_keys_and_one_tile(window: int) -> None:
    kernel = TorchKernel.of(BOUNDARIES, 1, 0, CPU, window=window)
    for tile in kernel._tiles():
        num_keys = sum(keys.stop - keys.start for keys in tile.key_tiles())
        assert num_keys <= window + torch_kernel.QUERY_TILE


@pytest.mark.parametrize("rank, first_chunks", [(0, 1), (3, 0)])
def test_the_products_of_gpt_oss_at_64k(monkeypatch: pytest.MonkeyPatch, rank: int, first_chunks: int) -> None:
    """Counted by torch on tensors without data: cp 4, window 128, 64 query heads of 64, tiles of 256 queries.

    A tile computes 256 + 127 keys a query, at the beginning of a document 256.  Forward has two products of this size
    (scores, output), backward five (scores again, and the gradients of values, weights, queries and keys).
    """
    monkeypatch.setattr(torch_kernel, "QUERY_TILE", 256)
    monkeypatch.setattr(torch_kernel, "KEY_TILE", 512)
    length, window, heads, key_heads, width, tokens = 65_536, 128, 64, 8, 64, 16_384
    kernel = TorchKernel.of(np.array([0, length], dtype=np.int32), 4, rank, CPU, window=window)
    num_keys = int(kernel.key_source.key_order.numel())  # type: ignore[attr-defined]
    assert num_keys == tokens + 127 * (2 - first_chunks)
    query, keys = (torch.empty(n, h, width, device="meta") for n, h in ((tokens, heads), (num_keys, key_heads)))
    lse = torch.empty(heads, tokens, device="meta")
    scores = (tokens * 383 - first_chunks * 256 * 127) * heads
    with FlopCounterMode(display=False) as forward:
        kernel.forward(query, keys, keys, 1.0)
    with FlopCounterMode(display=False) as backward:
        kernel.backward(query, query, keys, keys, query, lse, 1.0)
    assert forward.get_total_flops() == 2 * 2 * width * scores
    assert backward.get_total_flops() == 5 * 2 * width * scores
    assert scores <= tokens * heads * (window + 256)


@pytest.mark.parametrize(
    "cp_size, num_queries, num_keys", [(1, [65_536], [65_536]), (4, [8192, 8192], [8192, 8192 + 127])]
)
def test_the_flash_kernel_gets_the_window_and_no_keys_before_it(
    cp_size: int, num_queries: list[int], num_keys: list[int]
) -> None:
    """Rank 0 of gpt-oss at 64K: the keys of each chunk of queries, and how many before a query the kernel may see."""
    calls: list[Any] = []

    def forward(query: Tensor, keys: Tensor, values: Tensor, *sizes: Any, **options: Any) -> Any:
        calls.append((*sizes, options))
        return query, torch.empty(0)

    def backward(grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, *rest: Any, **options: Any) -> Any:
        calls.append((*rest[2:], options))
        return query, keys, values

    kernel = FlashKernel.of(
        np.array([0, 65_536], dtype=np.int32), cp_size, 0, CPU, window=128, operators=Operators(forward, backward)
    )
    unused = torch.empty(0)
    kernel.forward(unused, unused, unused, 1.0)
    kernel.backward(unused, unused, unused, unused, unused, unused, 1.0)
    for boundaries_q, boundaries_k, _, max_seqlen_k, options in calls:
        assert boundaries_q.diff().tolist() == num_queries
        assert boundaries_k.diff().tolist() == num_keys and max_seqlen_k == max(num_keys)
        assert options == {"scale": 1.0, "num_before": 127}
    assert len(calls) == 2


def test_a_document_does_not_know_its_neighbours() -> None:
    """Bitwise, with windows, sinks and caps."""
    query, key, value, _ = inputs()
    kernel = TorchKernel.of(BOUNDARIES, 1, 0, CPU, window=12, softcap=2.0)
    before = packed_attention(query, key, value, kernel, SCALE, ALONE, sinks=SINKS)
    for x in (query, key, value):
        x[49:64] = 7.0
    after = packed_attention(query, key, value, kernel, SCALE, ALONE, sinks=SINKS)
    for others in (slice(0, 49), slice(64, TOKENS)):
        assert torch.equal(before[others], after[others])
    assert not torch.equal(before[49:64], after[49:64])
