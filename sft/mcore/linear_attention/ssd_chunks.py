"""Computes the recurrence of Mamba-2 on the chunks of a block, by matrix products (equations of arXiv:2405.21060).

For one chunk of c tokens and one head, with V = dt x, s_i = g_1 + ... + g_i, and D_ij = exp(s_i - s_j) for i >= j,
else 0:

    output  Y = exp(s) C S + ((C B^T) D) V        next state  S' = exp(s_c) S + B^T exp(s_c - s) V

Only the addition of states is computed step by step.  All products cover all chunks of the block at once.  The sums s
and their differences are float64, as in chunks.py.  C B^T is computed once per group.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sft.mcore.linear_attention.block_tensors import (
    add_product,
    gathered,
    per_key_head,
    running_sums,
    sums_to_end,
    without_padding,
)
from sft.mcore.linear_attention.head_decays import HeadDecays
from sft.mcore.linear_attention.schedule import Block
from sft.mcore.linear_attention.ssd import SsdInputs


@dataclass(frozen=True, eq=False)
class SsdChunks(HeadDecays):
    """The n chunks of a block; implements `chunked_kernel.BlockProducts`.

    All tensors except `sums` have the dtype of states.

    c, b   [n, groups, c, N]
    x      [n, heads, c, P]
    dt     [n, heads, c, 1], 0 for padding
    sums   [n, heads, c] float64, the sums s; g is 0 for padding
    """

    block: Block
    c: Tensor
    b: Tensor
    x: Tensor
    dt: Tensor
    sums: Tensor

    @staticmethod
    def of(inputs: SsdInputs, block: Block) -> "SsdChunks":
        dtype = inputs.state_dtype
        c, b, x = (gathered(x, block).to(dtype) for x in inputs[:3])
        g, dt = (without_padding(gathered(x[..., None], block), block) for x in inputs[3:])
        return SsdChunks(block, c, b, x, dt.to(dtype), running_sums(g[..., 0].double()))

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def ratio(self) -> int:
        return self.x.shape[1] // self.b.shape[1]

    @cached_property
    def of_heads(self) -> tuple[Tensor, Tensor]:
        """C and B, [n, heads, c, N]"""
        return self.c.repeat_interleave(self.ratio, dim=1), self.b.repeat_interleave(self.ratio, dim=1)

    @cached_property
    def values(self) -> Tensor:
        """V, [n, heads, c, P]"""
        return self.dt * self.x

    @cached_property
    def weights(self) -> Tensor:
        """(C B^T) D, [n, heads, c, c]"""
        products = (self.c @ self.b.mT)[:, :, None]
        return (self.decay.unflatten(1, (-1, self.ratio)) * products).flatten(1, 2)

    def scan(self, state: Tensor, values: Tensor) -> Tensor:
        """The state before each chunk, [n, heads, N, P].

        state: [fragments, heads, N, P], states before the block.  They are replaced in place by those after the block.
        values: V
        """
        states = self.of_heads[1].mT @ (self.to_end * values)
        self._carry(self.block.steps, state, states)
        return states

    def outputs(self, state: Tensor) -> Tensor:
        """Y, [n, heads, c, P].  state: as for `scan`"""
        states = self.scan(state, self.values)
        return add_product((self.of_heads[0] @ states).mul_(self.from_start), self.weights, self.values)

    def reverse_scan(self, grad: Tensor, dstate: Tensor) -> Tensor:
        """The gradients of the state after each chunk, [n, heads, N, P].

        grad: [n, heads, c, P], gradients of the outputs.  dstate: [fragments, heads, N, P], gradients of the states
        after the block, which are replaced in place by the gradients of the states before the block.
        """
        dstates = self.of_heads[0].mT @ (self.from_start * grad)
        self._carry(self.block.steps[::-1], dstate, dstates)
        return dstates

    def _carry(self, steps: tuple[slice, ...], carried: Tensor, terms: Tensor) -> None:
        """Run over steps: replace the terms of a step by `carried`, then set carried = exp(s_c) carried + terms.

        carried: [fragments, heads, N, P]; terms: [n, heads, N, P].  Both are changed in place.
        """
        ends = self.from_start[:, :, -1:]
        for step in steps:
            active = carried[: step.stop - step.start]
            after = torch.addcmul(terms[step], ends[step], active)
            terms[step] = active
            active.copy_(after)

    def gradients(self, state: Tensor, grad: Tensor, dstate: Tensor) -> SsdInputs:
        """The gradients of the inputs, [n, heads, c, ...], with arbitrary values for padding.

        s occurs only in exp(s), exp(s_c - s) and D, so ds is a sum of products that other gradients need, too.  dg of
        a token is the sum of ds from the token to the end of its chunk.
        """
        c, b = self.of_heads
        states, dstates = self.scan(state, self.values), self.reverse_scan(grad, dstate)
        dvalues = add_product((b @ dstates).mul_(self.to_end), self.weights.mT, grad)
        dc, db = (self.from_start * grad) @ states.mT, (self.to_end * self.values) @ dstates.mT
        from_b = (b * db).sum(-1)
        ds = (c * dc).sum(-1) - from_b
        ds[..., -1] += from_b.sum(-1) + self.from_start[:, :, -1, 0] * (states * dstates).sum((-2, -1))

        dweights = grad @ self.values.mT
        products = dweights * self.weights
        ds += products.sum(-1) - products.sum(-2)
        pairs = per_key_head(dweights.mul_(self.decay), self.ratio)
        return SsdInputs(
            c=per_key_head(dc, self.ratio) + pairs @ self.b,
            b=per_key_head(db, self.ratio) + pairs.mT @ self.c,
            x=self.dt * dvalues,
            g=sums_to_end(ds),
            dt=(dvalues * self.x).sum(-1),
        )
