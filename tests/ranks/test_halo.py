"""Sliding windows under context parallelism: outputs, gradients, isolation and bytes, on real ranks."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sft.mcore.attention import torch_kernel
from sft.mcore.attention.flash_kernel import FlashKernel, Operators
from sft.mcore.attention.key_source import KeySource
from sft.mcore.attention.packed_attention import packed_attention
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.parallel.context_parallel import local_indices
from sft.parallel.halo import num_halo_tokens
from tests.ranks.pool import Ranks, join
from tests.reference_attention import in_one_piece

HEADS, GROUPS, WIDTH, SCALE = 4, 2, 8, 0.4
FLOAT64_TOLERANCE = 1e-12
LENGTHS = [48, 0, 16, 96, 32]  # with cp 4, chunks of 6, 2, 12 and 4 tokens
SINKS = [6.0, -2.0, 0.5, 3.0]


def tensors(lengths: Sequence[int]) -> list[Tensor]:
    """Query, key, value and a gradient of the output, in float64."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(sum(lengths), heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [3 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def boundaries(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def attend(*case: Any) -> dict[str, Any]:
    """`attend_jointly` in a process group of its own."""
    join()
    try:
        return attend_jointly(*case)
    finally:
        dist.destroy_process_group()


def attend_jointly(
    lengths: Sequence[int], window: int | None, other: int | None = None, flash: bool = False
) -> dict[str, Any]:
    """Output and gradients of this rank's tokens, and the bytes that this rank sends by all-to-all.

    other: a document whose tokens are replaced; flash: the flash kernel, with a replacement that attends in one piece
    """
    cu_seqlens, size, rank = boundaries(lengths), dist.get_world_size(), dist.get_rank()
    whole = tensors(lengths)
    if other is not None:
        for x in whole[:3]:
            x[cu_seqlens[other] : cu_seqlens[other + 1]] = 7.0
    rows = torch.from_numpy(local_indices(cu_seqlens, size, rank))
    *local, grad = (x[rows] for x in whole)
    local = [x.requires_grad_() for x in (*local, torch.tensor(SINKS, dtype=torch.float64))]
    cpu = torch.device("cpu")
    if flash:
        kernel: Any = FlashKernel.of(
            cu_seqlens, size, rank, cpu, window=window, operators=Operators(_by_sequence, _by_sequence_backward)
        )
    else:
        kernel = TorchKernel.of(cu_seqlens, size, rank, cpu, window=window)
    sent, all_to_all = [0], dist.all_to_all_single

    def counted(received: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += tensor.nbytes
        return all_to_all(received, tensor, *args, **kwargs)

    with (
        mock.patch.object(torch_kernel, "QUERY_TILE", 5),
        mock.patch.object(torch_kernel, "KEY_TILE", 7),
        mock.patch.object(dist, "all_to_all_single", counted),
    ):
        out = packed_attention(*local[:3], kernel, SCALE, dist.group.WORLD, sinks=local[3])
        forward = sent[0]
        gradients = torch.autograd.grad(out, local, grad)
    return {"rows": rows, "out": out.detach(), "gradients": gradients, "forward": forward, "both": sent[0]}


def _by_sequence(query: Tensor, keys: Tensor, values: Tensor, *sizes: Any, scale: float, num_before: int) -> Any:
    """What the flash kernel computes: causal from the bottom right, and `num_before` keys before that."""
    starts_q, starts_k = (x.tolist() for x in sizes[:2])
    outs, sums = [], []
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
        k, v = (x[k0:k1].repeat_interleave(HEADS // GROUPS, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], k) * scale
        distance = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None] - torch.arange(k1 - k0)[None, :]
        scores = scores.masked_fill((distance < 0) | (distance > num_before), -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, dim=1)


def _by_sequence_backward(
    grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, *sizes: Any, **options: Any
) -> Any:
    """Flash attention's equations, with `out` and `lse` as they are given: weights = exp(scores - lse)."""
    dquery, dkeys, dvalues = (torch.zeros_like(x) for x in (query, keys, values))
    starts_q, starts_k = (x.tolist() for x in sizes[:2])
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
        k, v = (x[k0:k1].repeat_interleave(HEADS // GROUPS, dim=1) for x in (keys, values))
        distance = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None] - torch.arange(k1 - k0)[None, :]
        hidden = (distance < 0) | (distance > options["num_before"])
        scores = (torch.einsum("qhd,khd->hqk", query[q0:q1], k) * options["scale"]).masked_fill(hidden, -torch.inf)
        weights = torch.exp(scores - lse[:, q0:q1, None])
        delta = (grad[q0:q1] * out[q0:q1]).sum(-1).t()[:, :, None]
        dscores = weights * (torch.einsum("qhd,khd->hqk", grad[q0:q1], v) - delta) * options["scale"]
        dquery[q0:q1] = torch.einsum("hqk,khd->qhd", dscores, k)
        for total, part in (
            (dkeys, torch.einsum("hqk,qhd->khd", dscores, query[q0:q1])),
            (dvalues, torch.einsum("hqk,qhd->khd", weights, grad[q0:q1])),
        ):
            total[k0:k1] = part.unflatten(1, (GROUPS, -1)).sum(2)
    return dquery, dkeys, dvalues


@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("window", [1, 2, 7, 13, 40, 1000, None])
def test_outputs_and_gradients(ranks: Ranks, cp_size: int, window: int | None) -> None:
    """Windows of one token, smaller and larger than a chunk and than documents; sinks."""
    whole = [x.requires_grad_() for x in (*tensors(LENGTHS)[:3], torch.tensor(SINKS, dtype=torch.float64))]
    expected, _ = in_one_piece(*whole[:3], boundaries(LENGTHS), SCALE, window=window, sinks=whole[3])
    gradients = torch.autograd.grad(expected, whole, tensors(LENGTHS)[3])
    for flash in (False, True) if window is not None else (False,):
        found = ranks(cp_size).run(attend, LENGTHS, window, None, flash)
        for of_rank in found:
            close(of_rank["out"], expected[of_rank["rows"]])
            for ours, theirs in zip(of_rank["gradients"][:3], gradients[:3]):
                close(ours, theirs[of_rank["rows"]])
        close(sum(of_rank["gradients"][3] for of_rank in found), gradients[3])


def close(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


def test_a_document_does_not_know_its_neighbours(ranks: Ranks) -> None:
    """Bitwise; halos of the first document's neighbours are next to it in the messages."""
    for before, after in zip(ranks(4).run(attend, LENGTHS, 13), ranks(4).run(attend, LENGTHS, 13, 2)):
        is_changed = (before["rows"] >= 48) & (before["rows"] < 64)
        assert torch.equal(before["out"][~is_changed], after["out"][~is_changed])
        assert not torch.equal(before["out"][is_changed], after["out"][is_changed])


def test_bytes_follow_the_window(ranks: Ranks) -> None:
    """Each key and value crosses once in forward and once more in backward, and its gradient once back."""
    for lengths, window in ((LENGTHS, 13), ([64, 32], 3), ([512, 32], 3)):
        found = ranks(4).run(attend, lengths, window)
        tokens = num_halo_tokens(boundaries(lengths), window, 4)
        of_token = 2 * GROUPS * WIDTH * 8  # key and value in float64
        assert sum(of_rank["forward"] for of_rank in found) == tokens * of_token
        assert sum(of_rank["both"] for of_rank in found) == 3 * tokens * of_token
    assert num_halo_tokens(boundaries([64, 32]), 3, 4) == num_halo_tokens(boundaries([512, 32]), 3, 4) == 2 * 6 * 2


# --- gpt-oss-20b at 64K tokens --------------------------------------------------------------------------------------

LENGTH, WINDOW = 65_536, 128
KEY_HEADS, HEAD_WIDTH, BF16, FP32 = 8, 64, 2, 4
MOST_OF_ALL_GATHER = 0.02  # the share that issue 22 allows
# Each collective with the index of the tensors whose difference a ring sends: what it gathers, and what it sums.
COLLECTIVES = {"all_gather_into_tensor": (0, 1), "reduce_scatter_tensor": (1, 0)}


@dataclass(frozen=True)
class TransfersOnly:
    """A kernel that gets keys and returns gradients like another kernel, and computes nothing."""

    key_source: KeySource

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return query, torch.zeros(query.shape[1::-1])

    def backward(self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return query, keys, values


def bytes_of_a_layer(window: int | None) -> Counter[str]:
    """Bytes that this rank sends in a layer's forward and backward, in bf16, by collective.

    Queries stay on their rank, so eight query heads count like 64.
    """
    join()
    size, rank, sent = dist.get_world_size(), dist.get_rank(), Counter[str]()
    all_to_all = dist.all_to_all_single

    def halo(received: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent["all_to_all_single"] += tensor.nbytes
        return all_to_all(received, tensor, *args, **kwargs)

    def ring(name: str, collective: Callable[..., Any], whole: int, part: int) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            sent[name] += args[whole].nbytes - args[part].nbytes
            return collective(*args, **kwargs)

        return counted

    replaced = {name: ring(name, getattr(dist, name), *indices) for name, indices in COLLECTIVES.items()}
    kernel = TorchKernel.of(boundaries([LENGTH]), size, rank, torch.device("cpu"), window=window)
    local = [torch.zeros(LENGTH // size, KEY_HEADS, HEAD_WIDTH, dtype=torch.bfloat16) for _ in range(3)]
    local = [x.requires_grad_() for x in local]
    try:
        with mock.patch.multiple(dist, all_to_all_single=halo, **replaced):
            out = packed_attention(*local, TransfersOnly(kernel.key_source), SCALE, dist.group.WORLD)
            out.backward(torch.zeros_like(out))  # type: ignore[no-untyped-call]
    finally:
        dist.destroy_process_group()
    return sent


def test_the_bytes_of_gpt_oss_at_64k(ranks: Ranks) -> None:
    """Key and value go forward, and once more backward; their gradients return in fp32.

    762 tokens with a window of 128, of which each rank lacks 127 or 254.  Without it, 3 of 4 parts on each of 4 ranks.
    """
    of_token = 2 * KEY_HEADS * HEAD_WIDTH * (BF16 + BF16 + FP32)
    windows = ranks(4).run(bytes_of_a_layer, WINDOW)
    assert sum(map(Counter.total, windows)) == 762 * of_token == 6_242_304
    assert [set(of_rank) for of_rank in windows] == [{"all_to_all_single"}] * 4
    full = ranks(4).run(bytes_of_a_layer, None)
    assert sum(map(Counter.total, full)) == 4 * 3 * LENGTH // 4 * of_token == 1_610_612_736
    assert [set(of_rank) for of_rank in full] == [set(COLLECTIVES)] * 4
    assert sum(map(Counter.total, windows)) < MOST_OF_ALL_GATHER * sum(map(Counter.total, full))
