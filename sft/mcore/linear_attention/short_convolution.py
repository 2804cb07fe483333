"""Computes the causal depthwise convolution before a recurrence, over the last n tokens of a document, then SiLU.

    z[t] = bias + sum over s = 0 .. n - 1 of weight[:, n - 1 - s] * x[t - s]        out[t] = silu(z[t])

The tokens before a branch are those of its parent.  Before the start of a text, zeros take the place of tokens.  Under
context parallelism, ranks send each other the n - 1 tokens before their chunks, and backward returns the gradients of
these tokens.  The input and the received tokens are saved; backward computes z again.  The arithmetic is in fp32 or
float64, on a block of channels at a time.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sft.layers.mixers.recurrent import BLOCK_NUMBERS
from sft.mcore.device import send
from sft.mcore.wide import wide
from sft.parallel.taps import Taps


@dataclass(frozen=True, kw_only=True)
class ConvolutionPlan:
    """The arrays of `Taps` for one microbatch, as tensors on the device.

    halo_rows: int64, indices of the local tokens that other ranks need; None with cp 1
    """

    edges: Tensor
    rows: tuple[Tensor, ...]
    sources: tuple[Tensor, ...]
    halo_rows: Tensor | None = None
    num_sent: list[int] | None = None
    num_received: list[int] | None = None

    @staticmethod
    def of(taps: Taps, device: torch.device) -> "ConvolutionPlan":
        def sent(numbers: np.ndarray) -> Tensor:
            return send(torch.from_numpy(np.ascontiguousarray(numbers)), device)

        halo = taps.halo
        return ConvolutionPlan(
            edges=sent(taps.edges),
            rows=tuple(map(sent, taps.rows)),
            sources=tuple(map(sent, taps.sources)),
            halo_rows=None if halo is None else sent(halo.send),
            num_sent=None if halo is None else halo.num_sent,
            num_received=None if halo is None else halo.num_received,
        )


def short_convolution(
    x: Tensor, weight: Tensor, plan: ConvolutionPlan, cp_group: Any, bias: Tensor | None = None
) -> Tensor:
    """The convolution of this rank's tokens: x [t, channels], weight [channels, n] -> [t, channels].

    Collective over cp.  The channels are those of this tp rank.
    bias: [channels]; None: 0
    """
    assert weight.shape == (x.shape[1], len(plan.rows) + 1), f"weight {tuple(weight.shape)}, x {tuple(x.shape)}"
    out: Tensor = _ShortConvolution.apply(x, weight, bias, plan, cp_group)
    return out


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan, cp_group: Any
    ) -> Tensor:
        received = received_tokens(x, plan, cp_group)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for channels in _blocks(x):
            z = _preactivation(*_held_and_taps(x, received, weight, channels), plan)
            if bias is not None:
                z += bias[channels]
            out[:, channels] = torch.nn.functional.silu(z, inplace=True)
        ctx.save_for_backward(x, received, weight, bias)
        ctx.plan, ctx.cp_group = plan, cp_group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, received, weight, bias = ctx.saved_tensors
        dheld = torch.empty((len(x) + len(received), x.shape[1]), dtype=x.dtype, device=x.device)
        dweight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        dbias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        for channels in _blocks(x):
            held, taps = _held_and_taps(x, received, weight, channels)
            z = _preactivation(held, taps, ctx.plan)
            if bias is not None:
                z += bias[channels]
            dz = torch.ops.aten.silu_backward(grads[0][:, channels].to(z.dtype), z)
            del z
            dheld[:, channels] = _gradient_of_tokens(dz, taps, len(held), ctx.plan)
            if dweight is not None:
                dweight[channels] = _gradient_of_weight(dz, held, ctx.plan)
            if dbias is not None:
                dbias[channels] = dz.sum(0)
        dx = returned_gradients(dheld[: len(x)], dheld[len(x) :], ctx.plan, ctx.cp_group)
        return dx, dweight, dbias, None, None


def received_tokens(x: Tensor, plan: ConvolutionPlan, cp_group: Any) -> Tensor:
    """The halo of this rank's chunks, [received tokens, channels]."""
    if plan.halo_rows is None or plan.num_received is None:
        return x[:0]
    received = x.new_empty((sum(plan.num_received), x.shape[1]))
    sent = x.index_select(0, plan.halo_rows)
    dist.all_to_all_single(received, sent, plan.num_received, plan.num_sent, group=cp_group)
    return received


def returned_gradients(dx: Tensor, dreceived: Tensor, plan: ConvolutionPlan, cp_group: Any) -> Tensor:
    """Send the gradients of received tokens back to their ranks, and add the gradients that arrive to `dx`.

    dx, dreceived: gradients of local and of received tokens through this rank's outputs
    -> gradients of local tokens through the outputs of all ranks
    """
    if plan.halo_rows is None:
        return dx
    returned = dx.new_empty((len(plan.halo_rows), dx.shape[1]))
    dist.all_to_all_single(returned, dreceived, plan.num_sent, plan.num_received, group=cp_group)
    return dx.index_add_(0, plan.halo_rows, returned)


def _blocks(x: Tensor) -> list[slice]:
    size = max(1, BLOCK_NUMBERS[x.device.type] // max(1, len(x)))
    return [slice(start, start + size) for start in range(0, x.shape[1], size)]


def _held_and_taps(x: Tensor, received: Tensor, weight: Tensor, channels: slice) -> tuple[Tensor, Tensor]:
    """concat(local tokens, received tokens) and the weight, both for a block of channels and in fp32 or float64.

    Row s of the weight [n, block] belongs to the token s positions earlier.
    """
    held = wide(torch.cat((x[:, channels], received[:, channels])))
    return held, weight[channels].t().flip(0).to(held.dtype)  # [n, block]


def _preactivation(held: Tensor, taps: Tensor, plan: ConvolutionPlan) -> Tensor:
    """z [t, block].

    At the edges of chunks, the rows before a token are not the tokens before it, so z is computed again there.
    """
    num_tokens = len(held) - sum(plan.num_received or ())
    x = held[:num_tokens]
    z = x * taps[0]
    for shift in range(1, len(taps)):
        z[shift:].addcmul_(x[: max(num_tokens - shift, 0)], taps[shift])
    z.index_copy_(0, plan.edges, x.index_select(0, plan.edges) * taps[0])
    for shift, (rows, sources) in enumerate(zip(plan.rows, plan.sources), start=1):
        z.index_add_(0, rows, held.index_select(0, sources) * taps[shift])
    return z


def _gradient_of_tokens(dz: Tensor, taps: Tensor, num_held: int, plan: ConvolutionPlan) -> Tensor:
    """Gradient of concat(local tokens, received tokens), [num_held, block]."""
    dheld = dz.new_zeros((num_held, dz.shape[1]))
    torch.mul(dz, taps[0], out=dheld[: len(dz)])
    inner = dz.index_fill(0, plan.edges, 0.0)
    for shift, (rows, sources) in enumerate(zip(plan.rows, plan.sources), start=1):
        dheld[: max(len(dz) - shift, 0)].addcmul_(inner[shift:], taps[shift])
        dheld.index_add_(0, sources, dz.index_select(0, rows) * taps[shift])
    return dheld


def _gradient_of_weight(dz: Tensor, held: Tensor, plan: ConvolutionPlan) -> Tensor:
    """The gradient of the weight for a block of channels, [block, n]."""
    dtaps = [(dz * held[: len(dz)]).sum(0)]
    inner = dz.index_fill(0, plan.edges, 0.0)
    for shift, (rows, sources) in enumerate(zip(plan.rows, plan.sources), start=1):
        edge_products = dz.index_select(0, rows) * held.index_select(0, sources)
        dtaps.append((inner[shift:] * held[: max(len(dz) - shift, 0)]).sum(0) + edge_products.sum(0))
    return torch.stack(dtaps).flip(0).t()
