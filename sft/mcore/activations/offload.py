"""Host memory for what layers keep: copied out while the next layer computes, fetched a layer ahead in backward.

Two layers' worth is on the GPU at a time: that of the layer at work, and that of the one before, on its way.  Where
backward comes at once the last two never leave, and are not copied; in a pipeline's earlier stages they do.
Copies have a stream of their own, one for both directions, so what is fetched was written before.  A GPU is never
waited for: streams wait for each other.

Pinned memory is taken in slabs, which are kept for the next pass: torch would round every tensor up to a power of two.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sft.console import size
from sft.errors import StorageError

SLAB_BYTES = 1 << 28


class HostMemory:
    """Slabs of pinned memory, and the stream of copies.  On a CPU: plain memory, and all in order."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.slab_bytes = device, SLAB_BYTES
        self.stream = torch.cuda.Stream()
        self.num_slabs = 0  # ever taken
        self._free: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Of host memory that is held."""
        return self.num_slabs * self.slab_bytes

    def borrow(self) -> Tensor:
        """uint8 [slab_bytes]"""
        if self._free:
            return self._free.pop()
        try:
            slab = torch.empty(self.slab_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        except RuntimeError as error:
            raise StorageError(
                f"train.offload_fraction: no more than {size(self.num_bytes)} of host memory could be page-locked for "
                f"what layers keep: {str(error).splitlines()[0]}.  A smaller fraction works, a larger cp, "
                f"train.recompute=full, or a higher limit (ulimit -l, the memory of the job)."
            ) from error
        self.num_slabs += 1
        return slab

    def give_back(self, slabs: list[Tensor]) -> None:
        self._free += slabs


class Layers:
    """What the layers of one forward pass keep.  Its slabs go back when nothing refers to it: after backward."""

    def __init__(self, host: HostMemory) -> None:
        self.host = host
        self._slabs: list[Tensor] = []
        self._used = host.slab_bytes  # of the last slab
        self._blocks = [_Block()]  # the first is for what comes before layers

    def __del__(self) -> None:
        self.host.give_back(self._slabs)

    @property
    def begun(self) -> int:
        """Layers that have."""
        return len(self._blocks) - 1

    def begin(self) -> None:
        """A layer begins: from now on the memory of the one before last may be used for something else."""
        self._blocks[-1].copied = self.host.stream.record_event()
        if len(self._blocks) > 1:
            self._blocks[-2].leave()
        self._blocks.append(_Block())

    def store(self, flat: Tensor) -> "Stored":
        """flat: [n], of any dtype, on the device."""
        room = list(self._room(flat.numel() * flat.element_size()))
        self.host.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.host.stream):
            _copy(flat, room, out=True)
        stored = Stored(self, self.begun, flat, room)
        self._blocks[-1].members.append(weakref.ref(stored))
        return stored

    def end(self) -> None:
        """All of it may leave: backward is not what comes next."""
        self._blocks[-1].copied = self.host.stream.record_event()
        for block in self._blocks[-2:]:
            block.leave()

    def bring(self, number: int) -> None:
        """Have what a block keeps on the device, and what backward comes to next on its way."""
        for block in self._blocks[number], self._blocks[max(0, number - 1)]:
            block.fetch(self.host)
        self.arrived(number)

    def arrived(self, number: int) -> None:
        """What computes from here on comes after anything that was being fetched into the block."""
        if (event := self._blocks[number].arrived) is not None:
            torch.cuda.current_stream().wait_event(event)

    def _room(self, num_bytes: int) -> Iterator[Tensor]:
        while num_bytes:
            if self._used == self.host.slab_bytes:
                self._slabs.append(self.host.borrow())
                self._used = 0
            taken = min(num_bytes, self.host.slab_bytes - self._used)
            yield self._slabs[-1][self._used : self._used + taken]
            self._used += taken
            num_bytes -= taken


class Stored:
    """A tensor [n] in host memory, and on the device while it is needed there.  autograd alone refers to it."""

    def __init__(self, layers: Layers, block: int, flat: Tensor, room: list[Tensor]) -> None:
        self._layers, self._block = layers, block
        self.room, self.dtype, self.length = room, flat.dtype, flat.numel()
        self.tensor: Tensor | None = flat

    def __del__(self) -> None:
        self._layers.arrived(self._block)  # where nobody came for it, its memory is still being written

    def take(self) -> Tensor:
        self._layers.bring(self._block)
        assert self.tensor is not None
        return self.tensor


class _Block:
    """What one layer keeps."""

    def __init__(self) -> None:
        self.members: list[weakref.ref[Stored]] = []
        self.copied: Any = None  # event
        self.arrived: Any = None  # event

    def leave(self) -> None:
        """Off the device, once copied."""
        torch.cuda.current_stream().wait_event(self.copied)
        for member in self._alive():
            member.tensor = None

    def fetch(self, host: HostMemory) -> None:
        missing = [member for member in self._alive() if member.tensor is None]
        if not missing:
            return
        for member in missing:  # memory of the stream that computes
            member.tensor = torch.empty(member.length, dtype=member.dtype, device=host.device)
        host.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(host.stream):
            for member in missing:
                assert member.tensor is not None
                _copy(member.tensor, member.room, out=False)
            self.arrived = host.stream.record_event()

    def _alive(self) -> list[Stored]:
        return [member for reference in self.members if (member := reference()) is not None]


def _copy(flat: Tensor, room: list[Tensor], *, out: bool) -> None:
    """Between the device and host memory: out of the device, or back."""
    for here, there in zip(flat.view(torch.uint8).split([len(piece) for piece in room]), room, strict=True):
        (there if out else here).copy_(here if out else there, non_blocking=True)
