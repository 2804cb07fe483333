"""Sliding windows and branches under context parallelism: outputs, gradients, isolation and bytes, on real ranks."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sft.layers.traffic import halo_tokens
from sft.mcore.attention import torch_kernel
from sft.mcore.attention.flash_kernel import FlashKernel
from sft.mcore.attention.packed_attention import packed_attention
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.parallel import length_classes
from sft.parallel.branches import Branches
from sft.parallel.context_parallel import local_indices
from tests.plain_flash import PLAIN
from tests.ranks.pool import Ranks, joined
from tests.reference_attention import in_one_piece
from tests.trees import text_by_text

HEADS, GROUPS, WIDTH, SCALE = 4, 2, 8, 0.4
FLOAT64_TOLERANCE = 1e-12
BRANCHES_TOLERANCE = 1e-11  # gradients of a parent's keys are sums over all branches
IN_CLASSES = replace(PLAIN, starts_all_blocks=True)
LENGTHS = [48, 0, 16, 96, 32]  # with cp 4, chunks of 6, 2, 12 and 4 tokens
SINKS = [6.0, -2.0, 0.5, 3.0]


def tensors(lengths: Sequence[int]) -> list[Tensor]:
    """Query, key, value and a gradient of the output, in float64."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(sum(lengths), heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [3 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def boundaries(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def attend(
    lengths: Sequence[int],
    window: int | None,
    other: int | None = None,
    flash: bool = False,
    branches: Branches | None = None,
) -> dict[str, Any]:
    """The output and gradients of this rank's tokens, and the bytes that this rank sends by all-to-all.

    other: a document whose tokens are replaced; flash: whether to use the flash kernel, with its CPU replacement
    """
    with joined():
        cu_seqlens, size, rank = boundaries(lengths), dist.get_world_size(), dist.get_rank()
        whole = tensors(lengths)
        if other is not None:
            for x in whole[:3]:
                x[cu_seqlens[other] : cu_seqlens[other + 1]] = 7.0
        rows = torch.from_numpy(local_indices(cu_seqlens, size, rank))
        *local, grad = (x[rows] for x in whole)
        local = [x.requires_grad_() for x in (*local, torch.tensor(SINKS, dtype=torch.float64))]
        cpu = torch.device("cpu")
        kind: Any = partial(FlashKernel.of, operators=IN_CLASSES) if flash else TorchKernel.of
        with mock.patch.multiple(
            length_classes, BLOCK=4, CALL_BLOCKS=0, COPY_BLOCKS=0.0
        ):  # so small packs have classes
            kernel = kind(cu_seqlens, size, rank, cpu, window=window, branches=branches)
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


QUICK = {(2, 2), (2, 40), (2, None), (4, 1), (4, 7), (4, 13), (4, 1000)}  # (size of cp, window)


@pytest.mark.parametrize(
    "cp_size,window",
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.grid)
        for case in itertools.product((2, 4), (1, 2, 7, 13, 40, 1000, None))
    ],
)
def test_outputs_and_gradients(ranks: Ranks, cp_size: int, window: int | None) -> None:
    """Windows of one token, and windows shorter and longer than a chunk and than documents; sinks."""
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


def test_branches(ranks: Ranks) -> None:
    """Of the fourth document, one behind its token 10, one behind its token 50 with a branch, and one at its end."""
    lengths = [48, 0, 16, 96, 32, 8, 24, 8]
    branches = Branches.of([-1, -1, -1, -1, 3, 3, 5, 3], [0, 0, 0, 0, 10, 50, 5, 96])
    *inputs, grad = tensors(lengths)
    whole = [x.requires_grad_() for x in (*inputs, torch.tensor(SINKS, dtype=torch.float64))]
    for window in (7, None):
        expected = text_by_text(*whole[:3], boundaries(lengths), branches, SCALE, window=window, sinks=whole[3])
        gradients = torch.autograd.grad(expected, whole, grad)
        for flash in (False, True):
            found = ranks(4).run(attend, lengths, window, None, flash, branches)
            for of_rank in found:
                close(of_rank["out"], expected[of_rank["rows"]])
                for ours, theirs in zip(of_rank["gradients"][:3], gradients[:3]):
                    close(ours, theirs[of_rank["rows"]], BRANCHES_TOLERANCE)
            close(sum(of_rank["gradients"][3] for of_rank in found), gradients[3])


def close(found: Any, expected: Tensor, tolerance: float = FLOAT64_TOLERANCE) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_document_does_not_know_its_neighbours(ranks: Ranks) -> None:
    """Bitwise; in the messages, halos of neighbouring documents lie next to the halo of the first document."""
    for before, after in zip(ranks(4).run(attend, LENGTHS, 13), ranks(4).run(attend, LENGTHS, 13, 2)):
        is_changed = (before["rows"] >= 48) & (before["rows"] < 64)
        assert torch.equal(before["out"][~is_changed], after["out"][~is_changed])
        assert not torch.equal(before["out"][is_changed], after["out"][is_changed])


def test_bytes_follow_the_window(ranks: Ranks) -> None:
    """Each key and value is sent once in forward and once more in backward, and its gradient is sent back once."""
    for lengths, window in ((LENGTHS, 13), ([64, 32], 3), ([512, 32], 3)):
        found = ranks(4).run(attend, lengths, window)
        tokens = int(halo_tokens(np.array(lengths), window, 4).sum())
        of_token = 2 * GROUPS * WIDTH * 8  # bytes of a token's key and value in float64
        assert sum(of_rank["forward"] for of_rank in found) == tokens * of_token
        assert sum(of_rank["both"] for of_rank in found) == 3 * tokens * of_token
    assert halo_tokens(np.array([64, 512, 32]), 3, 4).tolist() == [6 * 2] * 3
