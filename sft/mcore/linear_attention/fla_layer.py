"""Computes the convolution and the gated norm of a layer of linear attention by FLA's kernels, with their gradients.

The formulas are those of short_convolution.py and gated_norm.py: sums in fp32, one rounding to bf16.  Both functions
save the same tensors for backward as the functions of these two modules.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.config import Config
from sft.config.linear_attention import Activation
from sft.mcore.device import send
from sft.mcore.linear_attention.fla_rule import chunks
from sft.mcore.linear_attention.short_convolution import ConvolutionPlan, received_tokens, returned_gradients
from sft.parallel.taps import Taps

_SILU = "silu"


@dataclass(frozen=True, kw_only=True)
class FlaConvolutionPlan:
    """The chunks of a rank as sequences of FLA's convolution, and the tokens before them as its initial states.

    FLA's initial state of a sequence is [channels, n]: its last n - 1 columns are the n - 1 tokens before the sequence.

    halo           `ConvolutionPlan` of the microbatch; only its halo is used
    boundaries     int64 [sequences + 1]
    chunk_indices  as in `fla_rule.Part`
    local_slots, local_rows        int64: each slot of a state (sequence * n + column) that holds a local token, and the
                                   index of this token
    received_slots, received_rows  int64: the same for received tokens
    local_tokens, local_numbers    int64: the different tokens of `local_rows`, and for each slot the index of its token
                                   among them.  The states of several branches may hold the same token
    received_tokens, received_numbers  int64: the same for received tokens
    """

    halo: ConvolutionPlan
    boundaries: Tensor
    chunk_indices: Tensor
    local_slots: Tensor
    local_rows: Tensor
    received_slots: Tensor
    received_rows: Tensor
    local_tokens: Tensor
    local_numbers: Tensor
    received_tokens: Tensor
    received_numbers: Tensor

    @staticmethod
    def of(taps: Taps, device: torch.device) -> "FlaConvolutionPlan":
        num_taps, num_tokens = len(taps.rows) + 1, int(taps.boundaries[-1])
        slots, sources = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for shift, (rows, of_rows) in enumerate(zip(taps.rows, taps.sources), start=1):
            sequence = np.searchsorted(taps.boundaries[:-1], rows)
            is_first = taps.boundaries[sequence.clip(max=len(taps.boundaries) - 2)] == rows
            slots.append(sequence[is_first] * num_taps + num_taps - shift)
            sources.append(of_rows[is_first])
        slot, source = np.concatenate(slots), np.concatenate(sources)
        is_local = source < num_tokens
        arrays = {
            "boundaries": taps.boundaries,
            "chunk_indices": chunks(taps.boundaries)[0],
            "local_slots": slot[is_local],
            "local_rows": source[is_local],
            "received_slots": slot[~is_local],
            "received_rows": source[~is_local] - num_tokens,
        }
        for name in ("local", "received"):
            tokens, numbers = np.unique(arrays[f"{name}_rows"], return_inverse=True)
            arrays |= {f"{name}_tokens": tokens, f"{name}_numbers": numbers}
        on_device = {name: send(torch.from_numpy(np.ascontiguousarray(x)), device) for name, x in arrays.items()}
        return FlaConvolutionPlan(halo=ConvolutionPlan.of(taps, device), **on_device)

    @property
    def sequences(self) -> dict[str, Tensor]:
        return {"cu_seqlens": self.boundaries, "chunk_indices": self.chunk_indices}

    def initial_states(self, x: Tensor, received: Tensor, num_taps: int) -> Tensor | None:
        """The tokens before each sequence, [sequences, channels, num_taps]; 0 where there are none.

        None if no token comes before any sequence.
        """
        if not len(self.local_rows) + len(self.received_rows):
            return None
        states = x.new_zeros(((len(self.boundaries) - 1) * num_taps, x.shape[1]))
        states.index_copy_(0, self.local_slots, x.index_select(0, self.local_rows))
        states.index_copy_(0, self.received_slots, received.index_select(0, self.received_rows))
        return states.unflatten(0, (-1, num_taps)).transpose(1, 2).contiguous()

    def add_gradients(self, dstates: Tensor, dx: Tensor, dreceived: Tensor) -> None:
        """Add the gradients of initial states to the gradients of the tokens that they hold: dx and dreceived."""
        by_slot = dstates.transpose(1, 2).flatten(0, 1)
        for gradient, slots, tokens, numbers in (
            (dx, self.local_slots, self.local_tokens, self.local_numbers),
            (dreceived, self.received_slots, self.received_tokens, self.received_numbers),
        ):
            # In fp32, so that the sum over branches with the same token before them is rounded once.
            total = by_slot.new_zeros((len(tokens), by_slot.shape[1]), dtype=torch.float32)
            total.index_add_(0, numbers, by_slot.index_select(0, slots).float())
            gradient.index_add_(0, tokens, total.to(gradient.dtype))


def call_convolution(
    functions: Any,
    x: Tensor,
    weight: Tensor,
    states: Tensor | None,
    sequences: Mapping[str, Tensor],
    bias: Tensor | None = None,
) -> Tensor:
    """FLA's convolution of x [t, channels].

    functions: FLA's functions; states: initial states, or None; sequences: arguments with boundaries and chunks
    """
    arguments = dict(weight=weight, bias=bias, residual=None, initial_state=states, activation=_SILU)
    out: Tensor = functions.causal_conv1d_fwd(x=x[None], **arguments, **sequences)[0]
    return out[0]


def call_gradients_of_convolution(
    functions: Any,
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    states: Tensor | None,
    sequences: Mapping[str, Tensor],
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, of the weight, of the bias, and of the initial states.  grad: gradient of the output"""
    arguments = dict(dht=None, weight=weight, bias=bias, initial_state=states, activation=_SILU)
    dx, dweight, dbias, _, dstates = functions.causal_conv1d_bwd(x=x[None], dy=grad[None], **arguments, **sequences)
    return dx[0], dweight, dbias, dstates


class FlaLayer(ABC):
    """The parts of FLA's kernels that serve all recurrences; implements `recurrence.Convolution`.

    functions: FLA's functions (`fla_functions.functions`)
    """

    functions: Any

    @abstractmethod
    def compile(self, config: Config, device: torch.device) -> None:
        """Call every kernel of a layer, forward and backward, so that Triton compiles it."""

    def convolution_plan(self, taps: Taps, device: torch.device) -> FlaConvolutionPlan:
        return FlaConvolutionPlan.of(taps, device)

    def convolution(
        self, x: Tensor, weight: Tensor, plan: FlaConvolutionPlan, cp_group: Any, bias: Tensor | None = None
    ) -> Tensor:
        out: Tensor = _Convolution.apply(self.functions, x, weight, bias, plan, cp_group)
        return out


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        functions, x, weight, bias, plan, cp_group = arguments
        received = received_tokens(x, plan.halo, cp_group)
        ctx.save_for_backward(x, received, weight, bias)
        ctx.setting = functions, plan, cp_group
        if not len(x):
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        states = plan.initial_states(x, received, weight.shape[1])
        return call_convolution(functions, x, weight, states, plan.sequences, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (x, received, weight, bias), (functions, plan, cp_group) = ctx.saved_tensors, ctx.setting
        dx, dweight, dreceived = torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(received)
        dbias = None if bias is None else torch.zeros_like(bias)
        if len(x):
            states = plan.initial_states(x, received, weight.shape[1])
            dx, dweight, dbias, dstates = call_gradients_of_convolution(
                functions, x, grads[0], weight, states, plan.sequences, bias
            )
            if states is not None:
                plan.add_gradients(dstates, dx, dreceived)
        return None, returned_gradients(dx, dreceived, plan.halo, cp_group), dweight, dbias, None, None


def gated(
    functions: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Activation
) -> tuple[Tensor, Tensor]:
    """The results of `gated_norm`, without gradients."""
    if not x.numel():
        return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    rows = (y.contiguous().flatten(0, 1) for y in (x, gate))
    out, _, scale, _ = functions.layer_norm_gated_fwd(
        *rows, weight=weight, bias=None, activation=activation, eps=eps, is_rms_norm=True
    )
    return out.view(x.shape), scale.view(*x.shape[:-1], 1)


def gated_norm(
    functions: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Activation
) -> tuple[Tensor, Tensor]:
    """Implements `delta_rule.DeltaKernel.gated_norm`."""
    out, scale = _FusedGatedNorm.apply(functions, x, gate, weight, eps, activation)
    return out, scale


class _FusedGatedNorm(torch.autograd.Function):
    """The gated norm, by FLA's kernels.  It saves the gate without a copy, as a view of the projections' output.

    FLA's own function makes its inputs contiguous first, and would save the copy.
    """

    @staticmethod
    def forward(ctx: Any, functions: Any, x: Tensor, gate: Tensor, *setting: Any) -> tuple[Tensor, Tensor]:
        weight, eps, activation = setting
        out, scale = gated(functions, x, gate, weight, eps, activation)
        ctx.save_for_backward(x, gate, weight, scale)
        ctx.setting = functions, eps, activation
        ctx.mark_non_differentiable(scale)
        return out, scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        (x, gate, weight, scale), (functions, eps, activation) = ctx.saved_tensors, ctx.setting
        if not x.numel():
            return None, torch.zeros_like(x), torch.zeros_like(gate), torch.zeros_like(weight), None, None
        rows = (y.contiguous().flatten(0, 1) for y in (grad, x, gate))
        dx, dgate, dweight = functions.layer_norm_gated_bwd(
            *rows, weight=weight, bias=None, activation=activation, eps=eps, rstd=scale.flatten(), is_rms_norm=True
        )[:3]
        return None, dx.view(x.shape), dgate.view(gate.shape), dweight, None, None
