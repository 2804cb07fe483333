"""Activation offload: what layers save for backward waits in pinned host memory, and is fetched a layer ahead.

The GPU holds the saved tensors of two layers at a time: of the layer that is being computed, and of the one before it,
which is being copied.  Where backward follows a forward pass at once, the last two layers stay and are not copied; on
the earlier stages of a pipeline they leave as well.  One stream does the copies of both directions in order, so that
nothing is fetched before it was written.  Streams wait for each other; the host never waits for the GPU.

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


class PinnedMemory:
    """Slabs of pinned host memory, and the stream of copies.  On a CPU: plain memory, and copies in order."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.slab_bytes = device, SLAB_BYTES
        self.stream = torch.cuda.Stream()
        self.num_slabs = 0  # allocated so far; slabs are never freed
        self._free: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Of all slabs, free ones included."""
        return self.num_slabs * self.slab_bytes

    def borrow(self) -> Tensor:
        """uint8 [slab_bytes].  Raises StorageError where no more memory can be pinned."""
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


class OffloadedLayers:
    """The offloaded tensors of one forward pass, layer by layer; 0 is what comes before the first layer.

    Its slabs go back when nothing refers to it any more: after backward.
    """

    def __init__(self, memory: PinnedMemory) -> None:
        self.memory = memory
        self._slabs: list[Tensor] = []
        self._num_used = memory.slab_bytes  # bytes of the last slab
        self._layers = [_LayerTensors()]

    def __del__(self) -> None:
        self.memory.give_back(self._slabs)

    @property
    def num_started(self) -> int:
        """Layers whose forward has started."""
        return len(self._layers) - 1

    def start_layer(self) -> None:
        """The next layer starts: what the last but one saved leaves the device."""
        self._layers[-1].copied_out = self.memory.stream.record_event()
        if len(self._layers) > 1:
            self._layers[-2].evict()
        self._layers.append(_LayerTensors())

    def store(self, flat: Tensor) -> "OffloadedTensor":
        """Start the copy to host memory of `flat` [n], of any dtype, on the device."""
        slices = list(self._allocate(flat.numel() * flat.element_size()))
        self.memory.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.memory.stream):
            _copy(flat, slices, out=True)
        stored = OffloadedTensor(self, self.num_started, flat, slices)
        self._layers[-1].references.append(weakref.ref(stored))
        return stored

    def evict_all(self) -> None:
        """The pass is over and another one is next, not its backward: everything leaves the device."""
        self._layers[-1].copied_out = self.memory.stream.record_event()
        for layer in self._layers[-2:]:
            layer.evict()

    def fetch(self, layer: int) -> None:
        """Backward reaches `layer`: fetch its tensors if they are not here, and start to fetch the layer before."""
        for tensors in self._layers[layer], self._layers[max(0, layer - 1)]:
            tensors.fetch(self.memory)
        self.wait_for_fetch(layer)

    def wait_for_fetch(self, layer: int) -> None:
        """What the current stream computes from now on comes after the copies to that layer's tensors."""
        if (event := self._layers[layer].fetched) is not None:
            torch.cuda.current_stream().wait_event(event)

    def _allocate(self, num_bytes: int) -> Iterator[Tensor]:
        """Slices of slabs, uint8, with so many bytes in all."""
        while num_bytes:
            if self._num_used == self.memory.slab_bytes:
                self._slabs.append(self.memory.borrow())
                self._num_used = 0
            length = min(num_bytes, self.memory.slab_bytes - self._num_used)
            yield self._slabs[-1][self._num_used : self._num_used + length]
            self._num_used += length
            num_bytes -= length


class OffloadedTensor:
    """A tensor [n] in host memory, and on the device while it is needed there.  Only autograd refers to it."""

    def __init__(self, layers: OffloadedLayers, layer: int, flat: Tensor, slices: list[Tensor]) -> None:
        self._layers, self.layer = layers, layer
        self.slices, self.dtype, self.length = slices, flat.dtype, flat.numel()
        self.tensor: Tensor | None = flat  # None: in host memory only

    def __del__(self) -> None:
        # Fetched, but not used by backward: the copy may still write to this memory.
        self._layers.wait_for_fetch(self.layer)

    def restore(self) -> Tensor:
        self._layers.fetch(self.layer)
        assert self.tensor is not None
        return self.tensor


class _LayerTensors:
    def __init__(self) -> None:
        self.references: list[weakref.ref[OffloadedTensor]] = []
        self.copied_out: Any = None  # event: all are in host memory
        self.fetched: Any = None  # event: all are on the device again

    def evict(self) -> None:
        """Free their device memory, once they are copied."""
        torch.cuda.current_stream().wait_event(self.copied_out)
        for tensor in self._alive():
            tensor.tensor = None

    def fetch(self, memory: PinnedMemory) -> None:
        missing = [tensor for tensor in self._alive() if tensor.tensor is None]
        if not missing:
            return
        for tensor in missing:  # allocated on the stream that computes, which will free it
            tensor.tensor = torch.empty(tensor.length, dtype=tensor.dtype, device=memory.device)
        memory.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(memory.stream):
            for tensor in missing:
                assert tensor.tensor is not None
                _copy(tensor.tensor, tensor.slices, out=False)
            self.fetched = memory.stream.record_event()

    def _alive(self) -> list[OffloadedTensor]:
        return [tensor for reference in self.references if (tensor := reference()) is not None]


def _copy(flat: Tensor, slices: list[Tensor], *, out: bool) -> None:
    """Between a tensor on the device and slices of host memory.  out: to the host; else from it"""
    parts = flat.view(torch.uint8).split([len(piece) for piece in slices])
    for on_device, on_host in zip(parts, slices, strict=True):
        (on_host if out else on_device).copy_(on_device if out else on_host, non_blocking=True)
