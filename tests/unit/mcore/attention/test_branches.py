"""Attention of branches equals attention of each text by itself, with any kernel on any number of ranks."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sft.mcore.attention import packed_attention as packed_attention_module
from sft.mcore.attention import torch_kernel
from sft.mcore.attention.flash_kernel import FlashKernel
from sft.mcore.attention.key_source import LocalKeys
from sft.mcore.attention.packed_attention import packed_attention
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.parallel.branches import Branches
from sft.parallel.context_parallel import local_indices
from sft.parallel.halo import Halo
from tests.plain_flash import PLAIN
from tests.trees import random_tree, text_by_text

CPU, SCALE, HEADS = torch.device("cpu"), 0.4, 4
FLOAT64_TOLERANCE = 1e-12  # sums in another order
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
