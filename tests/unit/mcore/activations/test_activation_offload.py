"""Copies to host memory and back obey the order of streams; a replacement of CUDA's streams checks it with vector
clocks."""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sft.errors import StorageError
from sft.mcore import page_locked
from sft.mcore.activations import offload

SLAB = 1000  # bytes; smaller than some tensors, and no multiple of any tensor's size


class Stream:
    """Knows which work, of any stream, is over before its next work begins (a vector clock)."""

    def __init__(self) -> None:
        self.done: dict[Stream, int] = {self: 0}

    def work(self) -> tuple["Stream", int]:
        self.done[self] += 1
        return self, self.done[self]

    def knows(self, work: tuple["Stream", int]) -> bool:
        stream, number = work
        return self.done.get(stream, 0) >= number

    def record_event(self) -> dict["Stream", int]:
        return dict(self.done)

    def wait_event(self, event: dict["Stream", int]) -> None:
        for stream, number in event.items():
            self.done[stream] = max(number, self.done.get(stream, 0))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.done)


class Cuda:
    """Replaces torch.cuda in `offload.py`; every copy is done at once, and its time is recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compute = self._current = Stream()
        self.faults: list[str] = []
        self.copied: dict[int, tuple[Stream, int]] = {}  # by address in host memory
        self.fetched: dict[int, tuple[Stream, int]] = {}  # by tensor
        self.stored: weakref.WeakSet[offload.OffloadedTensor] = weakref.WeakSet()
        names = dict(Stream=Stream, current_stream=lambda: self._current, stream=self._inside)
        stand_in = SimpleNamespace(
            cuda=SimpleNamespace(**names), empty=self._empty, uint8=torch.uint8, device=torch.device, Tensor=Tensor
        )
        self._copy = offload._copy
        monkeypatch.setattr(offload, "torch", stand_in)
        monkeypatch.setattr(offload, "SLAB_BYTES", SLAB)
        monkeypatch.setattr(offload, "_copy", self.copy)

    def _empty(self, *told: Any, **named: Any) -> Tensor:
        if self._current is not self.compute:
            self.faults.append("memory of the stream that copies: given to another tensor while still computed with")
        return torch.empty(*told, **named)

    @contextlib.contextmanager
    def _inside(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def copy(self, flat: Tensor, room: list[Tensor], *, out: bool) -> None:
        work = self._current.work()
        if self._current is self.compute:
            self.faults.append("copied by the stream that computes")
        if not self._current.knows((self.compute, self.compute.done[self.compute])):
            self.faults.append("copied before it was computed, or into memory still in use")
        for piece in room:
            if not out and not self._current.knows(self.copied[piece.data_ptr()]):
                self.faults.append("fetched before it was there")
            if out:
                self.copied[piece.data_ptr()] = work
        if not out:
            self.fetched[id(flat)] = work
        weakref.finalize(flat, self._freed, work, room if out else None)
        self._copy(flat, room, out=out)

    def _freed(self, work: tuple[Stream, int], room: list[Tensor] | None) -> None:
        """room: the tensor was copied there, which matters as long as it may be fetched."""
        wanted = room is None or any(stored.slices is room for stored in self.stored)
        if wanted and not self.compute.knows(work):
            self.faults.append("memory used for something else while it is copied")

    def take(self, stored: offload.OffloadedTensor) -> Tensor:
        self.compute.work()
        tensor = stored.restore()
        if id(tensor) in self.fetched and not self.compute.knows(self.fetched[id(tensor)]):
            self.faults.append("used before it was fetched")
        return tensor


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def made(layer: int, number: int) -> Tensor:
    """A tensor of 1,204 or 404 bytes, or of 62 bytes with another dtype."""
    size, dtype = [(301, torch.float32), (101, torch.float32), (31, torch.bfloat16)][number]
    return torch.full((size,), layer + number / 4, dtype=dtype)


def passed(cuda: Cuda, memory: offload.PinnedMemory, num_layers: int) -> list[list[offload.OffloadedTensor]]:
    """Runs a forward pass."""
    layers, found = offload.OffloadedLayers(memory), []
    for layer in range(num_layers):
        layers.start_layer()
        found.append([])
        for number in range(3):
            tensor = made(layer, number)
            cuda.compute.work()  # the work that made the tensor
            found[-1].append(layers.store(tensor))
            cuda.stored.add(found[-1][-1])
    return found


def on_device(found: list[list[offload.OffloadedTensor]]) -> list[int]:
    return [sum(stored.tensor is not None for stored in layer) for layer in found]


def test_everything_comes_back_in_order(cuda: Cuda) -> None:
    memory = offload.PinnedMemory(torch.device("cpu"))
    for _ in range(2):
        found = passed(cuda, memory, 5)
        assert on_device(found) == [0, 0, 0, 3, 3]
        for layer in reversed(range(5)):
            for number in (2, 0, 1, 0):
                assert torch.equal(cuda.take(found[layer][number]), made(layer, number))
            assert on_device(found)[layer] == 3 and on_device(found)[max(0, layer - 1)] == 3
            assert sum(on_device(found)[: max(0, layer - 1)]) == 0
            found[layer].clear()
        del found
        assert memory.num_slabs == 9 and len(memory._free) == 9  # 5 x (1204 + 404 + 62) = 8350 bytes
    assert not cuda.faults


def test_a_pass_without_a_backward_gives_its_memory_back(cuda: Cuda) -> None:
    """A copy may still be in transfer, because nobody waited for the copies of the last layers, or for fetched
    tensors."""
    memory = offload.PinnedMemory(torch.device("cpu"))
    found = passed(cuda, memory, 4)
    cuda.take(found[1][0])  # layer 0 is in transfer
    del found
    gc.collect()
    assert len(memory._free) == memory.num_slabs == 7
    assert not cuda.faults


def test_all_of_a_pass_may_leave(cuda: Cuda) -> None:
    """With a pipeline, other passes come before backward; the first layer that backward needs is then fetched when it
    is needed."""
    memory = offload.PinnedMemory(torch.device("cpu"))
    layers = offload.OffloadedLayers(memory)
    found: list[list[offload.OffloadedTensor]] = []
    for layer in range(2):
        layers.start_layer()
        cuda.compute.work()
        found.append([layers.store(made(layer, 0))])
        cuda.stored.update(found[-1])
    layers.evict_all()
    assert on_device(found) == [0, 0]
    for layer in (1, 0):
        assert torch.equal(cuda.take(found[layer][0]), made(layer, 0))
    assert not cuda.faults


def test_memory_that_cannot_be_pinned_is_an_error(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = offload.PinnedMemory(torch.device("cpu"))
    memory.borrow()

    def full(num_bytes: int, where: torch.device) -> Any:
        raise MemoryError("1000 B of host memory cannot be page-locked: CUDA reports: out of memory (2)")

    monkeypatch.setattr(offload, "Arena", full)
    with pytest.raises(
        StorageError,
        match=r"no more than 1000 B of host memory .* saved tensors.  1000 B .*out of memory \(2\).  Use a smaller",
    ):
        memory.borrow()


def test_two_passes_at_a_time_do_not_share(cuda: Cuda) -> None:
    """As with pipeline stages.  A tensor that is needed again is fetched again."""
    memory = offload.PinnedMemory(torch.device("cpu"))
    passes = [passed(cuda, memory, 3), passed(cuda, memory, 2)]
    for found in passes:
        for layer in reversed(range(len(found))):
            assert torch.equal(cuda.take(found[layer][0]), made(layer, 0))
        found[0][0].tensor = None
        assert torch.equal(cuda.take(found[0][0]), made(0, 0))
    del found, passes
    gc.collect()
    assert len(memory._free) == memory.num_slabs == len({slab.data_ptr() for slab in memory._free})
    assert not cuda.faults


def test_slabs_are_page_locked_for_a_gpu(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, torch.device]] = []

    def arena(num_bytes: int, where: torch.device) -> page_locked.Arena:
        asked.append((num_bytes, where))
        return page_locked.Arena(num_bytes, torch.device("cpu"))

    monkeypatch.setattr(offload, "Arena", arena)
    assert len(offload.PinnedMemory(torch.device("cuda", 3)).borrow()) == SLAB
    assert asked == [(SLAB, torch.device("cuda", 3))]


@pytest.mark.parametrize("out", [True, False])
def test_a_copy_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, out: bool) -> None:
    asked: list[bool] = []
    copy = Tensor.copy_

    def noted(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        asked.append(non_blocking)
        return copy(into, source)

    flat, room = torch.tensor([1.0, 2.0]), [torch.zeros(3, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)]
    monkeypatch.setattr(Tensor, "copy_", noted)
    offload._copy(flat, room, out=out)
    assert asked == [True, True]
    assert flat.tolist() == ([1.0, 2.0] if out else [0.0, 0.0])
    assert torch.equal(torch.cat(room), flat.view(torch.uint8))
