"""Replacements of the tensors that autograd saves: copies in host memory, views of copies, and tensors that are
recomputed."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sft.mcore import device
from sft.mcore.activations import offload, saved_tensors
from sft.mcore.activations.offload import OffloadedLayers, PinnedMemory
from sft.mcore.activations.recompute import recomputed
from sft.mcore.activations.saved_tensors import SavePolicy

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses slabs of 64 bytes for tensors of 8 bytes; copies are done in order."""
    monkeypatch.setattr(saved_tensors, "MIN_OFFLOADED_BYTES", 8)
    monkeypatch.setattr(offload, "SLAB_BYTES", 64)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, device._Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str], list[Any]]:
    """`noted(OffloadedLayers, "fetch")`: (arguments, result) of every later call."""

    def note(owner: type, name: str) -> list[Any]:
        calls: list[Any] = []
        method = getattr(owner, name)

        def called(self: Any, *given: Any) -> Any:
            calls.append((given, method(self, *given)))
            return calls[-1][1]

        monkeypatch.setattr(owner, name, called)
        return calls

    return note


Noted = Callable[[type, str], list[Any]]


def test_what_is_kept_must_not_change() -> None:
    x = torch.ones(4, requires_grad=True)
    with SavePolicy(recompute=True).forward_pass(1):
        y = x * 2
        z = y * y
    with torch.no_grad():
        y.zero_()
    with pytest.raises(AssertionError, match="changed in place since it was saved"):
        z.sum().backward()


def test_a_later_layer_that_keeps_the_same_keeps_it_itself(noted: Noted) -> None:
    """Otherwise, backward of the last layer would have to fetch a tensor that the first layer keeps."""
    table, x = torch.full((8,), 2.0), torch.ones(8, requires_grad=True)
    saving = SavePolicy(recompute=False, memory=PinnedMemory(CPU), backward_is_next=False)
    with saving.forward_pass(3):
        out = x
        for _ in range(3):
            saving.start_layer()
            out = out * table
    fetched = noted(OffloadedLayers, "fetch")
    out.sum().backward()
    assert [layer for (layer,), _ in fetched] == [1]
    assert x.grad is not None and x.grad.tolist() == [8.0] * 8


def test_the_gradient_of_a_weight_is_summed_where_core_sums() -> None:
    """Tiles of 2, 2 and 1 rows of y = x w: gradients of all tiles except the last are added to main_grad; autograd
    returns the last."""
    weight = torch.tensor([3.0], requires_grad=True)
    weight.main_grad = torch.tensor([100.0])  # type: ignore[attr-defined]
    x = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]], requires_grad=True)
    y = recomputed(lambda rows: rows * weight, x, [weight], tile=2)
    assert y.flatten().tolist() == [3.0, 6.0, 12.0, 24.0, 48.0]
    y.sum().backward()
    assert weight.main_grad.tolist() == [100.0 + 1 + 2 + 4 + 8]  # type: ignore[attr-defined]
    assert weight.grad is not None and weight.grad.tolist() == [16.0]
    assert x.grad is not None and x.grad.flatten().tolist() == [3.0] * 5


def test_a_result_that_nobody_reads_takes_no_memory() -> None:
    """Core computes a layer again: only its gradients are needed, and their memory is that of the result's gradient."""
    weight = torch.tensor([3.0], requires_grad=True)
    weight.main_grad = torch.zeros(1)  # type: ignore[attr-defined]
    x = torch.tensor([[1.0], [2.0], [4.0]], requires_grad=True)
    y = recomputed(lambda rows: rows * rows * weight, x, [weight], tile=2, is_last=True)
    assert y.shape == (3, 1) and y.untyped_storage().nbytes() == 4
    gradient = torch.ones(3, 1)
    (dx,) = torch.autograd.grad(y, [x], gradient)
    assert dx.flatten().tolist() == [6.0, 12.0, 24.0]
    assert dx.data_ptr() == gradient.data_ptr()


@pytest.mark.parametrize(
    "fraction, pipeline, left",
    [
        (1.0, False, 3),
        (1.0, True, 5),
        (0.5, True, 3),  # 2.5 layers are rounded to 3, the first ones
        (0.2, False, 1),
    ],
)
def test_which_layers_go_to_the_host(noted: Noted, fraction: float, pipeline: bool, left: int) -> None:
    """Five layers save one tensor each, and one layer before them.  If backward follows at once, the last two layers
    stay on the device.  The first of these starts the fetches."""
    stored = noted(OffloadedLayers, "store")
    saving = SavePolicy(
        recompute=False, memory=PinnedMemory(CPU), offload_fraction=fraction, backward_is_next=not pipeline
    )
    x = torch.zeros(8, requires_grad=True)
    with saving.forward_pass(5):
        out = x.exp()
        for _ in range(5):
            saving.start_layer()
            out = out.sqrt()
    assert [(one.layer, one.tensor) for _, one in stored] == [(number, None) for number in range(left + 1)]
    fetched = noted(OffloadedLayers, "fetch")
    out.sum().backward()
    assert [layer for (layer,), _ in fetched] == list(range(min(left + 1, 5), -1, -1))
    assert x.grad is not None and x.grad.tolist() == [2.0**-5] * 8


def test_parts_of_a_storage(noted: Noted) -> None:
    """y = 9 x[i] x[i + 4]: one copy of both halves, and none of the weights, which are part of a larger storage."""
    stored = noted(OffloadedLayers, "store")
    buffer = torch.full((16,), 3.0)
    saving = SavePolicy(recompute=False, memory=PinnedMemory(CPU), backward_is_next=False, resident=[buffer[8:]])
    x = torch.arange(8.0, requires_grad=True)
    with saving.forward_pass(1):
        saving.start_layer()
        first, second = (x * buffer[8:]).chunk(2)
        out = first * second
    out.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [36.0, 45.0, 54.0, 63.0, 0.0, 9.0, 18.0, 27.0]
    assert [flat.numel() for (flat,), _ in stored] == [8]


@pytest.mark.parametrize("recompute", [False, True])
def test_what_nobody_wants_any_more_is_freed(recompute: bool) -> None:
    """After a pass, an output that its own operation saves is freed, unless a variable still holds it."""
    x, small = torch.ones(8, requires_grad=True), torch.ones(1, requires_grad=True)
    saving = SavePolicy(recompute=recompute, memory=None if recompute else PinnedMemory(CPU))
    with saving.forward_pass(1):
        saving.start_layer()
        one = x if recompute else small  # either tensor stays on the device
        dropped, held = one.exp(), one.exp()
    storages = [StorageWeakRef(out.untyped_storage()) for out in (dropped, held)]
    del dropped
    assert [storage.expired() for storage in storages] == [True, False]


def test_what_is_computed_again_has_no_gradient_of_its_own() -> None:
    """y = z * z with z = x w and w = 2: z is cheap, and not saved."""
    x, weight = torch.arange(4.0, requires_grad=True), torch.tensor([2.0], requires_grad=True)
    computed: list[Tensor] = []
    saving = SavePolicy(recompute=True)

    def compute(tensor: Tensor) -> Tensor:
        computed.append(tensor * weight)
        return computed[-1]

    with saving.forward_pass(1):
        z = x * weight
        saving.mark_recomputable(z, compute, x)
        out = z * z
    out.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.0, 8.0, 16.0, 24.0]
    assert computed and not any(tensor.requires_grad for tensor in computed)


def test_what_cheap_things_are_made_of_is_not_held_once_the_pass_is_over() -> None:
    x = torch.ones(8, requires_grad=True)
    saving = SavePolicy(recompute=True)
    with saving.forward_pass(1):
        held = x.exp()
        given = torch.ones(8)
        copy = given.clone()
        saving.mark_recomputable(copy, torch.clone, given)
    storage = StorageWeakRef(given.untyped_storage())
    del given, copy
    assert storage.expired() and held.requires_grad
