"""Decides how autograd stores each tensor that the forward pass of a model chunk saves for backward.

A hook (torch.autograd.graph.saved_tensors_hooks) stores every tensor that an operation saves in one of four ways:

    recompute  The output of a norm is not kept.  The norm's inputs are kept, and backward computes the output again
    offload    Any other large tensor of an offloaded layer is copied to host memory (offload.py)
    prefetch   A tensor of the first layer after the offloaded layers is kept as it is.  When backward reaches this
               layer, it starts to copy the tensors of the last offloaded layer to the device
    resident   All other tensors, such as weights and small tensors, are kept as they are.  Without train.recompute and
               train.offload_fraction all tensors are resident

Recomputation runs without autograd, because the norm's own backward computes the gradient of its input.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sft.layers.offload import num_offloaded_layers
from sft.mcore.activations.offload import OffloadedLayers, PinnedMemory

MIN_OFFLOADED_BYTES = 1 << 20  # smaller tensors stay on the device


Restore = Callable[[], Tensor]  # autograd keeps this function in place of a tensor, and calls it in backward


def _resident(tensor: Tensor) -> Restore:
    kept, version = tensor.detach(), tensor._version  # the tensor's autograd node would keep the tensor alive

    def restore() -> Tensor:
        # Autograd does not check the version of a tensor that a hook saves.
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
    """A function that restores the saved storage as a view with the shape, strides and offset of `like`."""
    size, stride, offset = like.size(), like.stride(), int(like.storage_offset())
    return lambda: saved().as_strided(size, stride, offset)


@dataclass(frozen=True)
class _Recomputable:
    """A tensor that backward can compute again as `compute(*inputs)`."""

    storage: StorageWeakRef
    compute: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class _SavedStorage:
    """A storage that is recomputed or offloaded.  layer: the number of the layer that saved it first"""

    storage: StorageWeakRef
    saved: Restore
    layer: int


class SavePolicy:
    """Decides how and where the forward passes of this rank's model chunks save tensors, one pass at a time.

    recompute         whether backward recomputes the outputs that norms mark with `mark_recomputable`
    memory            host memory for large tensors; None: no tensor is offloaded
    offload_fraction  share of layers that are offloaded: the first ones, which backward reaches last
    backward_is_next  whether backward follows each forward pass at once; then the last two layers stay on the device
    resident          tensors that always stay on the device: weights
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
        self.resident = {tensor.untyped_storage()._cdata for tensor in resident}  # the memory of a weight may move
        self._pass: _ForwardPass | None = None  # the current forward pass; None in backward and between passes

    def attach(self, model: torch.nn.Module) -> None:
        """Give this policy to the layers and norms of a model; core builds them without a policy.

        The modules in the model's `outputs_kept`, if it has any, get no policy.
        """
        kept = {id(module) for module in getattr(model, "outputs_kept", ())}
        for module in model.modules():
            if hasattr(module, "save_policy") and id(module) not in kept:
                module.save_policy = self  # type: ignore[assignment]

    @contextmanager
    def forward_pass(self, num_layers: int) -> Iterator[None]:
        """A context in which the policy decides how tensors are saved, for one forward pass of a model chunk.

        num_layers: layers of the chunk.  With train.recompute = full, backward recomputes layers outside of the context
        """
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

    def save(self, tensor: Tensor) -> Restore:
        """Save a tensor as the current forward pass saves tensors of the layer that is being computed."""
        return _resident(tensor) if self._pass is None else self._pass.save(tensor)

    def start_layer(self) -> None:
        """Start the next layer: tensors that are saved from now on belong to this layer."""
        if self._pass is not None and self._pass.layers is not None:
            self._pass.layers.start_layer()

    def mark_recomputable(self, out: Tensor, compute: Callable[..., Any], *inputs: Tensor) -> None:
        """Declare that `compute(*inputs)` recomputes `out` at almost no cost.

        `out` must be contiguous and fill its storage.  Outside of a forward pass that recomputes, the call has no
        effect.
        """
        if self._pass is not None and self.recompute and torch.is_grad_enabled():
            assert out.is_contiguous() and out.untyped_storage().nbytes() == out.numel() * out.element_size()
            self._pass.mark(out, compute, inputs)


class _ForwardPass:
    """The tensors that one forward pass of a model chunk saves."""

    def __init__(self, policy: SavePolicy, num_layers: int) -> None:
        self._resident = policy.resident
        self.layers = None if policy.memory is None else OffloadedLayers(policy.memory)
        self._num_offloaded = num_offloaded_layers(
            policy.offload_fraction, num_layers, backward_is_next=policy.backward_is_next
        )
        self._recomputable: dict[int, _Recomputable] = {}  # by address
        self._saved: dict[tuple[int, torch.dtype], _SavedStorage] = {}  # by address; each whole storage is saved once

    def mark(self, out: Tensor, compute: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        for address in [key for key, marked in self._recomputable.items() if marked.storage.expired()]:
            del self._recomputable[address]
        storage = out.untyped_storage()
        inputs = tuple(tensor.detach() for tensor in inputs)
        self._recomputable[storage.data_ptr()] = _Recomputable(StorageWeakRef(storage), compute, inputs)

    def end(self) -> None:
        """Drop all references, so that only autograd keeps the saved tensors alive."""
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
        """Arrange that the whole storage of the tensor is recomputed or offloaded; None: it stays on the device."""
        key = storage.data_ptr(), tensor.dtype
        earlier = self._saved.get(key)
        if earlier is not None and not earlier.storage.expired():
            # If several layers save the same storage, only the first of them offloads it.  Later layers keep the tensor
            # itself.  Otherwise, backward of the last layer would fetch all tensors of the first layer.
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
            and storage._cdata not in self._resident
        )
