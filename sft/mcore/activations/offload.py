"""Activation offload: moves saved tensors of layers to pinned host memory, and back before backward needs them.

The GPU holds the saved tensors of two offloaded layers at a time: the layer that is computed, and the layer before it,
whose tensors are being copied.  On the last pipeline stage without virtual stages, backward follows each forward pass
at once, so the last two layers stay on the device.  On other stages the last two layers can be offloaded, too.

One CUDA stream makes the copies in both directions, so a tensor is in host memory before it is copied back.  This
stream and the stream that computes wait for each other, but the host never waits for the GPU.

Pinned memory is allocated in slabs, which the next pass reuses (`page_locked.py`).
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sft.console import size
from sft.errors import StorageError
from sft.layers.offload import SLAB_BYTES
from sft.mcore.page_locked import Arena


class PinnedMemory:
    """Slabs of pinned host memory, and the CUDA stream for copies.  In a CPU run the memory is not pinned."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.slab_bytes = device, SLAB_BYTES
        self.stream = torch.cuda.Stream()
        self.num_slabs = 0  # number of slabs allocated so far; slabs are never freed
        self._free: list[Tensor] = []

    def borrow(self) -> Tensor:
        """A free slab, uint8 [slab_bytes].  Raises StorageError if no more memory can be pinned."""
        if self._free:
            return self._free.pop()
        try:
            slab = Arena(self.slab_bytes, self.device).take((self.slab_bytes,), torch.uint8)
        except MemoryError as error:
            raise StorageError(
                f"train.offload_fraction: no more than {size(self.num_slabs * self.slab_bytes)} of host memory could "
                f"be page-locked for saved tensors.  {error}.  Use a smaller fraction, a larger cp, "
                "train.recompute=full, or a higher limit (ulimit -l, memory of the job)."
            ) from error
        self.num_slabs += 1
        return slab

    def give_back(self, slabs: list[Tensor]) -> None:
        self._free += slabs


class OffloadedLayers:
    """The offloaded tensors of one forward pass, by layer.  Layer 0 stands for all operations before the first layer.

    After backward, no reference to this object is left, and its slabs return to PinnedMemory.
    """

    def __init__(self, memory: PinnedMemory) -> None:
        self.memory = memory
        self._slabs: list[Tensor] = []
        self._num_used = memory.slab_bytes  # number of used bytes in the last slab
        self._layers = [_LayerTensors()]

    def __del__(self) -> None:
        self.memory.give_back(self._slabs)

    @property
    def num_started(self) -> int:
        """The number of layers whose forward has started."""
        return len(self._layers) - 1

    def start_layer(self) -> None:
        """Start the next layer, n.  The device memory of the tensors of layer n - 2 is freed."""
        self._layers[-1].copied_out = self.memory.stream.record_event()
        if len(self._layers) > 1:
            self._layers[-2].evict()
        self._layers.append(_LayerTensors())

    def store(self, flat: Tensor) -> "OffloadedTensor":
        """Start to copy `flat` [n], a tensor of any dtype on the device, to host memory."""
        slices = list(self._allocate(flat.numel() * flat.element_size()))
        self.memory.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.memory.stream):
            _copy(flat, slices, out=True)
        stored = OffloadedTensor(self, self.num_started, flat, slices)
        self._layers[-1].references.append(weakref.ref(stored))
        return stored

    def evict_all(self) -> None:
        """Free the device memory of all tensors, after a forward pass whose backward does not follow at once."""
        self._layers[-1].copied_out = self.memory.stream.record_event()
        for layer in self._layers[-2:]:
            layer.evict()

    def fetch(self, layer: int) -> None:
        """Copy those tensors of `layer`, and of the layer before it, to the device that are not on it.

        Backward calls this.  The current stream waits only for the copies of `layer`.
        """
        for tensors in self._layers[layer], self._layers[max(0, layer - 1)]:
            tensors.fetch(self.memory)
        self.wait_for_fetch(layer)

    def wait_for_fetch(self, layer: int) -> None:
        """Make the current stream wait until the tensors of `layer` are on the device, if they were fetched."""
        if (event := self._layers[layer].fetched) is not None:
            torch.cuda.current_stream().wait_event(event)

    def _allocate(self, num_bytes: int) -> Iterator[Tensor]:
        """Yield uint8 slices of slabs, `num_bytes` in total."""
        while num_bytes:
            if self._num_used == self.memory.slab_bytes:
                self._slabs.append(self.memory.borrow())
                self._num_used = 0
            length = min(num_bytes, self.memory.slab_bytes - self._num_used)
            yield self._slabs[-1][self._num_used : self._num_used + length]
            self._num_used += length
            num_bytes -= length


class OffloadedTensor:
    """A tensor [n] in host memory, with a temporary copy on the device.  Only autograd refers to this object."""

    def __init__(self, layers: OffloadedLayers, layer: int, flat: Tensor, slices: list[Tensor]) -> None:
        self._layers, self.layer = layers, layer
        self.slices, self.dtype, self.length = slices, flat.dtype, flat.numel()
        self.tensor: Tensor | None = flat  # the copy on the device; None: only in host memory

    def __del__(self) -> None:
        # If backward did not use this tensor after it was fetched, the copy may still write to its memory.
        self._layers.wait_for_fetch(self.layer)

    def restore(self) -> Tensor:
        self._layers.fetch(self.layer)
        assert self.tensor is not None
        return self.tensor


class _LayerTensors:
    """The offloaded tensors of one layer."""

    def __init__(self) -> None:
        self.references: list[weakref.ref[OffloadedTensor]] = []
        self.copied_out: Any = None  # event: all tensors are in host memory
        self.fetched: Any = None  # event: all tensors are on the device again

    def evict(self) -> None:
        """Free the device memory of the tensors after their copies are complete."""
        torch.cuda.current_stream().wait_event(self.copied_out)
        for tensor in self._alive():
            tensor.tensor = None

    def fetch(self, memory: PinnedMemory) -> None:
        missing = [tensor for tensor in self._alive() if tensor.tensor is None]
        if not missing:
            return
        for tensor in missing:  # allocated and freed on the stream that computes
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
    """Copy a tensor on the device to slices of host memory (`out`), or the slices to the tensor (not `out`)."""
    parts = flat.view(torch.uint8).split([len(piece) for piece in slices])
    for on_device, on_host in zip(parts, slices, strict=True):
        (on_host if out else on_device).copy_(on_device if out else on_host, non_blocking=True)
