"""Calls that recomputation does not repeat: of attention's kernels, and of products whose output nobody reads.

What is recomputed runs twice: in forward without autograd, and again in backward.  A call of this module runs in the
first pass only:

    first pass   The call runs with autograd.  Its graph keeps what the operations save for backward, except for the
                 inputs of the call and the weights: the memory of inputs is freed
    second pass  The call returns an output.  Its backward lends the inputs of the second pass to the graph of the first
                 pass, and runs that graph

With train.recompute = attention_kept, the output of attention is kept, and the second pass returns it.  So a layer
keeps its input, the output of attention, and whatever else the kernel saves, such as its log-sum-exp.

Backward of a product reads its inputs, not its output.  The output of the last product of what is recomputed is read by
nobody in the second pass, if only sums follow it.  Then nothing is kept, and the second pass returns a tensor without
values.  `sft/layers/unread.py` says which products these are.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from sft.mcore.activations.saved_tensors import Restore, SavePolicy

_ANCHOR = torch.zeros((), requires_grad=True)  # autograd makes a graph only if an input requires a gradient


class KeptCalls:
    """The calls of one microbatch that ran in the first pass, and wait for the second.

    policy: saves kept tensors; keeps_attention: whether calls of attention are kept, too
    """

    def __init__(self, policy: SavePolicy, keeps_attention: bool) -> None:
        self._policy, self.keeps_attention = policy, keeps_attention
        self._calls: dict[int, deque[_Call]] = defaultdict(deque)  # by the caller's id

    def __call__(
        self, caller: Any, function: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor] = ()
    ) -> Tensor:
        """`function(*inputs, *weights)`; in the second pass, the result that the first pass kept.

        caller: an object that calls equally often, and in the same order, in each pass
        inputs: floating-point tensors
        """
        return self._output(caller, lambda *args: (function(*args), None), inputs, weights, is_read=True)[0]

    def unread(
        self, caller: Any, function: Callable[..., Any], inputs: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[Tensor, Any]:
        """`function(*inputs, *weights)`: an output, and anything else; in the second pass, the output has no values."""
        return self._output(caller, function, inputs, weights, is_read=False)

    def _output(
        self, caller: Any, function: Callable[..., Any], inputs: Sequence[Tensor], weights: Any, *, is_read: bool
    ) -> tuple[Tensor, Any]:
        waiting = self._calls[id(caller)]
        if not torch.is_grad_enabled():
            call, out = _first_pass(self._policy.save, function, inputs, weights, is_read)
            waiting.append(call)
            return out, call.other
        if not waiting:  # the caller is not recomputed
            result: tuple[Tensor, Any] = function(*inputs, *weights)
            return result
        call = waiting.popleft()
        return _SecondPass.apply(call, len(inputs), *inputs, *weights), call.other


# Core's layers call the modules between a layer and its products, and pass on none of our arguments.
_current: ContextVar[KeptCalls | None] = ContextVar("products", default=None)


@contextmanager
def leaving_out_products(calls: KeptCalls | None) -> Iterator[None]:
    """A context in which `unread_product` leaves out products that are repeated; None: it leaves out none."""
    token = _current.set(calls)
    try:
        yield
    finally:
        _current.reset(token)


def current_products() -> KeptCalls | None:
    return _current.get()


def unread_product(
    caller: Any, function: Callable[..., Any], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, Any]:
    """`KeptCalls.unread` of the context; without a context, `function(*inputs, *weights)`."""
    calls = _current.get()
    if calls is None:
        result: tuple[Tensor, Any] = function(*inputs, *weights)
        return result
    return calls.unread(caller, function, inputs, weights)


@dataclass
class _Call:
    """inputs: edges of the graph at which the gradients of the inputs come out; output: restores the output"""

    inputs: list[GradientEdge]
    output_edge: GradientEdge
    output: Restore
    other: Any
    layouts: list[tuple[Any, ...]]
    lent: list[Tensor]  # inputs and weights of the second pass, while backward runs; the graph refers to this list

    def gradients(
        self, grad: Tensor, inputs: Sequence[Tensor], weights: Sequence[Tensor], wanted: Sequence[Any]
    ) -> tuple[Tensor, ...]:
        assert [_layout(x) for x in inputs] == self.layouts, "the second pass has other inputs than the first"
        self.lent[:] = [*inputs, *weights]
        results: tuple[Tensor, ...] = torch.autograd.grad([self.output_edge], wanted, [grad])
        self.lent.clear()
        return results


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _first_pass(
    save: Callable[[Tensor], Restore],
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    is_read: bool,
) -> tuple[_Call, Tensor]:
    numbers = {
        (x.untyped_storage().data_ptr(), x.dtype): number for number, x in enumerate([*inputs, *weights]) if x.numel()
    }
    lent: list[Tensor] = []

    def pack(tensor: Tensor) -> Restore:
        number = numbers.get((tensor.untyped_storage().data_ptr(), tensor.dtype))
        if number is None:
            return save(tensor)
        view = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return lambda: lent[number].as_strided(*view)

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda restore: restore()):
        sources, edges = sources_of(*inputs)
        out, other = function(*sources, *weights)
    output = save(out.detach()) if is_read else _without_values(out)
    return _Call(edges, get_gradient_edge(out), output, other, [_layout(x) for x in inputs], lent), out.detach()


def _without_values(out: Tensor) -> Restore:
    """Makes a tensor like `out`, in the memory of one element."""
    shape, dtype, device = out.shape, out.dtype, out.device
    return lambda: torch.empty((), dtype=dtype, device=device).expand(shape)


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
    """The second pass of a call: its output is that of the first pass, and its backward runs the first pass's graph.

    num_inputs: how many of `tensors` are inputs; the others are weights
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, num_inputs: int, *tensors: Tensor) -> Tensor:
        ctx.call, ctx.weights = call, tensors[num_inputs:]
        ctx.save_for_backward(*tensors[:num_inputs])
        return call.output().detach()  # autograd marks the result itself, which `call` refers to

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sources = [*ctx.call.inputs, *ctx.weights]
        needed = [number for number, needs in enumerate(ctx.needs_input_grad[2:]) if needs]
        gradients = ctx.call.gradients(grads[0], ctx.saved_tensors, ctx.weights, [sources[number] for number in needed])
        result: list[Tensor | None] = [None] * len(sources)
        for number, gradient in zip(needed, gradients, strict=True):
            result[number] = gradient
        return None, None, *result
