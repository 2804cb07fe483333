"""A kernel of the gated delta rule in plain torch, on any device and in any precision."""

import torch
from torch import Tensor

from sft.mcore.linear_attention.delta_rule import NORM_EPS, Fragments, Inputs

CHUNK = 64  # tokens whose updates of the state become matrix products


class TorchKernel:
    """As `delta_rule.Kernel`."""

    name = "torch"

    def transitions(self, inputs: Inputs, fragments: Fragments) -> tuple[Tensor, Tensor]:
        heads, width = inputs.v.shape[1:]
        size = inputs.k.shape[-1]
        dtype, device = inputs.state_dtype, inputs.v.device
        zeros = inputs.v.new_zeros(len(inputs.v), heads, size)
        extended = inputs._replace(q=inputs.k, v=torch.cat([zeros, inputs.v], dim=-1))
        identity = torch.eye(size, dtype=dtype, device=device).expand(heads, size, size)
        first = torch.cat([identity, torch.zeros(heads, size, width, dtype=dtype, device=device)], dim=-1)
        starts = first.expand(len(fragments.linked), -1, -1, -1)
        maps = _run(extended, fragments, starts)[1]
        return maps[..., :size].contiguous(), maps[..., size:].contiguous()

    def forward(self, inputs: Inputs, fragments: Fragments, states: Tensor | None) -> tuple[Tensor, Tensor]:
        return _run(inputs, fragments, states)[0], inputs.v.new_empty(0)

    def state_gradients(self, grad: Tensor, inputs: Inputs, fragments: Fragments) -> Tensor:
        shape = (len(fragments.linked), inputs.v.shape[1], inputs.k.shape[-1], inputs.v.shape[-1])
        states = torch.zeros(shape, dtype=inputs.state_dtype, device=grad.device)
        with torch.enable_grad():
            out, _ = _run(inputs, fragments, states.requires_grad_())
            (gradients,) = torch.autograd.grad(out, states, grad, materialize_grads=True)
        return gradients

    def backward(
        self,
        grad: Tensor,
        inputs: Inputs,
        fragments: Fragments,
        states: Tensor | None,
        saved: Tensor,
        last_gradients: Tensor | None,
    ) -> Inputs:
        leaves = Inputs(*(x.detach().requires_grad_() for x in inputs))
        with torch.enable_grad():
            out, last = _run(leaves, fragments, states)
            wanted = [(out, grad)] if last_gradients is None else [(out, grad), (last, last_gradients)]
            results, gradients = zip(*[(x, dx) for x, dx in wanted if x.requires_grad])
            return Inputs(*torch.autograd.grad(results, leaves, gradients, materialize_grads=True))


def _run(inputs: Inputs, fragments: Fragments, states: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs of all fragments and the last states of the linked ones."""
    heads, width = inputs.v.shape[1:]
    dtype = inputs.state_dtype
    zero = torch.zeros(heads, inputs.k.shape[-1], width, dtype=dtype, device=inputs.v.device)
    first = {} if states is None else dict(zip(fragments.linked.tolist(), states))
    parts, last = [], {}
    for i, tokens in enumerate(zip(*(x.split(fragments.lengths.tolist()) for x in inputs))):
        state = first.get(i, zero)
        for chunk in zip(*(x.split(CHUNK) for x in tokens)):
            if len(chunk[0]):
                out, state = _chunk(Inputs(*(x.to(dtype).transpose(0, 1) for x in chunk)), state)
                parts.append(out.transpose(0, 1))
        last[i] = state
    out = torch.cat(parts).to(inputs.v.dtype) if parts else inputs.v + 0
    return out, torch.stack([last[i] for i in fragments.linked]) if len(fragments.linked) else zero[None][:0]


def _chunk(x: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [value heads, c, V] and next state of one chunk; x: [heads, c, ...]"""
    ratio = x.v.shape[0] // x.k.shape[0]
    q, k = (_normalised(x).repeat_interleave(ratio, dim=0) for x in (x.q, x.k))
    q = q * k.shape[-1] ** -0.5
    sums = x.g.double().cumsum(-1)
    decay = (sums[:, :, None] - sums[:, None, :]).to(state.dtype)
    decay = decay.masked_fill(torch.ones_like(decay, dtype=torch.bool).triu(1), -torch.inf).exp()
    from_start, to_end = sums.to(state.dtype).exp()[..., None], (sums[:, -1:] - sums).to(state.dtype).exp()[..., None]
    beta = x.beta[..., None]
    system = beta * (k @ k.mT) * decay
    updates = beta * (x.v - from_start * (k @ state))
    values = torch.linalg.solve_triangular(system, updates, upper=False, unitriangular=True)
    out = from_start * (q @ state) + ((q @ k.mT) * decay) @ values
    return out, from_start[:, -1:] * state + k.mT @ (to_end * values)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
