"""Linear attention under context parallelism on real ranks: outputs, every gradient, isolation and bytes.

The reference is the recurrence itself, token by token, for one document at a time without padding, or for one path of a
tree.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sft.layers.mixers.delta import HeadSizes
from sft.layers.mixers.recurrent import StateTraffic
from sft.layers.traffic import Passes
from sft.mcore.linear_attention.delta_rule import Inputs
from sft.mcore.linear_attention.documents import LinearDocuments, linear_attention
from sft.mcore.linear_attention.short_convolution import short_convolution
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from sft.parallel.branches import Branches
from sft.parallel.context_parallel import local_indices
from sft.parallel.cp_group import CpGroup
from sft.parallel.fragments import boundaries
from tests.ranks.pool import Ranks, joined
from tests.ranks.sent import Sent

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
TAPS = 4
MULTIPLE = 24  # padded lengths are multiples of it; fits cp 2, 3 and 4
# Lengths without padding, around the kernel's chunks of 64 tokens and, for 504 tokens on cp 4, around a document's
# chunks of 63.  The sixth document is empty, the last one is filler.
LENGTHS = [1, 5, 63, 64, 65, 0, 504, 25, 0]
LONG = [2048, 1, 1536, 200, 513]  # with cp 4, a fragment of the document of 1536 tokens is 3 kernel chunks
SHORT = [40, 1, 120]
SIZES = HeadSizes(key_heads=2, value_heads=4, key_dim=5, value_dim=3, width=8)
ONE_HEAD = HeadSizes(key_heads=1, value_heads=1, key_dim=4, value_dim=6, width=8)


def padded(lengths: Sequence[int]) -> np.ndarray:
    """Boundaries of documents with padding.  A document without tokens is empty, or filler if it is the last one."""
    rounded = [
        -(-max(length, index == len(lengths) - 1) // MULTIPLE) * MULTIPLE for index, length in enumerate(lengths)
    ]
    return boundaries(np.array(rounded))


def tensors(lengths: Sequence[int], sizes: HeadSizes, dtype: torch.dtype) -> list[Tensor]:
    """x [t, channels], weight [channels, TAPS], g and beta [t, value heads], and a gradient of the output.

    The gradient is zero at padding, because no loss depends on outputs there.
    """
    generator = torch.Generator().manual_seed(11)
    cu_seqlens = padded(lengths)
    num_tokens, heads = int(cu_seqlens[-1]), sizes.value_heads
    channels = 2 * sizes.key_heads * sizes.key_dim + heads * sizes.value_dim
    shapes = [
        (num_tokens, channels),
        (channels, TAPS),
        *[(num_tokens, heads)] * 2,
        (num_tokens, heads, sizes.value_dim),
    ]
    x, weight, g, beta, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    for first, stop, length in zip(cu_seqlens, cu_seqlens[1:], lengths):
        grad[first + length : stop] = 0.0
    return [tensor.to(dtype) for tensor in (x, weight, -torch.nn.functional.softplus(g - 2), beta.sigmoid(), grad)]


def divided(mixed: Tensor, sizes: HeadSizes) -> tuple[Tensor, Tensor, Tensor]:
    """[t, channels] -> q, k and v by heads."""
    keys = sizes.key_heads * sizes.key_dim
    q, k, v = mixed.split((keys, keys, sizes.value_heads * sizes.value_dim), dim=-1)
    return (
        q.unflatten(1, (-1, sizes.key_dim)),
        k.unflatten(1, (-1, sizes.key_dim)),
        v.unflatten(1, (-1, sizes.value_dim)),
    )


def one_document(x: Tensor, weight: Tensor, g: Tensor, beta: Tensor, sizes: HeadSizes) -> Tensor:
    """Convolution and recurrence, token by token."""
    before = torch.cat((x.new_zeros(TAPS - 1, x.shape[1]), x))
    z = (before.unfold(0, TAPS, 1) * weight).sum(-1)
    q, k, v = divided(z / (1 + torch.exp(-z)), sizes)
    repeats = sizes.value_heads // sizes.key_heads
    q, k = ((y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeats, 1) for y in (q, k))
    state, out = x.new_zeros(sizes.value_heads, sizes.key_dim, sizes.value_dim), []
    for t in range(len(x)):
        state = state * g[t].exp()[:, None, None]
        delta = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], delta)
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) * sizes.key_dim**-0.5)
    return torch.stack(out)


@cache
def expected(
    lengths: tuple[int, ...], sizes: HeadSizes, branches: Branches | None = None
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """The outputs of the pack, the gradients of x, weight, g and beta, and the mask of real tokens; in float64."""
    x, weight, g, beta, grad = tensors(lengths, sizes, torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, g, beta)]
    out, is_real = torch.zeros_like(grad), torch.zeros(len(x), dtype=torch.bool)
    starts = padded(lengths).tolist()
    for document, (first, length) in enumerate(zip(starts, lengths)):
        path = [] if branches is None else branches.path(document)
        pieces = [*((starts[piece.document], piece.length) for piece in path), (first, length)]
        text = torch.cat([torch.arange(start, start + count) for start, count in pieces])
        rows = slice(first, first + length)
        if length:
            out[rows] = one_document(x[text], weight, g[text], beta[text], sizes)[len(text) - length :]
            is_real[rows] = True
    return out.detach(), torch.autograd.grad(out, leaves, grad), is_real


def attend(
    lengths: Sequence[int],
    max_short: int,
    sizes: HeadSizes = SIZES,
    dtype: torch.dtype = torch.float64,
    other: int | None = None,
    branches: Branches | None = None,
) -> dict[str, Any]:
    """The outputs and gradients of this rank's tokens, and the bytes that it sends.  other: a document whose tokens are
    replaced"""
    with joined():
        cu_seqlens, size, rank = padded(lengths), dist.get_world_size(), dist.get_rank()
        x, weight, g, beta, grad = tensors(lengths, sizes, dtype)
        if other is not None:
            rows = slice(*cu_seqlens[other : other + 2].tolist())
            x[rows], g[rows], beta[rows], grad[rows] = 7.0, -0.5, 0.25, 3.0
        local_rows = torch.from_numpy(local_indices(cu_seqlens, size, rank))
        leaves = [y.requires_grad_() for y in (x[local_rows], weight, g[local_rows], beta[local_rows])]
        documents = LinearDocuments.of(
            cu_seqlens,
            CpGroup(size, rank, dist.group.WORLD),
            torch.device("cpu"),
            TorchDeltaKernel(),
            heads=sizes.value_heads,
            num_taps=TAPS,
            max_short=max_short,
            branches=branches,
        )
        with Sent() as sent:
            mixed = short_convolution(*leaves[:2], documents.convolution, dist.group.WORLD)
            inputs = Inputs(*divided(mixed, sizes), *leaves[2:])
            out = linear_attention(inputs, documents, lambda rule, inputs: rule(*inputs))
            forward = sent.num_bytes
            gradients = torch.autograd.grad(out, leaves, grad[local_rows])
        backward = sent.num_bytes - forward
        return {
            "rows": local_rows,
            "out": out.detach(),
            "gradients": gradients,
            "forward": forward,
            "backward": backward,
        }


CASES = [  # cp size, lengths, max_short (long and short documents, or only one kind), dtype, heads
    (1, LENGTHS, 0, torch.float64, SIZES),
    (2, LENGTHS, 72, torch.float64, SIZES),
    (3, LENGTHS, 48, torch.float32, SIZES),
    (4, LENGTHS, 0, torch.float64, SIZES),
    (4, LENGTHS, 72, torch.float32, SIZES),
    (4, SHORT, 10**6, torch.float64, SIZES),  # one rank computes nothing
    (3, [120, 24, 70], 24, torch.float64, SIZES),  # one of three ranks composes the maps of two heads
    (4, [120, 24, 70], 24, torch.float64, ONE_HEAD),  # one rank composes the maps of all heads
    *(pytest.param(cp, LONG, 216, torch.float32, SIZES, marks=pytest.mark.grid) for cp in (2, 3, 4)),
    *(pytest.param(cp, LONG, 0, torch.float64, SIZES, marks=pytest.mark.grid) for cp in (2, 3, 4)),
]


@pytest.mark.parametrize("cp_size,lengths,max_short,dtype,sizes", CASES, ids=str)
def test_outputs_and_gradients(
    ranks: Ranks, cp_size: int, lengths: list[int], max_short: int, dtype: torch.dtype, sizes: HeadSizes
) -> None:
    results = ranks(cp_size).run(attend, lengths, max_short, sizes, dtype)
    compare(results, expected(tuple(lengths), sizes), dtype)


def compare(results: list[dict[str, Any]], reference: tuple[Tensor, tuple[Tensor, ...], Tensor], dtype: Any) -> None:
    out, (dx, dweight, *dgates), is_real = reference
    for result in results:
        rows = result["rows"]
        real = is_real[rows]
        close(result["out"][real], out[rows][real], dtype)
        for ours, theirs in zip((result["gradients"][0], *result["gradients"][2:]), (dx, *dgates), strict=True):
            close(ours, theirs[rows], dtype)
            assert not ours[~real].any()
    close(sum(result["gradients"][1] for result in results), dweight, dtype)


def close(ours: Any, theirs: Tensor, dtype: torch.dtype) -> None:
    """Compares relative to the largest number, because gradients of the first tokens of a long document are sums over
    the whole document."""
    torch.testing.assert_close(
        ours.double() / theirs.abs().max(), theirs / theirs.abs().max(), rtol=0, atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("other,max_short", [(1, 72), (2, 0), pytest.param(1, 1000, marks=pytest.mark.grid)])
def test_a_document_does_not_know_its_neighbours(ranks: Ranks, max_short: int, other: int) -> None:
    """Bitwise, also for the first tokens after the replaced document, which the convolution could read.

    Documents of 192 tokens end exactly at a kernel chunk (64).  In the first case, documents of 72 tokens count as
    short, and one of three ranks computes two of them.
    """
    lengths = [192, 72, 192, 3, 72, 72, 72]
    cu_seqlens = padded(lengths)
    for before, after in zip(
        *(ranks(3).run(attend, lengths, max_short, SIZES, torch.float32, o) for o in (None, other))
    ):
        is_changed = (before["rows"] >= cu_seqlens[other]) & (before["rows"] < cu_seqlens[other + 1])
        for index in (0, 2, 3):
            x, y = (result["gradients"][index] for result in (before, after))
            assert torch.equal(x[~is_changed], y[~is_changed])
            assert not torch.equal(x[is_changed], y[is_changed])
        assert torch.equal(before["out"][~is_changed], after["out"][~is_changed])
        assert not torch.equal(before["out"][is_changed], after["out"][is_changed])


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_the_bytes_are_those_of_the_formula(ranks: Ranks, cp_size: int) -> None:
    """With the threshold that follows from the head sizes.  With cp 1, there is no collective."""
    sizes = replace(SIZES, width=4)
    max_short = sizes.max_short(cp_size)
    for lengths in ([120, 24, 30, 9], [24] * 5, [max_short + 24]):
        results = ranks(cp_size).run(attend, lengths, max_short, sizes, torch.float32)
        formula = StateTraffic(heads=sizes, conv_kernel=TAPS, passes=Passes(num=1, of_attention=1, width=sizes.width))
        num_bytes = formula.others(np.diff(padded(lengths)), cp_size).sum()
        assert sum(result["forward"] for result in results) == num_bytes
        assert sum(result["backward"] for result in results) == num_bytes
        assert (num_bytes == 0) == (cp_size == 1)
