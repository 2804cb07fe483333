"""Extends megatron-core's transformer layer: if the recipe says so, backward recomputes the second half of a layer.

The second half is the norm, the MLP or the experts, and the residual sum.  A recomputed second half saves only its
input.  The second half can run in tiles of tokens, forward and backward; the wide activations inside an MLP then exist
for one tile at a time.  The first half, attention, is computed once; activations/saved_tensors.py decides how its
tensors are saved.  With train.recompute = full, core recomputes whole layers.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import te_checkpoint
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from sft.mcore.activations.saved_tensors import SavePolicy


class Layer(TransformerLayer):
    """recompute: backward recomputes the second half; tile: tokens per tile of the second half, None: no tiles"""

    save_policy: SavePolicy | None = None

    def __init__(
        self, config: Any, *args: Any, recompute: bool = False, tile: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self._recompute, self._tile = recompute, tile

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.save_policy is not None:
            self.save_policy.start_layer()
        return super().forward(*args, **kwargs)

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        core_forward_mlp = super()._forward_mlp

        def second_half(tokens: Tensor) -> Any:
            return core_forward_mlp(tokens, *args, **kwargs)

        # Evaluation also uses tiles, because it has no more memory than training.
        if not self._recompute or not (self.training or self._tile):
            return second_half(hidden_states)
        if self.config.fp8:  # FP8 excludes tiles; Transformer Engine's checkpoint restores the first pass's scales
            tracker = tensor_parallel.random.get_cuda_rng_tracker
            return te_checkpoint(second_half, False, tracker, self.pg_collection.tp, hidden_states)
        weights = [*self.pre_mlp_layernorm.parameters(), *self.mlp.parameters()]
        return _TiledRecompute.apply(second_half, self._tile, hidden_states, *weights)


class _TiledRecompute(torch.autograd.Function):
    """Applies a function to each row of tokens [t, ...], tile by tile; backward recomputes the function per tile.

    Each tile gives a gradient of every weight, in the weight's dtype.  The gradients of all tiles except the last are
    added to `main_grad`, in fp32, as core adds the gradients of microbatches.  The gradient of the last tile is
    returned to autograd, which starts a gradient reduction that waits for this weight.
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
        for rows, out_rows in zip(hidden.split(ctx.tile), out.split(ctx.tile)):
            out_rows.copy_(function(rows))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        dhidden = torch.empty_like(hidden)
        tiles = list(zip(hidden.split(ctx.tile), grads[0].split(ctx.tile), dhidden.split(ctx.tile)))
        for rows, grad, drows in tiles[:-1]:
            for weight, dweight in zip(ctx.weights, _tile_backward(ctx, rows, grad, drows)):
                weight.main_grad.add_(dweight)
        return None, None, dhidden, *_tile_backward(ctx, *tiles[-1])


def _tile_backward(ctx: Any, rows: Tensor, grad: Tensor, drows: Tensor) -> list[Tensor]:
    """Return the gradients of the weights, and write the gradient of `rows` to `drows`."""
    rows = rows.detach().requires_grad_()
    with torch.enable_grad():
        out = ctx.function(rows)
    result, *dweights = torch.autograd.grad(out, (rows, *ctx.weights), grad)
    drows.copy_(result)
    return dweights
