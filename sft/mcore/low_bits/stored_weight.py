"""Holds a frozen weight as its files store it.  Its parameter has memory only while the weight is used.

Freeing the memory shrinks the parameter's storage to 0 bytes.  So the parameter, and the views of it that autograd
saved, are valid again when the memory is filled the next time (see sharding/flat.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sft.low_bits.part import StoredPart


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A part of the parameter, as a view of its storage.

    dtype: the type to which the part's values are rounded before they get the type of the parameter
    transposed: the part has the transposed values
    """

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    part: StoredPart
    dtype: torch.dtype
    transposed: bool


class StoredWeight:
    """A frozen parameter [rows, columns], which fills its storage, and its stored form.

    is_held  whether the weight is in low bits; False: the parameter has its values all the time
    """

    def __init__(self, param: torch.nn.Parameter) -> None:
        assert not param.requires_grad and param.is_contiguous() and param.storage_offset() == 0
        self.param, self.is_held = param, True
        self._pieces: list[_Piece] = []
        self.free()

    def tensors(self) -> Iterator[Tensor]:
        """The stored numbers and scales."""
        for piece in self._pieces:
            yield from piece.part.tensors()

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored form."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def keep_whole(self) -> None:
        """Give the parameter its memory for good, because the files do not store it in low bits."""
        self.is_held = False
        self._allocate()

    def position_of(self, view: Tensor) -> Tensor:
        """A tensor without values, with size, strides and offset of `view`, a view of the parameter.

        Unlike the view, it can be sliced while the parameter has no memory.
        """
        storage = torch.empty(self.param.numel(), dtype=self.param.dtype, device="meta")
        return storage.as_strided(view.size(), view.stride(), int(view.storage_offset()))

    def hold(self, target: Tensor, part: StoredPart, dtype: torch.dtype, *, transposed: bool = False) -> None:
        """Hold `part` as the stored form of `target`: a view of the parameter, or of a result of `position_of`.

        dtype: type of the values of `part`; the parameter gets these values in its own type
        transposed: the values of `part` are [columns, rows]
        """
        size, stride, offset = target.size(), target.stride(), int(target.storage_offset())
        self._pieces.append(
            _Piece(size=size, stride=stride, offset=offset, part=part, dtype=dtype, transposed=transposed)
        )

    def forget(self) -> None:
        """Drop the stored form, before other values are loaded."""
        self._pieces.clear()

    def write_to(self, whole: Tensor) -> None:
        """Write the values to `whole`, a contiguous tensor of the shape of the parameter."""
        if not self.is_held:
            whole.copy_(self.param.data)
            return
        first = int(whole.storage_offset())
        for piece in self._pieces:
            values = piece.part.values(piece.dtype)
            whole.as_strided(piece.size, piece.stride, first + piece.offset).copy_(
                values.mT if piece.transposed else values
            )

    def fill(self) -> None:
        """Give the parameter memory and its values."""
        if self.is_held:
            self._allocate()
            self.write_to(self.param.data)  # `data` has a version of its own, so saved tensors stay valid

    def free(self) -> None:
        if self.is_held:
            self.param.untyped_storage().resize_(0)

    def _allocate(self) -> None:
        self.param.untyped_storage().resize_(self.param.numel() * self.param.element_size())
