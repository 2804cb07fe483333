"""Multiplies tokens by adapters, and adds the products to the output of the frozen layer, in the same memory.

    x, inner = projected(x, a)       inner = A x; backward adds the adapters' gradient of x into the layer's gradient
    output   = added(output, ...)    output += scale * (B inner), each part into its own rows

So there is no separate pass that joins or adds the parts, and no second tensor as wide as the output.  No backward pass
may need the old values of the output and of the gradient.  A linear layer needs neither.  If a layer saved its output,
autograd would raise an error, because `added` changes the version of the tensor.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class OutputSlice(NamedTuple):
    """The rows of a layer's output to which the product of one part of a factor B is added.

    columns  columns of `inner` that the product takes
    groups   number of equal groups of the output's rows; each group has rows of the part
    rows     rows of the part in each group
    """

    columns: slice
    groups: int
    rows: slice

    def of(self, output: Tensor) -> Tensor:
        """The part's view of an output [n, all rows]: [groups, n, rows of the part in a group]"""
        return output.unflatten(-1, (self.groups, -1))[..., self.rows].transpose(0, 1)


def projected(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply x [..., in] by a [rank, in] -> x and inner [..., rank].

    Give the returned x to the frozen layer only: backward adds the gradient of x through `inner` to the layer's
    gradient in place.
    """
    if not x.requires_grad:
        return x, x @ a.t()
    through, inner = _Projected.apply(x, a)
    return through, inner


def added(
    output: Tensor, inner: Tensor, factors: Sequence[Tensor], slices: Sequence[OutputSlice], scale: float
) -> Tensor:
    """Add scale * (B inner) for each factor B into `output`, and return it.

    output [..., rows]; inner [..., ranks]; factors: B [rows of the part, rank] for each of `slices`
    """
    result: Tensor = _Added.apply(output, inner, scale, slices, *factors)
    return result


def added_rows(output: Tensor, product: Tensor, part_slice: OutputSlice) -> Tensor:
    """Add product [n, rows of the part] into the rows of the part, which are contiguous, of output [n, rows]."""
    result: Tensor = _AddedRows.apply(output, product, part_slice.rows)
    return result


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, a)
        ctx.set_materialize_grads(False)
        return x.view_as(x), x @ a.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        x, a = ctx.saved_tensors
        dx, dinner = grads
        if dinner is None:
            return dx, None
        dinner = dinner.flatten(0, -2)
        da = dinner.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        if dx is None:
            return (dinner @ a).view_as(x), da
        dx = dx.contiguous()  # changed in place: the layer's backward made it for this node alone
        dx.flatten(0, -2).addmm_(dinner, a)
        return dx, da


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output: Tensor, inner: Tensor, scale: float, slices: Sequence[OutputSlice], *factors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(inner, *factors)
        ctx.scale, ctx.slices = scale, slices
        output = output.detach()  # the same memory; autograd forbids changes of a view that a layer returned
        whole, inner = output.view(-1, output.shape[-1]), inner.flatten(0, -2)
        for (columns, groups, _), part, b in zip(slices, (part_slice.of(whole) for part_slice in slices), factors):
            matrices = b.unflatten(0, (groups, -1)).transpose(1, 2)  # [groups, rank, rows in a group]
            if groups == 1:
                part[0].addmm_(inner[:, columns], matrices[0], alpha=scale)
            else:
                part.baddbmm_(inner[:, columns].expand(groups, -1, -1), matrices, alpha=scale)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        inner, *factors = ctx.saved_tensors
        grad, flat = grads[0].flatten(0, -2), inner.flatten(0, -2)
        dinner, dfactors = torch.zeros_like(flat), []
        for part_slice, b in zip(ctx.slices, factors):
            part, own, groups = part_slice.of(grad), flat[:, part_slice.columns], part_slice.groups
            down = dinner[:, part_slice.columns]
            if groups == 1:
                down.addmm_(part[0], b, alpha=ctx.scale)
                db = part[0].t() @ own
            else:
                down.add_(torch.bmm(part, b.unflatten(0, (groups, -1))).sum(0), alpha=ctx.scale)
                db = torch.bmm(part.transpose(1, 2), own.expand(groups, -1, -1)).flatten(0, 1)
            dfactors.append(db.mul_(ctx.scale))
        return grads[0], dinner.view_as(inner), None, None, *dfactors


class _AddedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, product: Tensor, rows: slice) -> Tensor:
        ctx.rows = rows
        output = output.detach()
        output[:, rows].add_(product)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], grads[0][:, ctx.rows], None
