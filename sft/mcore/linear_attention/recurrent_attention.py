"""Makes a recurrence differentiable, also if the state of a fragment comes from another fragment or rank.

Long documents under context parallelism, and all trees, are cut into several fragments.  Each rank computes the affine
map of each of its linked fragments, S_out = A(S_in) + B.  The ranks compose the maps in document order, which gives the
initial state of every linked fragment.  Then each rank runs its fragments from these states.  Backward passes the
gradients of states in the opposite order.  A and B need no gradients: `Kernel.backward` gets the gradient of a
fragment's last state, and propagates it to the inputs.
"""

from typing import Any

import torch
from torch import Tensor

from sft.mcore.linear_attention.recurrence import FragmentSchedule, InputsT, Kernel
from sft.mcore.linear_attention.state_passing import HeadwisePassing


def recurrent_attention(
    inputs: InputsT, schedule: FragmentSchedule, kernel: Kernel[InputsT], passing: HeadwisePassing | None = None
) -> Tensor:
    """Outputs [t, heads, V] in the dtype of the values.

    schedule: a result of `kernel.schedule`; passing: passes states between ranks; None: no fragment is linked
    """
    is_linked = len(schedule.fragments.linked) > 0
    assert passing is not None or not is_linked, "linked fragments need an object that passes their states"
    out: Tensor = _RecurrentAttention.apply(*inputs, type(inputs), schedule, kernel, passing)
    return out


class _RecurrentAttention(torch.autograd.Function):
    """The recurrence as an autograd function.

    Saves the inputs, the rows of A and of initial states that backward reads (`ReadRows`), and the kernel's tensor.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, make, schedule, kernel, passing = arguments
        inputs = make(*(x.contiguous() for x in tensors))  # a view would keep the output of a projection in memory
        prepared = kernel.prepared(inputs, schedule)
        a = states = None
        if passing is not None:
            a, b = kernel.transitions(prepared, schedule)
            states = passing.initial_states(a, b)
        out, saved = kernel.forward(prepared, schedule, states)
        if passing is not None:
            a, states = passing.read.kept(a, states)
        ctx.save_for_backward(*inputs, a, states, saved)
        ctx.setting = make, schedule, kernel, passing
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, a, states, saved = ctx.saved_tensors
        make, schedule, kernel, passing = ctx.setting
        inputs, grad = make(*tensors), grads[0].contiguous()
        prepared, last_gradients = kernel.prepared(inputs, schedule), None
        if passing is not None:
            a, states = passing.read.restored(a, states)
            last_gradients = passing.final_gradients(a, kernel.state_gradients(grad, prepared, schedule))
        return *kernel.backward(grad, prepared, schedule, states, saved, last_gradients), None, None, None, None
