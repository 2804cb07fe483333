"""A part of a quantised tensor, in memory as files store it."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor


class StoredPart:
    """A rectangular part of a quantised tensor: stored numbers and scales.  Subclasses are frozen dataclasses.

    The fields that are tensors hold the stored bytes.  Blocks that lie only partly in the part are stored whole.
    """

    def values(self, dtype: torch.dtype) -> Tensor:
        """The dequantised values, of the shape of the part, on the device of its tensors."""
        raise NotImplementedError

    def tensors(self: Any) -> list[Tensor]:
        """The stored numbers and scales."""
        values = (getattr(self, field.name) for field in fields(self))
        return [value for value in values if isinstance(value, Tensor)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored numbers and scales."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def copied(self, device: torch.device) -> Self:
        """A copy in memory of its own on `device`; the part of a file refers to mapped memory."""
        return self._each(lambda tensor: tensor.to(device, copy=True, memory_format=torch.contiguous_format))

    def _each(self: Any, function: Callable[[Tensor], Tensor]) -> Any:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: function(v) for name, v in values.items() if isinstance(v, Tensor)})


@dataclass(frozen=True, kw_only=True)
class PlainPart(StoredPart):
    """A part that is not quantised.  numbers: floating point, of the shape of the part"""

    numbers: Tensor

    def values(self, dtype: torch.dtype) -> Tensor:
        return self.numbers.to(dtype)
