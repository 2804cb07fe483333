"""Attention in plain tiles against attention in one piece: tiles smaller than documents, and no divisor of any."""

import numpy as np
import pytest
import torch
from torch import Tensor

from sft.mcore.attention import flash2, flash_kernel, torch_kernel
from sft.mcore.attention.flash2 import FLASH2
from sft.mcore.attention.flash_kernel import Demand
from sft.mcore.attention.key_source import AllGatheredKeys, LocalKeys
from sft.parallel import context_parallel

BOUNDARIES = np.array([0, 48, 64, 144, 176], dtype=np.int32)
TOKENS, HEADS, GROUPS, WIDTH, SCALE = 176, 4, 2, 8, 0.4
FLOAT64_TOLERANCE = 1e-12
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernel, "QUERY_TILE", 9)
    monkeypatch.setattr(torch_kernel, "KEY_TILE", 13)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and a gradient of the output; scores far apart, so that a later tile may have the largest."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(TOKENS, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [3 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def key_order(kernel: torch_kernel.TorchKernel | flash_kernel.FlashKernel) -> Tensor:
    assert isinstance(kernel.key_source, AllGatheredKeys)
    return kernel.key_source.key_order


def in_one_piece(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp of the scores."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    document = torch.bucketize(torch.arange(TOKENS), torch.from_numpy(BOUNDARIES[1:].copy()), right=True)
    seen = (document[:, None] == document[None, :]).tril()
    scores = (torch.einsum("qhd,khd->hqk", query, key) * SCALE).masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_output_and_gradients(cp_size: int) -> None:
    query, key, value, grad = inputs(torch.float64)
    whole = [x.clone().requires_grad_() for x in (query, key, value)]
    expected, expected_lse = in_one_piece(*whole)
    dquery, dkey, dvalue = torch.autograd.grad(expected, whole, grad)
    local = [torch.from_numpy(context_parallel.local_indices(BOUNDARIES, cp_size, rank)) for rank in range(cp_size)]
    sums = torch.zeros_like(key), torch.zeros_like(value)
    for rank, here in enumerate(local):
        kernel = torch_kernel.TorchKernel.of(BOUNDARIES, cp_size, rank, CPU)
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
    """Bitwise the numbers of fp32, rounded once; sums of keys and values are not rounded at all."""
    narrow = inputs(torch.bfloat16)
    wide = [x.float() for x in narrow]
    kernel = torch_kernel.TorchKernel.of(BOUNDARIES, 1, 0, CPU)
    out, lse = kernel.forward(*narrow[:3], SCALE)
    expected, expected_lse = kernel.forward(*wide[:3], SCALE)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected.bfloat16())
    assert lse.dtype == torch.float32 and torch.equal(lse, expected_lse)
    found = kernel.backward(narrow[3], *narrow[:3], out, lse, SCALE)
    again = kernel.backward(wide[3], *wide[:3], out.float(), lse, SCALE)
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32, torch.float32]
    for a, b in zip(found, again):
        assert torch.equal(a, b.to(a.dtype))


@pytest.mark.parametrize("length", [1, 9, 10, 13, 14, 40])
def test_no_tile_is_wider_than_it_may_be(length: int) -> None:
    chunk = context_parallel.Chunk(local_start=3, length=length, document_start=100, position=50)
    kernel = torch_kernel.TorchKernel(chunks=(chunk,), key_source=LocalKeys())
    made = list(kernel._tiles())
    assert [row for tile in made for row in range(TOKENS)[tile.rows]] == list(range(3, 3 + length))
    for tile in made:
        columns = list(tile.key_tiles())
        assert tile.rows.stop - tile.rows.start <= 9 and all(keys.stop - keys.start <= 13 for keys in columns)
        last_seen = 100 + 50 + tile.rows.stop - 3  # of the document, up to the last query of the tile
        assert [key for keys in columns for key in range(500)[keys]] == list(range(100, last_seen))


# --- torch's flash kernel: tests/ranks/test_gpu_kernels.py has its numbers ---------------------------------------


def test_sequences_written_out() -> None:
    """A document of 8 and one of 4 over two ranks; gathered parts hold 0 1 6 7 8 11 | 2 3 4 5 9 10."""
    boundaries = np.array([0, 8, 12], dtype=np.int32)
    early = flash_kernel.FlashKernel.of(boundaries, 2, 0, torch.device("cpu"), operators=FLASH2)
    assert early.cu_seqlens_q.tolist() == [0, 2, 4, 5, 6]
    assert early.cu_seqlens_k.tolist() == [0, 2, 10, 11, 15]
    assert key_order(early).tolist() == [0, 1, 0, 1, 6, 7, 8, 9, 2, 3, 4, 4, 10, 11, 5]
    assert (early.max_seqlen_q, early.max_seqlen_k) == (2, 8)
    late = flash_kernel.FlashKernel.of(boundaries, 2, 1, torch.device("cpu"), operators=FLASH2)
    assert late.cu_seqlens_q.tolist() == [0, 2, 4, 5, 6]
    assert late.cu_seqlens_k.tolist() == [0, 4, 10, 12, 15]
    alone = flash_kernel.FlashKernel.of(boundaries, 1, 0, torch.device("cpu"), operators=FLASH2)
    assert alone.key_source == LocalKeys()
    assert alone.cu_seqlens_q.tolist() == alone.cu_seqlens_k.tolist() == [0, 8, 12]


@pytest.mark.parametrize(
    "head_dim, dtype, device, reason",
    [
        (128, torch.bfloat16, "cpu", "it needs CUDA"),
        (128, torch.float32, "cuda", "it computes in bf16 only"),
        (
            288,
            torch.bfloat16,
            "cuda",
            "it has heads of up to 256 in multiples of 8, but heads of this model are 288 wide",
        ),
        (128, torch.bfloat16, "cuda", None),
    ],
)
def test_why_not(head_dim: int, dtype: torch.dtype, device: str, reason: str | None) -> None:
    assert FLASH2.why_not(Demand(device, dtype, head_dim, head_dim)) == reason


def test_the_kernel_of_this_torch_takes_what_it_is_given() -> None:
    """Shapes and names only: on the meta device nothing is computed."""
    assert flash2._missing() is None
    made = {"device": "meta", "dtype": torch.bfloat16}
    query, key = torch.empty(12, 8, 64, **made), torch.empty(15, 2, 64, **made)
    boundaries = torch.empty(5, dtype=torch.int32, device="meta")
    sizes = boundaries, boundaries, 2, 8
    out, lse = FLASH2.forward(query, key, key, *sizes, scale=0.125)
    assert out.shape == query.shape and lse.shape == (8, 12)
    grads = FLASH2.backward(out, query, key, key, out, lse, *sizes, scale=0.125)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]
