"""Keeps the results of attention while a layer is recomputed, so that each kernel's forward pass runs once.

With train.recompute = attention_kept, core computes every layer twice: in forward without autograd, and again in
backward.  A call of attention runs in the first pass only:

    first pass   The call runs with autograd.  Its graph keeps what the kernel saves for backward, except for the inputs
                 of the call: their memory is freed.  The output is kept, too
    second pass  The call returns the kept output.  Its backward lends the inputs of the second pass to the graph of the
                 first pass, and runs that graph

So a layer keeps its input, the output of attention, and whatever else the kernel saves, such as its log-sum-exp.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from sft.mcore.activations.saved_tensors import Restore, SavePolicy

_ANCHOR = torch.zeros((), requires_grad=True)  # autograd makes a graph only if an input requires a gradient


class KeptCalls:
    """The calls of one microbatch that ran in the first pass, and wait for the second.  policy: saves kept tensors"""

    def __init__(self, policy: SavePolicy) -> None:
        self._policy = policy
        self._calls: dict[int, _Call] = {}  # by the caller's id

    def __call__(
        self, caller: Any, function: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor] = ()
    ) -> Tensor:
        """`function(*inputs, *weights)`; in the second pass, the result that the first pass kept.

        caller: an object that calls once in each pass; inputs: floating-point tensors
        """
        if not torch.is_grad_enabled():
            self._calls[id(caller)], out = _first_pass(self._policy.save, function, inputs, weights)
            return out
        call = self._calls.pop(id(caller), None)
        if call is None:  # core does not recompute the caller's layer
            return function(*inputs, *weights)
        out = _SecondPass.apply(call, len(inputs), *inputs, *weights)
        return out


@dataclass
class _Call:
    """inputs: edges of the graph at which the gradients of the inputs come out; output: restores the output"""

    inputs: list[GradientEdge]
    output_edge: GradientEdge
    output: Restore
    layouts: list[tuple[Any, ...]]
    lent: list[Tensor]  # the inputs of the second pass, while backward runs; the graph refers to this list

    def gradients(self, grad: Tensor, inputs: Sequence[Tensor], wanted: Sequence[Any]) -> tuple[Tensor, ...]:
        assert [_layout(x) for x in inputs] == self.layouts, "the second pass has other inputs than the first"
        self.lent[:] = inputs
        results: tuple[Tensor, ...] = torch.autograd.grad([self.output_edge], wanted, [grad])
        self.lent.clear()
        return results


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _first_pass(
    save: Callable[[Tensor], Restore], function: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Any
) -> tuple[_Call, Tensor]:
    numbers = {(x.untyped_storage().data_ptr(), x.dtype): number for number, x in enumerate(inputs) if x.numel()}
    lent: list[Tensor] = []

    def pack(tensor: Tensor) -> Restore:
        number = numbers.get((tensor.untyped_storage().data_ptr(), tensor.dtype))
        if number is None or not tensor.numel():
            return save(tensor)
        view = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return lambda: lent[number].as_strided(*view)

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda restore: restore()):
        sources, edges = sources_of(*inputs)
        out = function(*sources, *weights)
    return _Call(edges, get_gradient_edge(out), save(out.detach()), [_layout(x) for x in inputs], lent), out.detach()


def sources_of(*inputs: Tensor) -> tuple[tuple[Tensor, ...], list[GradientEdge]]:
    """The inputs of a new graph, and the edges at which their gradients come out.  The graph keeps no input's memory.

    Call this function with autograd enabled.
    """
    sources: tuple[Tensor, ...] = _Source.apply(_ANCHOR, *inputs)
    return sources, [get_gradient_edge(source) for source in sources]


class _Source(torch.autograd.Function):
    """The inputs of a graph as results of an operation.  A graph would keep the memory of leaves."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in inputs)


class _SecondPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, num_inputs: int, *tensors: Tensor) -> Tensor:
        ctx.call, ctx.weights = call, tensors[num_inputs:]
        ctx.save_for_backward(*tensors[:num_inputs])
        return call.output().detach()  # autograd marks the result itself, which `call` refers to

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sources = [*ctx.call.inputs, *ctx.weights]
        needed = [number for number, needs in enumerate(ctx.needs_input_grad[2:]) if needs]
        gradients = ctx.call.gradients(grads[0], ctx.saved_tensors, [sources[number] for number in needed])
        result: list[Tensor | None] = [None] * len(sources)
        for number, gradient in zip(needed, gradients, strict=True):
            result[number] = gradient
        return None, None, *result
