"""What the forward pass of a model chunk keeps for backward: as it is, in host memory, or as a way to have it again.

autograd asks for every tensor that an operation keeps (torch.autograd.graph.saved_tensors_hooks).  Here it gets

    again   what a norm gave: computed once more when backward asks for it, from what the norm was given
    host    anything large: a copy in host memory, fetched a layer ahead (`host.py`)
    ahead   in the first layer that stays on the device: itself, and the layer before is on its way
    itself  all the rest: weights, small tensors, and everything while nothing of this is wanted

No gradient flows through what is computed again: the norm's own backward has that.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sft.mcore.activations.offload import HostMemory, Layers

LEAST_BYTES = 1 << 20  # smaller tensors stay where they are


class Kept(Protocol):
    """What stands for a tensor until backward wants it."""

    def take(self) -> Tensor: ...


@dataclass(frozen=True)
class Itself:
    tensor: Tensor
    version: int

    def take(self) -> Tensor:
        assert self.tensor._version == self.version, "changed in place since it was kept"  # autograd leaves that to us
        return self.tensor


@dataclass(frozen=True)
class Again:
    compute: Callable[..., Tensor]
    inputs: tuple[Kept, ...]

    def take(self) -> Tensor:
        with torch.no_grad():
            return self.compute(*(kept.take() for kept in self.inputs))


@dataclass(frozen=True)
class Ahead:
    """Wanted in the backward of block `number`, the first whose memory stayed: have the one before it fetched."""

    kept: Kept
    layers: Layers
    number: int

    def take(self) -> Tensor:
        self.layers.bring(self.number)
        return self.kept.take()


@dataclass(frozen=True)
class View:
    """A part of what is kept, or another shape of it."""

    kept: Kept
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def take(self) -> Tensor:
        return self.kept.take().as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _Cheap:
    """How to have the content of a storage again."""

    storage: StorageWeakRef
    compute: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Before:
    """What a storage is kept as, and by which layer."""

    storage: StorageWeakRef
    kept: Kept
    layer: int


class Saving:
    """The rule of one model chunk.

    again     compute again what is cheap
    host      where large tensors go; None: nowhere
    fraction  of the layers, the first ones, of which they go there: backward comes to them last
    pipeline  other passes may come before this one's backward; else it comes at once, and the last two layers stay
    stays     weights, which are there anyway
    """

    def __init__(
        self,
        *,
        again: bool,
        host: HostMemory | None = None,
        fraction: float = 1.0,
        pipeline: bool = False,
        stays: Iterable[Tensor] = (),
    ) -> None:
        self._again, self._host, self._fraction, self._pipeline = again, host, fraction, pipeline
        self._stays = {tensor.untyped_storage().data_ptr() for tensor in stays}

    @contextmanager
    def forward_pass(self, num_layers: int) -> Iterator[None]:
        """Around a forward pass; what is recomputed in backward is kept as autograd has it."""
        global _now
        if not (self._again or self._host) or not torch.is_grad_enabled():
            yield
            return
        assert _now is None
        to_host = min(math.ceil(self._fraction * num_layers), num_layers if self._pipeline else max(0, num_layers - 2))
        _now = pass_ = _Pass(self._again, self._host, to_host, self._stays)
        try:
            with torch.autograd.graph.saved_tensors_hooks(pass_.keep, lambda kept: kept.take()):
                yield
            if pass_.layers is not None and self._pipeline:
                pass_.layers.end()
        finally:
            _now = None
            pass_.end()


class _Pass:
    """One forward pass."""

    def __init__(self, again: bool, host: HostMemory | None, layers_to_host: int, stays: set[int]) -> None:
        self.again, self.layers = again, None if host is None else Layers(host)
        self._layers_to_host, self._stays = layers_to_host, stays
        self._cheap: dict[int, _Cheap] = {}  # by address
        self._kept: dict[tuple[int, torch.dtype], _Before] = {}  # whole storages, once each

    def add(self, out: Tensor, compute: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        for key in [key for key, cheap in self._cheap.items() if cheap.storage.expired()]:
            del self._cheap[key]
        storage = out.untyped_storage()
        self._cheap[storage.data_ptr()] = _Cheap(StorageWeakRef(storage), compute, tuple(x.detach() for x in inputs))

    def end(self) -> None:
        """autograd, which has the hook as long as what it gave, is now the only one to refer to that."""
        self._cheap.clear()
        self._kept.clear()

    def keep(self, tensor: Tensor) -> Kept:
        """The pack hook."""
        storage = tensor.untyped_storage()
        whole = self._whole(tensor, storage)
        if whole is None:
            itself = Itself(tensor.detach(), tensor._version)  # with its own node it would keep itself alive
            if self.layers is None or self._layer != self._layers_to_host + 1:
                return itself
            return Ahead(itself, self.layers, self._layer)
        return View(whole, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    @property
    def _layer(self) -> int:
        return 0 if self.layers is None else self.layers.begun

    def _whole(self, tensor: Tensor, storage: torch.UntypedStorage) -> Kept | None:
        """What the whole storage of the tensor is kept as; None: as it is."""
        key = storage.data_ptr(), tensor.dtype
        before = self._kept.get(key)
        if before is not None and not before.storage.expired():
            # One that several layers keep stays: the first of them, whose it is, would have to come before its turn.
            return before.kept if before.layer == self._layer else None
        cheap = self._cheap.get(storage.data_ptr())
        kept: Kept | None = None
        if cheap is not None and not cheap.storage.expired():
            kept = Again(cheap.compute, tuple(self.keep(x) for x in cheap.inputs))
        elif self._goes_to_host(tensor, storage):
            assert self.layers is not None
            kept = self.layers.store(tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0))
        if kept is not None:
            self._kept[key] = _Before(StorageWeakRef(storage), kept, self._layer)
        return kept

    def _goes_to_host(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        return (
            self.layers is not None
            and self._layer <= self._layers_to_host
            and tensor.device == self.layers.host.device
            and storage.nbytes() >= LEAST_BYTES
            and storage.data_ptr() not in self._stays
        )


_now: _Pass | None = None  # backward never runs inside of a forward pass


def cheap(out: Tensor, compute: Callable[..., Any], *inputs: Tensor) -> None:
    """Tell that `compute(*inputs)` gives `out` again, at next to no cost.  `out` must be contiguous, and all of its
    storage."""
    if _now is not None and _now.again and torch.is_grad_enabled():
        assert out.is_contiguous() and out.untyped_storage().nbytes() == out.numel() * out.element_size()
        _now.add(out, compute, inputs)


def begin_layer() -> None:
    """What is kept from here on is the next layer's."""
    if _now is not None and _now.layers is not None:
        _now.layers.begin()
