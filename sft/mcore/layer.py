"""One transformer layer: megatron-core's, with the second half computed again in backward where the recipe says so.

The second half is the norm, the MLP or the experts, and the sum with what came in: of all that, only what came in is
kept.  It may be worked off in tiles of tokens, forward and backward, so that the wide inside of an MLP never exists for
more tokens than a tile has.  The first half, attention, is computed once (`saved_tensors.py` tells what that keeps); core
itself recomputes whole layers (train.recompute = full).
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from sft.mcore.activations import saved_tensors


class Layer(TransformerLayer):
    """again: compute the second half again in backward; tile: tokens it takes at once, None for all."""

    def __init__(
        self, config: Any, *args: Any, recompute: bool = False, tile: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self._recompute, self._tile = recompute, tile

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        saved_tensors.begin_layer()
        return super().forward(*args, **kwargs)

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        of_core = super()._forward_mlp

        def half(tokens: Tensor) -> Any:
            return of_core(tokens, *args, **kwargs)

        if not self._recompute or not (self.training or self._tile):  # evaluation has no more room than training
            return half(hidden_states)
        if self.config.fp8:  # which has no tiles; scales of the first pass are Transformer Engine's business
            from megatron.core.extensions.transformer_engine import te_checkpoint

            tracker = tensor_parallel.random.get_cuda_rng_tracker
            return te_checkpoint(half, False, tracker, self.pg_collection.tp, hidden_states)
        weights = [*self.pre_mlp_layernorm.parameters(), *self.mlp.parameters()]
        return _ByTiles.apply(half, self._tile, hidden_states, *weights)


class _ByTiles(torch.autograd.Function):
    """A function of tokens [t, ...], row by row, and of weights; backward computes it again, tile by tile.

    The gradient of a weight is one product for each tile, in the weight's dtype.  They are summed as those of
    microbatches are, in `main_grad`, which is fp32; the last takes autograd's way there, where a reduction may wait.
    """

    @staticmethod
    def forward(
        ctx: Any, function: Callable[[Tensor], Tensor], tile: int | None, hidden: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.function, ctx.tile, ctx.weights = function, tile or len(hidden), weights
        ctx.save_for_backward(hidden)
        if ctx.tile >= len(hidden):
            return function(hidden)
        out = torch.empty_like(hidden)
        for rows, place in zip(hidden.split(ctx.tile), out.split(ctx.tile)):
            place.copy_(function(rows))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        dhidden = torch.empty_like(hidden)
        tiles = list(zip(hidden.split(ctx.tile), grads[0].split(ctx.tile), dhidden.split(ctx.tile)))
        for rows, grad, place in tiles[:-1]:
            for weight, part in zip(ctx.weights, _backward_of(ctx, rows, grad, place)):
                weight.main_grad.add_(part)
        last = _backward_of(ctx, *tiles[-1])
        return None, None, dhidden, *last


def _backward_of(ctx: Any, rows: Tensor, grad: Tensor, place: Tensor) -> list[Tensor]:
    """Gradients of the weights; that of the rows goes to `place`."""
    rows = rows.detach().requires_grad_()
    with torch.enable_grad():
        out = ctx.function(rows)
    drows, *found = torch.autograd.grad(out, (rows, *ctx.weights), grad)
    place.copy_(drows)
    return found
