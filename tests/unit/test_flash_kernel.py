"""What torch's flash kernel is fed, written out; and who may use it.  tests/ranks/test_flash.py has its numbers."""

import numpy as np
import pytest
import torch

from sft.mcore.attention import flash_kernel


def test_sequences_written_out() -> None:
    """A document of 8 and one of 4 over two ranks; gathered parts hold 0 1 6 7 8 11 | 2 3 4 5 9 10."""
    boundaries = np.array([0, 8, 12], dtype=np.int32)
    early = flash_kernel.FlashKernel.of(boundaries, 2, 0, torch.device("cpu"))
    assert early.cu_seqlens_q.tolist() == [0, 2, 4, 5, 6]
    assert early.cu_seqlens_k.tolist() == [0, 2, 10, 11, 15]
    assert early.key_order is not None
    assert early.key_order.tolist() == [0, 1, 0, 1, 6, 7, 8, 9, 2, 3, 4, 4, 10, 11, 5]
    assert (early.max_seqlen_q, early.max_seqlen_k) == (2, 8)
    late = flash_kernel.FlashKernel.of(boundaries, 2, 1, torch.device("cpu"))
    assert late.cu_seqlens_q.tolist() == [0, 2, 4, 5, 6]
    assert late.cu_seqlens_k.tolist() == [0, 4, 10, 12, 15]
    alone = flash_kernel.FlashKernel.of(boundaries, 1, 0, torch.device("cpu"))
    assert alone.key_order is None
    assert alone.cu_seqlens_q.tolist() == alone.cu_seqlens_k.tolist() == [0, 8, 12]


@pytest.mark.parametrize(
    "head_dim, dtype, device, reason",
    [
        (128, torch.bfloat16, "cpu", "it needs CUDA"),
        (128, torch.float32, "cuda", "it computes in bf16 only"),
        (288, torch.bfloat16, "cuda", "it has heads of up to 256 in multiples of 8, and this model's are 288 wide"),
        (100, torch.bfloat16, "cuda", "it has heads of up to 256 in multiples of 8, and this model's are 100 wide"),
        (128, torch.bfloat16, "cuda", None),
    ],
)
def test_why_not(head_dim: int, dtype: torch.dtype, device: str, reason: str | None) -> None:
    assert flash_kernel.why_not(head_dim, dtype, device) == reason


def test_the_kernel_of_this_torch_takes_what_it_is_given() -> None:
    """Shapes and names only: on the meta device nothing is computed."""
    assert flash_kernel._missing() is None
    made = {"device": "meta", "dtype": torch.bfloat16}
    query, key = torch.empty(12, 8, 64, **made), torch.empty(15, 2, 64, **made)
    boundaries = torch.empty(5, dtype=torch.int32, device="meta")
    sizes = boundaries, boundaries, 2, 8
    out, lse = flash_kernel.TORCH.forward(query, key, key, *sizes, scale=0.125)
    assert out.shape == query.shape and lse.shape == (8, 12)
    grads = flash_kernel.TORCH.backward(out, query, key, key, out, lse, *sizes, scale=0.125)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]
