"""What autograd keeps of each tensor that the forward pass of a model chunk saves for backward.

autograd hands over every tensor that an operation saves (torch.autograd.graph.saved_tensors_hooks), and gets instead

    recompute  for the output of a norm: its inputs, from which backward computes it once more
    offload    for any other large tensor of an offloaded layer: a copy in host memory (offload.py)
    prefetch   in the first layer that is not offloaded: the tensor itself.  When backward reaches it, the layer before
               is fetched
    resident   for the rest, the tensor itself: weights, small tensors, and everything where neither train.recompute nor
               train.offload_fraction asks for more

A recomputed tensor gets no gradient of its own: the norm's own backward has it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sft.mcore.activations.offload import OffloadedLayers, PinnedMemory
from sft.mcore.model_bytes import num_offloaded_layers

MIN_OFFLOADED_BYTES = 1 << 20  # smaller tensors stay on the device


Restore = Callable[[], Tensor]  # what autograd keeps in place of a tensor, and calls when backward wants it


def _resident(tensor: Tensor) -> Restore:
    kept, version = tensor.detach(), tensor._version  # with its own node, the tensor would keep itself alive

    def restore() -> Tensor:
        # autograd leaves this check to the hooks.
        assert kept._version == version, "changed in place since it was saved"
        return kept

    return restore


def _recompute(compute: Callable[..., Tensor], inputs: Sequence[Restore]) -> Restore:
    def restore() -> Tensor:
        with torch.no_grad():
            return compute(*(restore_input() for restore_input in inputs))

    return restore


def _prefetch(saved: Restore, layers: OffloadedLayers, layer: int) -> Restore:
    def restore() -> Tensor:
        layers.fetch(layer)
        return saved()

    return restore


def _view(saved: Restore, like: Tensor) -> Restore:
    """The part of a saved storage, or the shape of it, that `like` is."""
    size, stride, offset = like.size(), like.stride(), int(like.storage_offset())
    return lambda: saved().as_strided(size, stride, offset)


@dataclass(frozen=True)
class _Recomputable:
    storage: StorageWeakRef
    compute: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class _SavedStorage:
    storage: StorageWeakRef
    saved: Restore
    layer: int


class SavePolicy:
    """What the forward passes of one model chunk save, and where.

    recompute         outputs that norms mark with `mark_recomputable` are computed once more in backward
    memory            where large tensors go; None: nowhere
    offload_fraction  of the layers, the first ones, whose tensors go there: backward reaches them last
    backward_is_next  backward follows each forward pass at once, so that the last two layers stay on the device
    resident          tensors that are on the device anyway: weights
    """

    def __init__(
        self,
        *,
        recompute: bool,
        memory: PinnedMemory | None = None,
        offload_fraction: float = 1.0,
        backward_is_next: bool = True,
        resident: Iterable[Tensor] = (),
    ) -> None:
        self.recompute, self.memory = recompute, memory
        self.offload_fraction, self.backward_is_next = offload_fraction, backward_is_next
        self.resident = {tensor.untyped_storage().data_ptr() for tensor in resident}
        self._pass: _ForwardPass | None = None  # that runs; None outside of one, so also while backward runs

    def attach(self, model: torch.nn.Module) -> None:
        """Hand this policy to the layers and norms of a model, which core has built without it."""
        for module in model.modules():
            if hasattr(module, "save_policy"):
                module.save_policy = self  # type: ignore[assignment]

    @contextmanager
    def forward_pass(self, num_layers: int) -> Iterator[None]:
        """Around a forward pass.  What full recomputation computes in backward is saved as autograd saves it."""
        if not (self.recompute or self.memory) or not torch.is_grad_enabled():
            yield
            return
        assert self._pass is None
        self._pass = this_pass = _ForwardPass(self, num_layers)
        try:
            with torch.autograd.graph.saved_tensors_hooks(this_pass.save, lambda restore: restore()):
                yield
            if this_pass.layers is not None and not self.backward_is_next:
                this_pass.layers.evict_all()
        finally:
            self._pass = None
            this_pass.end()

    def start_layer(self) -> None:
        """What is saved from here on belongs to the next layer."""
        if self._pass is not None and self._pass.layers is not None:
            self._pass.layers.start_layer()

    def mark_recomputable(self, out: Tensor, compute: Callable[..., Any], *inputs: Tensor) -> None:
        """Declare that `compute(*inputs)` gives `out` once more at next to no cost.

        `out` must be contiguous and fill its storage.  No effect outside of a forward pass that recomputes.
        """
        if self._pass is not None and self.recompute and torch.is_grad_enabled():
            assert out.is_contiguous() and out.untyped_storage().nbytes() == out.numel() * out.element_size()
            self._pass.mark(out, compute, inputs)


class _ForwardPass:
    def __init__(self, policy: SavePolicy, num_layers: int) -> None:
        self._resident = policy.resident
        self.layers = None if policy.memory is None else OffloadedLayers(policy.memory)
        self._num_offloaded = num_offloaded_layers(
            policy.offload_fraction, num_layers, backward_is_next=policy.backward_is_next
        )
        self._recomputable: dict[int, _Recomputable] = {}  # by address
        self._saved: dict[tuple[int, torch.dtype], _SavedStorage] = {}  # by address; whole storages, once each

    def mark(self, out: Tensor, compute: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        for address in [key for key, marked in self._recomputable.items() if marked.storage.expired()]:
            del self._recomputable[address]
        storage = out.untyped_storage()
        inputs = tuple(tensor.detach() for tensor in inputs)
        self._recomputable[storage.data_ptr()] = _Recomputable(StorageWeakRef(storage), compute, inputs)

    def end(self) -> None:
        """Drop all references: from now on only autograd keeps what it was given."""
        self._recomputable.clear()
        self._saved.clear()

    def save(self, tensor: Tensor) -> Restore:
        """The pack hook of torch's saved_tensors_hooks."""
        storage = tensor.untyped_storage()
        whole = self._save_storage(tensor, storage)
        if whole is not None:
            return _view(whole, tensor)
        resident = _resident(tensor)
        if self.layers is None or self._layer != self._num_offloaded + 1:
            return resident
        return _prefetch(resident, self.layers, self._layer)

    @property
    def _layer(self) -> int:
        """Number of the layer that is being computed, from 1; 0 before the first layer."""
        return 0 if self.layers is None else self.layers.num_started

    def _save_storage(self, tensor: Tensor, storage: torch.UntypedStorage) -> Restore | None:
        """The whole storage of the tensor, to recompute or offloaded; None: it stays on the device."""
        key = storage.data_ptr(), tensor.dtype
        earlier = self._saved.get(key)
        if earlier is not None and not earlier.storage.expired():
            # Shared by several layers: only the first offloads it.  The later ones save the tensor itself; otherwise
            # backward of the last layer would have to fetch all that the first one saved.
            return earlier.saved if earlier.layer == self._layer else None
        marked = self._recomputable.get(storage.data_ptr())
        saved: Restore | None = None
        if marked is not None and not marked.storage.expired():
            saved = _recompute(marked.compute, [self.save(tensor) for tensor in marked.inputs])
        elif self._is_offloaded(tensor, storage):
            assert self.layers is not None
            flat = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            saved = self.layers.store(flat).restore
        if saved is not None:
            self._saved[key] = _SavedStorage(StorageWeakRef(storage), saved, self._layer)
        return saved

    def _is_offloaded(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        return (
            self.layers is not None
            and self._layer <= self._num_offloaded
            and tensor.device == self.layers.memory.device
            and storage.nbytes() >= MIN_OFFLOADED_BYTES
            and storage.data_ptr() not in self._resident
        )
