"""Recomputation of a function in backward, at once or tile by tile."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from sft.mcore.activations.kept_calls import current_products, leaving_out_products


def recomputed(
    function: Callable[[Tensor], Tensor],
    hidden: Tensor,
    weights: Iterable[Tensor],
    *,
    tile: int | None = None,
    is_last: bool = False,
) -> Tensor:
    """Return `function(hidden)`.  Only `hidden` [t, ...] is saved; backward computes the function again.

    weights: all other tensors that `function` uses.  With a tile, each one that requires a gradient must be a parameter
        with a `main_grad`
    tile: number of rows of `hidden` to which the function is applied at a time, forward and backward; None: all rows
    is_last: whether the function is the last of a layer that core computes again.  Then the result has no values,
        because nobody reads them, and the gradient of `hidden` is written over the gradient of the result
    """
    out: Tensor = _TiledRecompute.apply(function, tile, is_last, hidden, *(w for w in weights if w.requires_grad))
    return out


class _TiledRecompute(torch.autograd.Function):
    """Computes the gradient of every weight tile by tile, in the weight's dtype.

    The gradients of all tiles except the last are added to `main_grad`, in fp32, as core adds the gradients of
    microbatches.  The gradient of the last tile is returned to autograd, so that core's hook on the weight can start
    the reduction of gradients.  If `main_grad` is bf16, all tiles are added to a temporary fp32 sum, which is returned
    in bf16.
    """

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[[Tensor], Tensor],
        tile: int | None,
        is_last: bool,
        hidden: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.function, ctx.tile, ctx.is_last, ctx.weights = function, tile or len(hidden), is_last, weights
        ctx.products = current_products()
        ctx.save_for_backward(hidden)
        if is_last:
            return hidden.new_empty(()).expand_as(hidden)
        if ctx.tile >= len(hidden):
            return function(hidden)
        out = torch.empty_like(hidden)
        for rows, out_rows in zip(hidden.split(ctx.tile), out.split(ctx.tile)):
            out_rows.copy_(function(rows))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        dhidden = grads[0] if ctx.is_last and grads[0].is_contiguous() else torch.empty_like(hidden)
        tiles = list(zip(hidden.split(ctx.tile), grads[0].split(ctx.tile), dhidden.split(ctx.tile)))
        sums = [_fp32_sum(weight) for weight in ctx.weights] if len(tiles) > 1 else []
        for rows, grad, drows in tiles[:-1]:
            for total, dweight in zip(sums, _tile_backward(ctx, rows, grad, drows)):
                total.add_(dweight)
        dweights = _tile_backward(ctx, *tiles[-1])
        for number, (weight, total) in enumerate(zip(ctx.weights, sums)):
            if total is not weight.main_grad:
                dweights[number] = total.add_(dweights[number]).to(weight.dtype)
        return None, None, None, dhidden, *dweights


def _fp32_sum(weight: Any) -> Tensor:
    """The tensor that sums gradients of the weight in fp32: its `main_grad`, or zeros if that has another dtype."""
    buffer: Tensor = weight.main_grad
    return buffer if buffer.dtype == torch.float32 else torch.zeros_like(buffer, dtype=torch.float32)


def _tile_backward(ctx: Any, rows: Tensor, grad: Tensor, drows: Tensor) -> list[Tensor]:
    """Return the gradients of the weights, and write the gradient of `rows` to `drows`."""
    rows = rows.detach().requires_grad_()
    with torch.enable_grad(), leaving_out_products(ctx.products):
        out = ctx.function(rows)
    result, *dweights = torch.autograd.grad(out, (rows, *ctx.weights), grad)
    drows.copy_(result)
    return dweights
