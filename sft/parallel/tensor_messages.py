"""Registers tensors, numpy arrays, and torch's dtypes, layouts and memory formats for messages between ranks."""

import math
from typing import Any

import numpy as np
import torch

from sft.parallel.messages import register

_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def _tensor_parts(tensor: torch.Tensor) -> list[Any]:
    data = tensor.detach().cpu().contiguous()
    return [str(data.dtype), list(data.shape), data.flatten().view(torch.uint8).numpy().tobytes()]


def _tensor(parts: list[Any]) -> torch.Tensor:
    name, shape, content = parts
    dtype, data = _constant([name]), bytearray(content)
    if not isinstance(dtype, torch.dtype) or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no tensor of shape {shape}")
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _array_parts(array: np.ndarray[Any, Any]) -> list[Any]:
    if array.dtype.kind not in "biuf":
        raise TypeError(f"an array of {array.dtype} is not sent in messages")
    return [array.dtype.str, list(array.shape), array.tobytes()]


def _array(parts: list[Any]) -> np.ndarray[Any, Any]:
    name, shape, data = parts
    dtype = np.dtype(name)
    if dtype.kind not in "biuf":
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()


def _constant(parts: list[Any]) -> Any:
    (name,) = parts
    value = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(value, _CONSTANTS):
        raise ValueError(f"{name!r:.100} is no constant of torch")
    return value


register(torch.Tensor, _tensor_parts, _tensor)
register(np.ndarray, _array_parts, _array)
register(torch.Size, list, torch.Size)
for _kind in _CONSTANTS:
    register(_kind, lambda constant: [str(constant)], _constant)
