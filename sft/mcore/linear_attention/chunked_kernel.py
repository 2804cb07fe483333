"""Computes a recurrence chunk by chunk, in plain torch, on any device and in any precision.

schedule.py decides which chunks are computed together.  A recurrence gives the products of the chunks of one block
(`BlockProducts`).  Forward saves only the states at the start of blocks, without the first block of a group.  Backward
recomputes everything else, block by block.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol

import torch
from torch import Tensor

from sft.mcore.linear_attention.block_tensors import gathered, scatter, without_padding
from sft.mcore.linear_attention.recurrence import Fragments, GradientsT, InputsT, Maps
from sft.mcore.linear_attention.schedule import Block, ChunkSchedule, Group
from sft.mcore.linear_attention.short_convolution import ConvolutionPlan, short_convolution
from sft.parallel.taps import Taps


class BlockProducts(Protocol[GradientsT]):
    """The products of the n chunks of a block, of c tokens each.

    state   [fragments, heads, K, V], states before the block; replaced in place by the states after the block
    grad    [n, heads, c, V], gradients of the outputs, 0 for padding
    dstate  [fragments, heads, K, V], gradients of the states after the block; replaced in place by those of the states
            before the block
    """

    def outputs(self, state: Tensor) -> Tensor:
        """The outputs of the recurrence, [n, heads, c, V]."""

    def reverse_scan(self, grad: Tensor, dstate: Tensor) -> object:
        """Compute only the gradients of states: update `dstate`."""

    def gradients(self, state: Tensor, grad: Tensor, dstate: Tensor) -> GradientsT:
        """The gradients of the inputs, [n, heads, c, ...], with arbitrary values for padding."""


@dataclass(frozen=True)
class ChunkedKernel(ABC, Generic[InputsT]):
    """Implements `recurrence.Kernel` in torch.  reason: why this run uses this kernel, for the log"""

    maps: ClassVar[Maps]
    reason: str = "plain torch"

    def __str__(self) -> str:
        return f"torch ({self.reason})"

    @abstractmethod
    def products(self, inputs: InputsT, block: Block) -> BlockProducts[InputsT]: ...

    @abstractmethod
    def whole_maps(self, inputs: InputsT, count: int) -> tuple[Tensor, int, Callable[[Block, Tensor], object]]:
        """The start of the computation of maps [A, B].

        Returns the maps of `count` fragments without tokens, [count, heads, K, columns of A + V]; the number of columns
        of A; and a function (block, maps of its fragments) that updates these maps in place by the tokens of the block.
        """

    def schedule(self, fragments: Fragments, heads: int, device: torch.device) -> ChunkSchedule:
        return ChunkSchedule.of(fragments, heads, device)

    def prepared(self, inputs: InputsT, schedule: ChunkSchedule) -> InputsT:
        return inputs

    def transitions(self, inputs: InputsT, schedule: ChunkSchedule) -> tuple[Tensor, Tensor]:
        maps, size, advance = self.whole_maps(inputs, len(schedule.fragments.linked))
        for group in _groups(inputs, schedule):
            if group.linked is not None:
                state = maps[group.linked]
                for block in group.blocks:
                    advance(block, state)
                maps[group.linked] = state
        return maps[..., :size].contiguous(), maps[..., size:].contiguous()

    def forward(self, inputs: InputsT, schedule: ChunkSchedule, states: Tensor | None) -> tuple[Tensor, Tensor]:
        out, saved = torch.empty_like(inputs.values), inputs.zero_states(schedule.num_saved)
        for group in _groups(inputs, schedule):
            state = _group_states(states, group, inputs)
            for block in group.blocks:
                if block.saved is not None:
                    saved[block.saved] = state[: block.steps[0].stop]
                scatter(out, self.products(inputs, block).outputs(state), block)
        return out, saved

    def state_gradients(self, grad: Tensor, inputs: InputsT, schedule: ChunkSchedule) -> Tensor:
        dstates = inputs.zero_states(len(schedule.fragments.linked))
        for group in _groups(inputs, schedule):
            if group.linked is not None:
                dstate = dstates[group.linked]
                for block in reversed(group.blocks):
                    self.products(inputs, block).reverse_scan(_output_gradients(grad, inputs, block), dstate)
                dstates[group.linked] = dstate
        return dstates

    def backward(
        self,
        grad: Tensor,
        inputs: InputsT,
        schedule: ChunkSchedule,
        states: Tensor | None,
        saved: Tensor,
        last_gradients: Tensor | None,
    ) -> InputsT:
        make: Callable[..., InputsT] = type(inputs)
        results = make(*map(torch.empty_like, inputs))
        for group in _groups(inputs, schedule):
            dstate = _group_states(last_gradients, group, inputs)
            for block in reversed(group.blocks):
                is_first = block.saved is None
                state = _group_states(states, group, inputs) if is_first else saved[block.saved].clone()
                products, douts = self.products(inputs, block), _output_gradients(grad, inputs, block)
                for x, values in zip(results, products.gradients(state, douts, dstate)):
                    scatter(x, values, block)
        return results

    def convolution_plan(self, taps: Taps, device: torch.device) -> ConvolutionPlan:
        return ConvolutionPlan.of(taps, device)

    def convolution(
        self, x: Tensor, weight: Tensor, plan: ConvolutionPlan, cp_group: Any, bias: Tensor | None = None
    ) -> Tensor:
        return short_convolution(x, weight, plan, cp_group, bias)


def _groups(inputs: Any, schedule: ChunkSchedule) -> tuple[Group, ...]:
    num_tokens = schedule.fragments.boundaries[-1]
    assert len(inputs.values) == num_tokens, f"{len(inputs.values)} tokens, fragments of {num_tokens}"
    return schedule.groups


def _group_states(states: Tensor | None, group: Group, inputs: Any) -> Tensor:
    """A copy of the states of the group's fragments, or zeros."""
    if states is None or group.linked is None:
        zeros: Tensor = inputs.zero_states(group.num_fragments)
        return zeros
    return states[group.linked]


def _output_gradients(grad: Tensor, inputs: Any, block: Block) -> Tensor:
    return without_padding(gathered(grad, block), block).to(inputs.state_dtype)
