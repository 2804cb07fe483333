"""A kernel of the gated delta rule in plain torch, on any device and in any precision.

schedule.py decides which chunks are computed together, and chunks.py computes them.  Forward saves only the states at
the start of each block except a group's first one.  Backward recomputes everything else, block by block.  States and
all products are float32, or float64 for float64 values.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sft.mcore.linear_attention.chunks import Chunks, gathered, gradients, scatter, without_padding
from sft.mcore.linear_attention.delta_rule import Fragments, Inputs
from sft.mcore.linear_attention.gated_norm import gated, gated_norm
from sft.mcore.linear_attention.schedule import Block, ChunkSchedule, Group
from sft.mcore.linear_attention.short_convolution import ConvolutionPlan, short_convolution
from sft.parallel.taps import Taps


@dataclass(frozen=True)
class TorchDeltaKernel:
    """Implements `delta_rule.Kernel` in torch.  reason: why this run uses this kernel, for the log"""

    reason: str = "plain torch"

    def __str__(self) -> str:
        return f"torch ({self.reason})"

    def schedule(self, fragments: Fragments, heads: int, device: torch.device) -> ChunkSchedule:
        return ChunkSchedule.of(fragments, heads, device)

    def prepared(self, inputs: Inputs, schedule: ChunkSchedule) -> Inputs:
        return inputs

    def transitions(self, inputs: Inputs, schedule: ChunkSchedule) -> tuple[Tensor, Tensor]:
        """Run the rule on the values [0, v] from the states [1, 0]; then the last states are [A, B]."""
        size = inputs.k.shape[-1]
        identity = torch.eye(size, dtype=inputs.state_dtype, device=inputs.v.device)
        maps = pad(identity, (0, inputs.v.shape[-1])).repeat(len(schedule.fragments.linked), inputs.v.shape[1], 1, 1)
        for group in _groups(inputs, schedule):
            if group.linked is not None:
                state = maps[group.linked]
                for block in group.blocks:
                    chunks = Chunks.of(inputs._replace(q=inputs.k), block)
                    replace(chunks, v=pad(chunks.v, (size, 0))).scan(state)
                maps[group.linked] = state
        return maps[..., :size].contiguous(), maps[..., size:].contiguous()

    def forward(self, inputs: Inputs, schedule: ChunkSchedule, states: Tensor | None) -> tuple[Tensor, Tensor]:
        out, saved = torch.empty_like(inputs.v), inputs.zero_states(schedule.num_saved)
        for group in _groups(inputs, schedule):
            state = _group_states(states, group, inputs)
            for block in group.blocks:
                if block.saved is not None:
                    saved[block.saved] = state[: block.steps[0].stop]
                chunks = Chunks.of(inputs, block)
                before, _, values = chunks.scan(state)
                scatter(out, chunks.outputs(before, values), block)
        return out, saved

    def state_gradients(self, grad: Tensor, inputs: Inputs, schedule: ChunkSchedule) -> Tensor:
        dstates = inputs.zero_states(len(schedule.fragments.linked))
        for group in _groups(inputs, schedule):
            if group.linked is not None:
                dstate = dstates[group.linked]
                for block in reversed(group.blocks):
                    Chunks.of(inputs, block).reverse_scan(_output_gradients(grad, inputs, block), dstate)
                dstates[group.linked] = dstate
        return dstates

    def backward(
        self,
        grad: Tensor,
        inputs: Inputs,
        schedule: ChunkSchedule,
        states: Tensor | None,
        saved: Tensor,
        last_gradients: Tensor | None,
    ) -> Inputs:
        results = Inputs(*map(torch.empty_like, inputs))
        for group in _groups(inputs, schedule):
            dstate = _group_states(last_gradients, group, inputs)
            for block in reversed(group.blocks):
                is_first = block.saved is None
                state = _group_states(states, group, inputs) if is_first else saved[block.saved].clone()
                chunks = Chunks.of(inputs, block)
                for x, values in zip(results, gradients(chunks, state, _output_gradients(grad, inputs, block), dstate)):
                    scatter(x, values, block)
        return results

    def convolution_plan(self, taps: Taps, device: torch.device) -> ConvolutionPlan:
        return ConvolutionPlan.of(taps, device)

    def convolution(self, x: Tensor, weight: Tensor, plan: ConvolutionPlan, cp_group: Any) -> Tensor:
        return short_convolution(x, weight, plan, cp_group)

    def log_decay(self, a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
        wide = torch.promote_types(a.dtype, torch.float32)
        return -a_log.to(wide).exp() * torch.nn.functional.softplus(a.to(wide) + dt_bias.to(wide))

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return gated_norm(x, gate, weight, eps)

    def gated(self, x: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
        return gated(x, gate, weight, scale)


def _groups(inputs: Inputs, schedule: ChunkSchedule) -> tuple[Group, ...]:
    num_tokens = schedule.fragments.boundaries[-1]
    assert len(inputs.v) == num_tokens, f"{len(inputs.v)} tokens, fragments of {num_tokens}"
    return schedule.groups


def _group_states(states: Tensor | None, group: Group, inputs: Inputs) -> Tensor:
    """A copy of the states of the group's fragments, or zeros."""
    if states is None or group.linked is None:
        return inputs.zero_states(group.num_fragments)
    return states[group.linked]


def _output_gradients(grad: Tensor, inputs: Inputs, block: Block) -> Tensor:
    return without_padding(gathered(grad, block), block).to(inputs.state_dtype)
