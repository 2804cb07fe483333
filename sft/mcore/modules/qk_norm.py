"""Implements RMSNorm over all query heads of a token, or over all its key heads (Olmo 2), in plain torch.

With tensor parallelism a rank has a part of the heads, so forward and backward each all-reduce one value per token.
The norm saves its input and one fp32 value per token.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from sft.mcore.activations.saved_tensors import SavePolicy
from sft.mcore.wide import wide


class AcrossHeadsNorm(torch.nn.Module):
    """RMSNorm over all heads of a token.

    Every tp rank holds the weight of all heads, [heads * d], and uses only the part of its own heads.  The gradient of
    the other parts is 0.  Core sums the gradient over tp if the weight's name contains q_layernorm or k_layernorm, so
    every rank gets the gradient of the whole weight.
    """

    save_policy: SavePolicy | None = None
    heads_field: str  # field of TransformerConfig that has the number of heads on all tp ranks; set by `norms_over`
    tp_group: Any

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        """hidden_size: width of a head"""
        super().__init__()
        self.eps = eps
        width = getattr(config, self.heads_field) * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x [t, 1, heads of this rank, d] -> normed x.  Collective over tp."""
        x = x.contiguous()  # a saved view would keep the whole output of the projection in memory
        num_heads, width = x.shape[-2:]
        first = self.tp_group.rank() * num_heads
        weight = self.weight.view(-1, width)[first : first + num_heads]
        out, shrink = _Norm.apply(x, weight, self.eps, self.weight.numel(), self.tp_group)
        if self.save_policy is not None:
            self.save_policy.mark_recomputable(out, _normed, x, weight, shrink)
        return out


def norms_over(tp_group: Any) -> list[type[AcrossHeadsNorm]]:
    """The classes of the norms of queries and of keys, in this order.  Core makes the modules from them."""
    fields = ("num_attention_heads", "num_query_groups")
    return [type("Norm", (AcrossHeadsNorm,), {"tp_group": tp_group, "heads_field": field}) for field in fields]


class _Norm(torch.autograd.Function):
    """x [t, 1, n, d], weight [n, d] -> normed x, and 1 / root mean square of each token, which has no gradient.

    width: number of elements of all heads on all tp ranks
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, width: int, group: Any) -> tuple[Tensor, Tensor]:
        squares = wide(x).pow(2)
        shrink = torch.rsqrt(_sum_over_heads(squares, group) / width + eps)
        ctx.save_for_backward(x, weight, shrink)
        ctx.width, ctx.group = width, group
        ctx.mark_non_differentiable(shrink)
        return _normed(x, weight, shrink), shrink

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, shrink = ctx.saved_tensors
        grad = grad.to(shrink.dtype)
        unscaled, scaled = x.to(shrink.dtype) * shrink, grad * weight
        dx = shrink * (scaled - unscaled * (_sum_over_heads(scaled * unscaled, ctx.group) / ctx.width))
        dweight = (grad * unscaled).flatten(0, -3).sum(0)
        return dx.to(x.dtype), dweight.to(weight.dtype), None, None, None


def _normed(x: Tensor, weight: Tensor, shrink: Tensor) -> Tensor:
    return (x.to(shrink.dtype) * shrink * weight).to(x.dtype)


def _sum_over_heads(x: Tensor, group: Any) -> Tensor:
    """[t, 1, n, d] -> [t, 1, 1, 1], over the heads of all tp ranks."""
    total = x.sum((-2, -1), keepdim=True)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total
