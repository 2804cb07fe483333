"""Computes attention over packed documents whose keys and values are projections of one latent for all heads.

    key of a head = (some rows of the up projection x latent, rotary key)        value of a head = other rows x latent

A layer saves the latent with the rotary key, and sends only these over the context-parallel group.  In DeepSeek-V3 they
have 576 elements per token; keys and values of 128 heads have 40,960.  Forward expands the latents to keys and values
for one head group at a time, and drops keys and values after the kernel has run.  Backward gathers the latents and
expands them again.  Each rank expands all keys that its queries need, so with cp > 1 several ranks compute the same
keys.  Gradients of the latents are summed over ranks in fp32.  Gradients of the up projection are summed over ranks
with the gradients of all other weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sft.layers.mixers.softmax_bytes import num_head_groups
from sft.mcore.attention.packed_attention import AttentionKernel
from sft.mcore.wide import wide_dtype

# (latents [k, 1, rank], slice of this rank's heads) -> [k, heads, d]: the part of a key that is not rotated, then the
# value
Expand = Callable[[Tensor, slice], Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The arguments of attention that have no gradient.

    rank        width of the latent; in `compressed`, the rotary key follows it
    key_width   width of the part of a key that is computed from the latent
    """

    kernel: AttentionKernel
    scale: float
    cp_group: Any
    expand: Expand
    rank: int
    key_width: int


def latent_attention(query: Tensor, compressed: Tensor, setting: Setting, weights: Sequence[Tensor]) -> Tensor:
    """Attention of this rank's tokens: query [t, heads, d], compressed [t, rank + rotary width]
    -> [t, heads, width of a value].

    The caller has rotated queries and rotary keys.  Collective over cp.
    compressed: latents, each followed by the rotary key
    weights: all tensors that `expand` uses; frozen weights get no gradient
    """
    trained = [weight for weight in weights if weight.requires_grad]
    out: Tensor = _LatentAttention.apply(setting, query, compressed, *trained)
    return out


def keys_and_values(expanded: Tensor, rotary_keys: Tensor, key_width: int) -> tuple[Tensor, Tensor]:
    """expanded [k, heads, d], rotary_keys [k, 1, r]
    -> keys [k, heads, key_width + r], values [k, heads, d - key_width]
    """
    plain, values = expanded.split([key_width, expanded.shape[-1] - key_width], dim=-1)
    return torch.cat((plain, rotary_keys.expand(-1, expanded.shape[1], -1)), dim=-1), values


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, setting: Setting, query: Tensor, compressed: Tensor, *weights: Tensor) -> Tensor:
        query, compressed = query.contiguous(), compressed.contiguous()
        latents, rotary_keys = _gathered(compressed, setting)
        outs, sums = [], []
        for heads in _head_groups(query.shape[1]):
            keys, values = keys_and_values(setting.expand(latents, heads), rotary_keys, setting.key_width)
            out, lse = setting.kernel.forward(query[:, heads], keys, values, setting.scale)
            outs.append(out)
            sums.append(lse)
        out = torch.cat(outs, dim=1)
        ctx.save_for_backward(query, compressed, out, *sums)
        ctx.setting, ctx.weights = setting, weights
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, compressed, out, *sums = ctx.saved_tensors
        setting, weights = ctx.setting, ctx.weights
        latents, rotary_keys = _gathered(compressed, setting)
        sums_dtype = wide_dtype(query.dtype)
        dlatents, drotary = torch.zeros_like(latents, dtype=sums_dtype), torch.zeros_like(rotary_keys, dtype=sums_dtype)
        dquery, dweights = torch.empty_like(query), [torch.zeros_like(weight) for weight in weights]
        for heads, lse in zip(_head_groups(query.shape[1]), sums):
            source = latents.detach().requires_grad_()
            with torch.enable_grad():
                expanded = setting.expand(source, heads)
            keys, values = keys_and_values(expanded.detach(), rotary_keys, setting.key_width)
            dquery[:, heads], dkeys, dvalues = setting.kernel.backward(
                grads[0][:, heads], query[:, heads], keys, values, out[:, heads], lse, setting.scale
            )
            del keys, values
            drotary += dkeys[..., setting.key_width :].sum(1, keepdim=True, dtype=sums_dtype)
            dexpanded = torch.cat((dkeys[..., : setting.key_width], dvalues), dim=-1).to(expanded.dtype)
            del dkeys, dvalues
            group_dlatents, *group_dweights = torch.autograd.grad(expanded, (source, *weights), dexpanded)
            dlatents += group_dlatents
            for dweight, group_dweight in zip(dweights, group_dweights):
                dweight += group_dweight
        transfer = setting.kernel.key_source.start_return(dlatents, drotary, len(query), setting.cp_group)
        dcompressed = torch.cat(transfer.result(), dim=-1).squeeze(1)
        return None, dquery, dcompressed.to(compressed.dtype), *dweights


def _gathered(compressed: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """Latents [k, 1, rank] and rotary keys [k, 1, r] of the kernel's keys.  Collective over cp."""
    latent, rotary_key = compressed[:, None, : setting.rank], compressed[:, None, setting.rank :]
    transfer = setting.kernel.key_source.start(latent, rotary_key, setting.cp_group)
    latents, rotary_keys = transfer.result()
    return latents, rotary_keys


def _head_groups(num_heads: int) -> list[slice]:
    """The heads of each head group.  8 heads -> slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)"""
    size = num_heads // num_head_groups(num_heads)
    return [slice(first, first + size) for first in range(0, num_heads, size)]
