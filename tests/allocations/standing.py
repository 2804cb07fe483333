"""Counts the bytes of the storages of weights, gradients and optimizer states, which exist before and after a step."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from sft.mcore.optimizer.inner import inner_optimizers
from tests.allocations.categories import GRADIENTS, OPTIMIZER, WEIGHTS


def standing_bytes(engine: Any, device_type: str) -> dict[str, int]:
    """Bytes of each category of the storages on the device.  Call this after the first update, which creates the
    states.

    In fp32, the optimizer's main parameters are the weights themselves.  A storage counts once: as a weight, else as a
    gradient, else as a state.
    """
    parameters = [p for chunk in engine.chunks for p in chunk.parameters()]
    tensors = {
        WEIGHTS: [*parameters, *_in_low_bits(engine)],
        GRADIENTS: [p.main_grad for p in parameters if getattr(p, "main_grad", None) is not None],
        OPTIMIZER: _of_optimizer(engine.optimizer),
    }
    seen, sizes = set[int](), Counter[str]()
    for category, listed in tensors.items():
        for tensor in _on(listed, device_type):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sizes[category] += storage.nbytes()
    return dict(sizes)


def _in_low_bits(engine: Any) -> Iterator[Tensor]:
    """The stored numbers and scales of the frozen weights of an engine."""
    bases = [chunk.module.frozen_base for chunk in engine.chunks if chunk.module.frozen_base is not None]
    for weight in (weight for base in bases for weight in base.weights):
        yield from weight.tensors()


def _of_optimizer(optimizer: Any) -> Iterator[Tensor]:
    for adam in inner_optimizers(optimizer):
        for group in adam.param_groups:
            yield from group["params"]
        for state in adam.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _on(tensors: Iterable[Tensor], device_type: str) -> Iterator[Tensor]:
    return (tensor for tensor in tensors if tensor.device.type == device_type and tensor.numel())
