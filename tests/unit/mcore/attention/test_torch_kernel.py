"""Attention in plain tiles equals attention in one piece; tiles are smaller than documents, and do not divide them.

Also with sliding windows, sinks and soft caps, in one process.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sft.mcore.attention import flash2
from sft.mcore.attention import packed_attention as packed_attention_module
from sft.mcore.attention import torch_kernel
from sft.mcore.attention.flash2 import FLASH2
from sft.mcore.attention.flash_kernel import FlashKernel, Operators
from sft.mcore.attention.key_source import AllGatheredKeys, LocalKeys
from sft.mcore.attention.packed_attention import packed_attention
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.parallel import context_parallel
from tests.reference_attention import in_one_piece

BOUNDARIES = np.array([0, 48, 64, 144, 176], dtype=np.int32)
DOCUMENTS = np.array([0, 48, 49, 64, 144, 176], dtype=np.int32)  # one document has a single token
TOKENS, HEADS, GROUPS, WIDTH, SCALE = 176, 4, 2, 8, 0.4
FLOAT64_TOLERANCE = 1e-12
CPU = torch.device("cpu")
ALONE: Any = SimpleNamespace(size=lambda: 1)
# large sinks: near zero, an ignored sink would not show
SINKS = torch.tensor([6.0, -2.0, 0.5, 3.0], dtype=torch.float64)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernel, "QUERY_TILE", 9)
    monkeypatch.setattr(torch_kernel, "KEY_TILE", 13)
    monkeypatch.setattr(packed_attention_module, "SINK_TOKENS", 50)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and a gradient of the output; scores differ widely, so that a later tile may have the
    largest."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(TOKENS, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [3 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def key_order(kernel: TorchKernel | FlashKernel) -> Tensor:
    assert isinstance(kernel.key_source, AllGatheredKeys)
    return kernel.key_source.key_order


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_output_and_gradients_of_each_rank(cp_size: int) -> None:
    query, key, value, grad = inputs(torch.float64)
    whole = [x.clone().requires_grad_() for x in (query, key, value)]
    expected, expected_lse = in_one_piece(*whole, BOUNDARIES, SCALE)
    dquery, dkey, dvalue = torch.autograd.grad(expected, whole, grad)
    local = [torch.from_numpy(context_parallel.local_indices(BOUNDARIES, cp_size, rank)) for rank in range(cp_size)]
    sums = torch.zeros_like(key), torch.zeros_like(value)
    for rank, here in enumerate(local):
        kernel = TorchKernel.of(BOUNDARIES, cp_size, rank, CPU)
        order = torch.cat(local)[key_order(kernel)] if cp_size > 1 else torch.cat(local)
        out, lse = kernel.forward(query[here], key[order], value[order], SCALE)
        close(out, expected[here])
        close(lse, expected_lse[:, here])
        found, *parts = kernel.backward(grad[here], query[here], key[order], value[order], out, lse, SCALE)
        close(found, dquery[here])
        for total, part in zip(sums, parts):
            total.index_add_(0, order, part)
    close(sums[0], dkey)
    close(sums[1], dvalue)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


def test_bf16_is_computed_in_fp32() -> None:
    """The results equal those of fp32, rounded once; sums over keys and values are not rounded."""
    narrow = inputs(torch.bfloat16)
    wide = [x.float() for x in narrow]
    kernel = TorchKernel.of(BOUNDARIES, 1, 0, CPU)
    out, lse = kernel.forward(*narrow[:3], SCALE)
    expected, expected_lse = kernel.forward(*wide[:3], SCALE)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected.bfloat16())
    assert lse.dtype == torch.float32 and torch.equal(lse, expected_lse)
    found = kernel.backward(narrow[3], *narrow[:3], out, lse, SCALE)
    again = kernel.backward(wide[3], *wide[:3], out.float(), lse, SCALE)
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32, torch.float32]
    for a, b in zip(found, again):
        assert torch.equal(a, b.to(a.dtype))


# Of the norm.  Factors are rounded to 8 bits of mantissa, as in flash kernels; measured 7e-3, of which 6e-3 come from
# the output, which backward gets in bf16 in any case.
ROUNDED_TOLERANCE = 1e-2


@pytest.mark.parametrize("window, softcap", [(None, None), (30, None), (50, 2.0)])
def test_factors_in_bf16(monkeypatch: pytest.MonkeyPatch, window: int | None, softcap: float | None) -> None:
    """As on tensor cores, against float64."""
    monkeypatch.setattr(torch_kernel, "LARGE_QUERY_TILE", 18)
    monkeypatch.setattr(torch_kernel, "LARGE_KEY_TILE", 26)
    *tensors, grad = inputs(torch.bfloat16)
    kernel = TorchKernel.of(DOCUMENTS, 1, 0, CPU, window=window, softcap=softcap)
    assert not kernel.has_tensor_cores
    kernel = replace(kernel, has_tensor_cores=True)
    assert {tile.rows.stop - tile.rows.start for tile in kernel._tiles(torch.bfloat16)} >= {18}
    exact = [x.double().requires_grad_() for x in tensors]
    whole, sums = in_one_piece(*exact, DOCUMENTS, SCALE, window=window, softcap=softcap)
    out, lse = kernel.forward(*tensors, SCALE)
    found = [out, lse, *kernel.backward(grad, *tensors, out, lse, SCALE)]
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.float32]
    for ours, theirs in zip(found, [whole, sums, *torch.autograd.grad(whole, exact, grad.double())]):
        assert (ours.double() - theirs).norm() < ROUNDED_TOLERANCE * theirs.norm()
    rounded = kernel.backward(grad, *tensors, out, lse, SCALE)[2]
    assert not torch.equal(
        rounded, replace(kernel, has_tensor_cores=False).backward(grad, *tensors, out, lse, SCALE)[2]
    )


def test_sums_of_factors_in_bf16_are_in_fp32() -> None:
    """A query of zeros attends to all 3,000 keys alike.  In bf16, ones would sum up to 256."""
    length, width = 3000, 8
    query, ones = torch.zeros(length, 1, width).bfloat16(), torch.ones(length, 1, width).bfloat16()
    kernel = replace(TorchKernel.of(np.array([0, length], dtype=np.int32), 1, 0, CPU), has_tensor_cores=True)
    out, lse = kernel.forward(query, ones, ones, 1.0)
    assert torch.equal(out, ones)
    dvalues = kernel.backward(ones, query, ones, ones, out, lse, 1.0)[2]
    harmonic = sum(1 / n for n in range(1, length + 1))  # the first key's share of each query
    assert float(dvalues[0, 0, 0]) == pytest.approx(harmonic, rel=ROUNDED_TOLERANCE)


def test_on_a_gpu_tiles_in_bf16_are_large_and_for_tensor_cores() -> None:
    """8,192 tokens: 8 tiles of queries, the last with 4 tiles of keys, instead of 32 and 16 in fp32."""
    kernel = TorchKernel.of(np.array([0, 8192], dtype=np.int32), 1, 0, torch.device("cuda"))
    tiles = [*kernel._tiles(torch.bfloat16)]
    assert [tile.limits.factors for tile in tiles] == 8 * [torch.bfloat16] and len([*tiles[-1].key_tiles()]) == 4
    assert {tile.limits.factors for tile in kernel._tiles(torch.float32)} == {torch.float32}


def test_tensor_cores_change_nothing_in_fp32() -> None:
    narrow = TorchKernel.of(DOCUMENTS, 1, 0, CPU)
    *tensors, grad = inputs(torch.float32)
    out, lse = narrow.forward(*tensors, SCALE)
    found = replace(narrow, has_tensor_cores=True)
    for a, b in zip(found.forward(*tensors, SCALE), (out, lse)):
        assert torch.equal(a, b)
    again = found.backward(grad, *tensors, out, lse, SCALE)
    for a, b in zip(again, narrow.backward(grad, *tensors, out, lse, SCALE)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("length", [1, 9, 10, 13, 14, 40])
def test_no_tile_is_wider_than_it_may_be(length: int) -> None:
    chunk = torch_kernel.Queries(3, length, 50, (torch_kernel.Keys(100, 150 + length, 0),))
    kernel = TorchKernel(chunks=(chunk,), key_source=LocalKeys())
    made = list(kernel._tiles(torch.float32))
    assert [row for tile in made for row in range(TOKENS)[tile.rows]] == list(range(3, 3 + length))
    for tile in made:
        columns = [slice(keys.start, keys.stop) for keys in tile.key_tiles()]
        assert tile.rows.stop - tile.rows.start <= 9 and all(keys.stop - keys.start <= 13 for keys in columns)
        # position in the document up to which the last query of the tile attends
        last_seen = 100 + 50 + tile.rows.stop - 3
        assert [key for keys in columns for key in range(500)[keys]] == list(range(100, last_seen))


# --- windows, sinks and soft caps -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "window, softcap, has_sinks",
    [*itertools.product((1, 2, 12, 13, 50, 80, 500), (None,), (False,))]
    + [(None, 2.0, False), (None, None, True), (12, 2.0, True), (50, None, True), (None, 0.5, True)],
)
def test_outputs_and_gradients(window: int | None, softcap: float | None, has_sinks: bool) -> None:
    *tensors, grad = inputs(torch.float64)
    if has_sinks:
        tensors.append(SINKS)
    expected, found = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    kernel = TorchKernel.of(DOCUMENTS, 1, 0, CPU, window=window, softcap=softcap)
    whole, _ = in_one_piece(
        *expected[:3], DOCUMENTS, SCALE, window=window, softcap=softcap, sinks=expected[3] if has_sinks else None
    )
    out = packed_attention(*found[:3], kernel, SCALE, ALONE, sinks=found[3] if has_sinks else None)
    close(out, whole)
    for ours, theirs in zip(torch.autograd.grad(out, found, grad), torch.autograd.grad(whole, expected, grad)):
        close(ours, theirs)


@pytest.mark.parametrize("window", [1, 5, 30])
def test_a_window_computes_no_more_than_its_keys_and_one_tile(window: int) -> None:
    kernel = TorchKernel.of(DOCUMENTS, 1, 0, CPU, window=window)
    for tile in kernel._tiles(torch.float32):
        num_keys = sum(keys.stop - keys.start for keys in tile.key_tiles())
        assert num_keys <= window + torch_kernel.QUERY_TILE


@pytest.mark.parametrize("rank, first_chunks", [(0, 1), (3, 0)])
def test_the_products_of_gpt_oss_at_64k(monkeypatch: pytest.MonkeyPatch, rank: int, first_chunks: int) -> None:
    """torch counts products on tensors without data: cp 4, window 128, 64 query heads of 64, tiles of 256 queries.

    A tile computes 256 + 127 keys per query, at the beginning of a document 256.  Forward has two products of this size
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
    """Rank 0 of gpt-oss at 64K: the number of keys for each chunk of queries, and the window on the left of a query."""
    calls: list[Any] = []

    def forward(query: Tensor, keys: Tensor, values: Tensor, *sizes: Any, **options: Any) -> Any:
        calls.append((*sizes, options))
        return query, torch.empty(1, len(query))

    def backward(grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, *rest: Any, **options: Any) -> Any:
        calls.append((*rest[2:], options))
        return query, keys, values

    kernel = FlashKernel.of(
        np.array([0, 65_536], dtype=np.int32), cp_size, 0, CPU, window=128, operators=Operators(forward, backward)
    )
    query, keys = torch.empty(sum(num_queries), 1, 0), torch.empty(sum(num_keys), 1, 0)
    _, lse = kernel.forward(query, keys, keys, 1.0)
    kernel.backward(query, query, keys, keys, query, lse, 1.0)
    for boundaries_q, boundaries_k, _, max_seqlen_k, options in calls:
        assert boundaries_q.diff().tolist() == num_queries
        assert boundaries_k.diff().tolist() == num_keys and max_seqlen_k == max(num_keys)
        assert options == {"scale": 1.0, "num_before": 127}
    assert len(calls) == 2


def test_a_document_does_not_know_its_neighbours() -> None:
    """Bitwise equal, with windows, sinks and caps."""
    query, key, value, _ = inputs(torch.float64)
    kernel = TorchKernel.of(DOCUMENTS, 1, 0, CPU, window=12, softcap=2.0)
    before = packed_attention(query, key, value, kernel, SCALE, ALONE, sinks=SINKS)
    for x in (query, key, value):
        x[49:64] = 7.0
    after = packed_attention(query, key, value, kernel, SCALE, ALONE, sinks=SINKS)
    for others in (slice(0, 49), slice(64, TOKENS)):
        assert torch.equal(before[others], after[others])
    assert not torch.equal(before[49:64], after[49:64])


# --- torch's flash kernel: tests/ranks/test_gpu_kernels.py compares its results ----------------------------------


def test_sequences_written_out() -> None:
    """Documents of 8 and 4 tokens over two ranks; the gathered parts hold 0 1 6 7 8 11 | 2 3 4 5 9 10."""
    boundaries = np.array([0, 8, 12], dtype=np.int32)
    early = FlashKernel.of(boundaries, 2, 0, CPU, operators=FLASH2)
    (call,) = early.calls
    assert call.cu_seqlens_q.tolist() == [0, 2, 4, 5, 6]
    assert call.cu_seqlens_k.tolist() == [0, 2, 10, 11, 15]
    assert key_order(early).tolist() == [0, 1, 0, 1, 6, 7, 8, 9, 2, 3, 4, 4, 10, 11, 5]
    assert (call.max_seqlen_q, call.max_seqlen_k) == (2, 8)
    late = FlashKernel.of(boundaries, 2, 1, CPU, operators=FLASH2)
    (call,) = late.calls
    assert call.cu_seqlens_q.tolist() == [0, 2, 4, 5, 6]
    assert call.cu_seqlens_k.tolist() == [0, 4, 10, 12, 15]
    alone = FlashKernel.of(boundaries, 1, 0, CPU, operators=FLASH2)
    assert alone.key_source == LocalKeys()
    (call,) = alone.calls
    assert call.cu_seqlens_q.tolist() == call.cu_seqlens_k.tolist() == [0, 8, 12]


def test_the_kernel_of_this_torch_takes_what_it_is_given() -> None:
    """Checks shapes and names only: on the meta device nothing is computed."""
    assert flash2._missing() is None
    made = {"device": "meta", "dtype": torch.bfloat16}
    query, key = torch.empty(12, 8, 64, **made), torch.empty(15, 2, 64, **made)
    boundaries = torch.empty(5, dtype=torch.int32, device="meta")
    sizes = boundaries, boundaries, 2, 8
    for options in ({}, {"causal": False}):
        out, lse = FLASH2.forward(query, key, key, *sizes, scale=0.125, **options)
        assert out.shape == query.shape and lse.shape == (8, 12)
        grads = FLASH2.backward(out, query, key, key, out, lse, *sizes, scale=0.125, **options)
        assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]
