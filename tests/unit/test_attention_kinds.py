"""Sliding windows, sinks and soft caps on one process, against attention with one matrix of scores."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sft.mcore.attention import torch_kernel
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
