"""Multiplies tokens, which are rows sorted by expert, by the matrices of their experts.

torch's grouped product multiplies the rows of all experts in one kernel.  It needs bf16, widths that are multiples of
8, and a GPU of compute capability 9.x or 10.x.  Otherwise, a loop multiplies the rows of one expert after another.

Frozen matrices in low bits are dequantised for a group of experts at a time, forward and again in backward.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from sft.layers.low_bits import GROUP_BYTES

_ALIGNMENT = 8  # rows of bf16 matrices in the kernel start at multiples of 16 bytes


@dataclass(frozen=True)
class RowsOfExperts:
    """The division of rows, which are sorted by expert, among experts.

    counts: number of rows of each expert
    ends: int32 [experts], the end of each expert's rows, on the device; None: there is no kernel for this device
    """

    counts: list[int]
    ends: Tensor | None

    @classmethod
    def of(cls, counts: list[int], device: torch.device) -> "RowsOfExperts":
        if not sum(counts) or not has_kernel(device):
            return cls(counts, None)
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
        return cls(counts, ends.pin_memory().to(device, non_blocking=True))  # without a wait of the host

    def times(self, x: Tensor, matrices: Tensor | Sequence[Tensor]) -> Tensor:
        """Multiply rows by their experts' matrices: x [n, columns] -> [n, rows]

        matrices: [experts, rows, columns], or a tensor [rows, columns] of each expert
        """
        first, is_stack = matrices[0], isinstance(matrices, Tensor)
        is_aligned = all(size % _ALIGNMENT == 0 for size in first.shape)
        if self.ends is not None and is_aligned and x.dtype == first.dtype == torch.bfloat16:
            output: Tensor = GroupedProduct.apply(x, self.ends, *([matrices] if is_stack else matrices))
            return output
        return torch.cat([rows @ matrix.t() for rows, matrix in zip(x.split(self.counts), matrices)])

    def times_stored(self, x: Tensor, matrices: Sequence["StoredMatrix"]) -> Tensor:
        """`times` with frozen matrices in low bits.  A group of at most GROUP_BYTES is dequantised at a time."""
        output: Tensor = _ProductByGroups.apply(x, self, matrices)
        return output

    def times_transposed(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Multiply rows by their experts' transposed matrices: x [n, rows] -> [n, columns]

        matrices: [experts, rows, columns]
        """
        is_aligned = all(size % _ALIGNMENT == 0 for size in matrices.shape[1:])
        if self.ends is not None and is_aligned and x.dtype == matrices.dtype == torch.bfloat16:
            return torch.nn.functional.grouped_mm(x, matrices, offs=self.ends)
        return torch.cat([rows @ matrix for rows, matrix in zip(x.split(self.counts), matrices)])

    def groups(self, matrices: Sequence["StoredMatrix"]) -> Iterator[tuple[slice, "RowsOfExperts", Tensor]]:
        """Yield the rows of each group of experts, their division among the group, and the group's matrices.

        The matrices [experts of the group, rows, columns] have values only until the next group is yielded.  A group
        without rows is left out.
        """
        like = matrices[0].param
        size, start = max(1, GROUP_BYTES // (like.numel() * like.element_size())), 0
        stack = like.new_empty(min(size, len(matrices)), *like.shape)
        for first in range(0, len(matrices), size):
            counts = self.counts[first : first + size]
            span = slice(start, start + sum(counts))
            start = span.stop
            if not sum(counts):
                continue
            for number, matrix in enumerate(matrices[first : first + size]):
                if counts[number]:
                    matrix.write_to(stack[number])
            ends = None
            if self.ends is not None:
                ends = self.ends[first : first + size] - span.start
            yield span, RowsOfExperts(counts, ends), stack[: len(counts)]


class StoredMatrix(Protocol):
    """A frozen matrix in low bits."""

    @property
    def is_held(self) -> bool:
        """Whether the matrix is in low bits; False: its parameter has the values."""

    @property
    def param(self) -> Tensor:
        """The parameter [rows, columns], whose memory is freed while the matrix is in low bits."""

    def write_to(self, whole: Tensor) -> None:
        """Write the values to `whole`, a contiguous tensor of the shape of the parameter."""


class _ProductByGroups(torch.autograd.Function):
    """x [n, columns] -> [n, rows].  x is sorted by expert; the matrices are dequantised, forward and backward.

    rows: the division of x; matrices: the stored matrix [rows, columns] of each expert
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowsOfExperts, matrices: Sequence[StoredMatrix]) -> Tensor:
        ctx.rows, ctx.matrices = rows, matrices
        output = x.new_empty(len(x), matrices[0].param.shape[0])
        for span, own, values in rows.groups(matrices):
            output[span] = own.times(x[span], values)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].contiguous()
        dx = grad.new_empty(len(grad), ctx.matrices[0].param.shape[1])
        for span, own, values in ctx.rows.groups(ctx.matrices):
            dx[span] = own.times_transposed(grad[span], values)
        return dx, None, None


def has_kernel(device: torch.device) -> bool:
    """Whether torch has a grouped product for this device."""
    if device.type != "cuda" or not hasattr(torch.nn.functional, "grouped_mm"):  # older releases of torch lack it
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)


class GroupedProduct(torch.autograd.Function):
    """x [n, columns], ends int32 [experts], matrices -> [n, rows], in one kernel.

    matrices: one tensor [experts, rows, columns], or a tensor [rows, columns] of each expert.  The latter are copied
    into one tensor for the kernel, forward and backward, and the copy is not kept.

    Autograd's own backward would give the kernel the gradient of the output with any strides, and the kernel refuses
    some.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *matrices: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *matrices)
        return torch.nn.functional.grouped_mm(x, _stacked(matrices).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *matrices = ctx.saved_tensors
        grad, dx = grad.contiguous(), None
        dmatrices: Sequence[Tensor | None] = [None] * len(matrices)
        if ctx.needs_input_grad[0]:
            dx = torch.nn.functional.grouped_mm(grad, _stacked(matrices), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            stack = torch.nn.functional.grouped_mm(grad.t(), x, offs=ends)
            starts = torch.nn.functional.pad(ends, (1, 0))[:-1]
            stack.masked_fill_((starts == ends)[:, None, None], 0.0)  # experts without rows
            dmatrices = [stack] if matrices[0].ndim == 3 else stack.unbind()
        return dx, None, *dmatrices


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    return matrices[0] if matrices[0].ndim == 3 else torch.stack(list(matrices))
