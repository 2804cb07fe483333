"""Mamba-2 under context parallelism on real ranks: outputs, every gradient, isolation, trees and bytes.

The reference is the recurrence itself, token by token in float64, for one document at a time without padding, or for
one path of a tree.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sft.layers.mixers.mamba import MambaSizes
from sft.layers.mixers.recurrent import StateTraffic
from sft.layers.traffic import Passes
from sft.mcore.linear_attention.documents import LinearDocuments, linear_attention
from sft.mcore.linear_attention.short_convolution import short_convolution
from sft.mcore.linear_attention.ssd import SsdInputs
from sft.mcore.linear_attention.ssd_kernel import TorchSsdKernel
from sft.parallel.branches import Branches
from sft.parallel.context_parallel import local_indices
from sft.parallel.cp_group import CpGroup
from sft.parallel.fragments import boundaries
from tests.ranks.pool import Ranks, joined
from tests.ranks.sent import Sent

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
TAPS, MULTIPLE = 4, 24  # padded lengths are multiples of 24, which fits cp 2 and 4
LENGTHS = [1, 5, 63, 65, 0, 504, 25, 0]  # around the kernel's chunks of 64 tokens; the last document is filler
BRANCHES = Branches.of([-1, -1, -1, 2, -1, -1, 5, -1], [0, 0, 0, 40, 0, 0, 300, 0])
SIZES = MambaSizes(heads=4, groups=2, head_dim=3, state_dim=5, width=8)


def padded(lengths: Sequence[int]) -> np.ndarray:
    return boundaries(
        np.array([-(-max(n, i == len(lengths) - 1) // MULTIPLE) * MULTIPLE for i, n in enumerate(lengths)])
    )


def tensors(lengths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """x, weight and bias of the convolution, g, dt, and a gradient of the output, which is zero at padding."""
    generator, cu_seqlens = torch.Generator().manual_seed(11), padded(lengths)
    t, channels, heads = int(cu_seqlens[-1]), SIZES.channels, SIZES.heads
    shapes = [(t, channels), (channels, TAPS), (channels,), (t, heads), (t, heads), (t, heads, SIZES.head_dim)]
    x, weight, bias, g, dt, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    for first, stop, length in zip(cu_seqlens, cu_seqlens[1:], lengths):
        grad[first + length : stop] = 0.0
    return [y.to(dtype) for y in (x, weight, bias, -torch.nn.functional.softplus(g - 2), dt.exp(), grad)]


def divided(mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[t, channels] -> C, B and x."""
    x, b, c = mixed.split([SIZES.inner, *[SIZES.groups * SIZES.state_dim] * 2], -1)
    return (*(y.unflatten(1, (SIZES.groups, -1)) for y in (c, b)), x.unflatten(1, (SIZES.heads, -1)))


def one_text(x: Tensor, weight: Tensor, bias: Tensor, g: Tensor, dt: Tensor) -> Tensor:
    before = torch.cat((x.new_zeros(TAPS - 1, x.shape[1]), x))
    z = (before.unfold(0, TAPS, 1) * weight).sum(-1) + bias
    c, b, values = divided(z / (1 + torch.exp(-z)))
    c, b = (y.repeat_interleave(SIZES.heads // SIZES.groups, 1) for y in (c, b))
    state, out = x.new_zeros(SIZES.heads, SIZES.state_dim, SIZES.head_dim), []
    for t in range(len(x)):
        written = torch.einsum("hn,hp->hnp", b[t], dt[t][:, None] * values[t])
        state = g[t].exp()[:, None, None] * state + written
        out.append(torch.einsum("hn,hnp->hp", c[t], state))
    return torch.stack(out)


@cache
def expected(branches: Branches | None = None) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """The outputs of the pack, the gradients of the inputs, and the mask of real tokens."""
    *leaves, grad = tensors(LENGTHS, torch.float64)
    x, weight, bias, g, dt = (tensor.requires_grad_() for tensor in leaves)
    out, is_real, starts = torch.zeros_like(grad), torch.zeros(len(x), dtype=torch.bool), padded(LENGTHS).tolist()
    for document, (first, length) in enumerate(zip(starts, LENGTHS)):
        path = [] if branches is None else branches.path(document)
        pieces = [*((starts[piece.document], piece.length) for piece in path), (first, length)]
        text, rows = torch.cat([torch.arange(s, s + n) for s, n in pieces]), slice(first, first + length)
        if length:
            out[rows] = one_text(x[text], weight, bias, g[text], dt[text])[len(text) - length :]
            is_real[rows] = True
    return out.detach(), torch.autograd.grad(out, [x, weight, bias, g, dt], grad), is_real


def attend(
    max_short: int, dtype: torch.dtype, branches: Branches | None = None, other: int | None = None
) -> dict[str, Any]:
    """The outputs and gradients of this rank's tokens, and the bytes that it sends.  other: a document whose tokens are
    replaced"""
    with joined():
        cu_seqlens, size, rank = padded(LENGTHS), dist.get_world_size(), dist.get_rank()
        x, weight, bias, g, dt, grad = tensors(LENGTHS, dtype)
        if other is not None:
            rows = slice(*cu_seqlens[other : other + 2].tolist())
            x[rows], g[rows], dt[rows], grad[rows] = 7.0, -0.5, 0.25, 3.0
        local = torch.from_numpy(local_indices(cu_seqlens, size, rank))
        leaves = [y.requires_grad_() for y in (x[local], weight, bias, g[local], dt[local])]
        cp, sizes = CpGroup(size, rank, dist.group.WORLD), {"heads": SIZES.heads, "num_taps": TAPS}
        documents = LinearDocuments.of(
            cu_seqlens, cp, torch.device("cpu"), TorchSsdKernel(), max_short=max_short, branches=branches, **sizes
        )
        with Sent() as sent:
            mixed = short_convolution(leaves[0], leaves[1], documents.convolution, dist.group.WORLD, leaves[2])
            inputs = SsdInputs(*divided(mixed), *leaves[3:])
            out = linear_attention(inputs, documents, lambda rule, inputs: rule(*inputs))
            forward = sent.num_bytes
            gradients = torch.autograd.grad(out, leaves, grad[local])
        own = {"rows": local, "out": out.detach(), "gradients": gradients}
        return {**own, "forward": forward, "backward": sent.num_bytes - forward}


def whole(results: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Outputs and gradients of the whole pack: rows of ranks in their places, gradients of weights summed."""
    joined_rows = []
    for tokens in ([r["out"] for r in results], *([r["gradients"][i] for r in results] for i in (0, 3, 4))):
        total = torch.zeros((sum(map(len, tokens)), *tokens[0].shape[1:]), dtype=tokens[0].dtype)
        for result, rows in zip(results, tokens):
            total[result["rows"]] = rows
        joined_rows.append(total)
    out, dx, dg, ddt = joined_rows
    return [out, dx, *(sum(r["gradients"][i] for r in results) for i in (1, 2)), dg, ddt]


@pytest.mark.parametrize(
    "cp_size,max_short,dtype,branches",
    [
        (1, 0, torch.float64, None),
        (2, 72, torch.float64, None),
        (4, 72, torch.float64, None),
        (4, 0, torch.float32, None),
        (1, 0, torch.float64, BRANCHES),
        (4, 72, torch.float64, BRANCHES),
    ],
    ids=["cp 1", "cp 2", "cp 4", "cp 4, fp32", "cp 1, trees", "cp 4, trees"],
)
def test_outputs_and_gradients_are_those_of_each_text_alone(
    ranks: Ranks, cp_size: int, max_short: int, dtype: torch.dtype, branches: Branches | None
) -> None:
    found = whole(ranks(cp_size).run(attend, max_short, dtype, branches))
    out, gradients, is_real = expected(branches)
    scale = [is_real, is_real, ..., ..., is_real, is_real]
    for x, reference, rows in zip(found, [out, *gradients], scale, strict=True):
        error = (x.double() - reference)[rows].abs().max() / reference.abs().max()
        assert error < TOLERANCE[dtype], error


@pytest.mark.parametrize("other,max_short", [(2, 72), (5, 0)])
def test_a_document_does_not_know_its_neighbours(ranks: Ranks, other: int, max_short: int) -> None:
    """Bitwise, on two ranks, if a short document or one whose states pass between ranks is replaced."""
    first, second = (whole(ranks(2).run(attend, max_short, torch.float32, None, o)) for o in (None, other))
    edges = padded(LENGTHS)
    inside = torch.zeros(int(edges[-1]), dtype=torch.bool)
    inside[edges[other] : edges[other + 1]] = True
    for i in (0, 1, 4, 5):
        assert torch.equal(first[i][~inside], second[i][~inside]) and not torch.equal(first[i], second[i])


@pytest.mark.parametrize("branches", [None, BRANCHES], ids=["documents", "trees"])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_bytes_are_those_of_the_formula(ranks: Ranks, cp_size: int, branches: Branches | None) -> None:
    """In fp32: a token has 32 channels and 12 outputs and 8 numbers of decays; a map 4 * (1 + 2 * 15) numbers."""
    sizes = MambaSizes(heads=4, groups=2, head_dim=3, state_dim=5, width=4)
    assert (sizes.channels, sizes.token_bytes, sizes.map_bytes) == (32, 208, 496)
    results = ranks(cp_size).run(attend, sizes.max_short(cp_size), torch.float32, branches)
    formula = StateTraffic(heads=sizes, conv_kernel=TAPS, passes=Passes(num=1, of_attention=1, width=4))
    counted = formula.others(np.diff(padded(LENGTHS)), cp_size, branches).sum()
    assert sum(r["forward"] for r in results) == sum(r["backward"] for r in results) == counted
