"""Compiles FLA's kernels for the sizes of a run, before its first pass.

Triton compiles a kernel when it is first called, and measures which of its variants is the fastest.  The kernels of one
layer take about 200 compilations.  Triton keeps both kernels and measurements in TRITON_CACHE_DIR.  So one process of a
node calls every kernel first, and the other processes of the node then find the results on the disk.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sft.config import Config
from sft.layers.mixers.delta import HeadSizes
from sft.mcore.linear_attention.delta_rule import Inputs
from sft.mcore.linear_attention.fla_layer import call_convolution, call_gradients_of_convolution
from sft.mcore.linear_attention.recurrence import Fragments

if TYPE_CHECKING:
    from sft.mcore.linear_attention.fla_kernel import FlaKernel
    from sft.mcore.linear_attention.fla_recurrence import FlaRecurrence


def compile_kernels(kernel: "FlaKernel", config: Config, device: torch.device) -> None:
    """Call every kernel of a layer, forward and backward, on as many tokens as a rank has of a full pack."""
    linear, cp = config.model.linear_attention, config.parallel.cp
    sizes, tokens = HeadSizes.of(linear, config.parallel.tp, 2), max(2, config.data.seq_length // cp)
    edges = [0, tokens // 2, tokens]

    def random(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, device=device).bfloat16()

    for num_linked in {0, 2 if cp > 1 else 0}:
        keys, values = (sizes.key_heads, sizes.key_dim), (sizes.value_heads, sizes.value_dim)
        decays = (values[0], sizes.key_dim) if linear.has_channel_decay else (values[0],)
        leaves = (random(*decays), random(values[0])[0], random(*decays)[0].flatten())
        a, decay, bias = (x.requires_grad_() for x in leaves)
        g = kernel.log_decay(a, decay, bias, linear.decay_floor)
        inputs = Inputs(random(*keys), random(*keys), random(*values), g.detach(), random(values[0]).sigmoid())
        compile_recurrence(kernel, inputs, Fragments.of(edges, range(num_linked)), device)
        compile_convolution(kernel, random(sizes.channels), linear.conv_kernel, has_states=num_linked > 0)
        x, gate, weight = (x.requires_grad_() for x in (random(*values), random(*values), random(values[1])[0]))
        (g.sum() + kernel.gated_norm(x, gate, weight, config.model.norm_epsilon, linear.gate)[0].sum()).backward()


def compile_recurrence(kernel: "FlaRecurrence[Any]", inputs: Any, fragments: Fragments, device: torch.device) -> None:
    schedule = kernel.schedule(fragments, inputs.values.shape[1], device)
    prepared, states = kernel.prepared(inputs, schedule), None
    if len(fragments.linked):
        states = kernel.transitions(prepared, schedule)[1]
        kernel.state_gradients(inputs.values, prepared, schedule)
    out, saved = kernel.forward(prepared, schedule, states)
    kernel.backward(out, prepared, schedule, states, saved, states)


def compile_convolution(
    kernel: "FlaRecurrence[Any]", x: Tensor, num_taps: int, *, has_states: bool, has_bias: bool = False
) -> None:
    sequence = kernel.schedule(Fragments.of([0, len(x)]), 1, x.device).parts[0].sequences
    weight = x.new_ones(x.shape[1], num_taps)
    states = x.new_zeros(1, *weight.shape) if has_states else None
    bias = x.new_ones(x.shape[1]) if has_bias else None
    out = call_convolution(kernel.functions, x, weight, states, sequence, bias)
    call_gradients_of_convolution(kernel.functions, x, out, weight, states, sequence, bias)
