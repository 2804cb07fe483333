"""Computes the gated delta rule on the chunks of a block, by matrix products (equations of arXiv:2412.06464).

For one chunk of c tokens and one value head, with s_i = g_1 + ... + g_i, D_ij = exp(s_i - s_j) for i >= j, else 0:

    values  N = T beta (V - exp(s) K S)          T = (1 + strictly lower part of beta (K K^T) D)^-1
    output  O = exp(s) Q S + ((Q K^T) D) N       next state  S' = exp(s_c) S + K^T exp(s_c - s) N

Only `scan` and `reverse_scan` compute one step after another; all other products cover all chunks of the block at once.
The sums s and their differences are float64: with strong decay they reach thousands, and fp32 would lose the decay
between neighbouring tokens.  K K^T and Q K^T are computed once per key head.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Self

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
from sft.mcore.linear_attention.delta_rule import NORM_EPS, Inputs
from sft.mcore.linear_attention.head_decays import HeadDecays
from sft.mcore.linear_attention.schedule import CHUNK, Block


@dataclass(frozen=True, eq=False)
class RuleChunks(ABC):
    """The inputs of the delta rule in the n chunks of a block.

    All tensors except `sums` have the dtype of states.  `heads` are value heads.

    q, k              [n, key heads, c, K], divided by their norms; q is also divided by sqrt(K)
    q_scale, k_scale  [n, key heads, c, 1], the factors that were applied to q and k
    v                 [n, heads, c, V]
    beta              [n, heads, c, 1], 0 for padding
    sums              float64, the sums s; g is 0 for padding
    """

    block: Block
    q: Tensor
    k: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v: Tensor
    beta: Tensor
    sums: Tensor

    @classmethod
    def of(cls, inputs: Inputs, block: Block) -> Self:
        dtype = inputs.state_dtype
        q, k, v = (gathered(x, block).to(dtype) for x in inputs[:3])
        beta = without_padding(gathered(inputs.beta[..., None], block), block)
        q_scale, k_scale = inverse_norm(q) * q.shape[-1] ** -0.5, inverse_norm(k)
        sums = cls.summed(inputs.g, block)
        return cls(block, q * q_scale, k * k_scale, q_scale, k_scale, v, beta.to(dtype), sums)

    @staticmethod
    @abstractmethod
    def summed(g: Tensor, block: Block) -> Tensor:
        """`sums` for the logarithms of decays."""

    @property
    def dtype(self) -> torch.dtype:
        return self.v.dtype

    def before_norms(self, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of q and k as they were before they were divided by their norms."""
        dq = self.q_scale * (dq - self.q * (self.q * dq).sum(-1, keepdim=True) * self.q.shape[-1])
        return dq, self.k_scale * (dk - self.k * (self.k * dk).sum(-1, keepdim=True))


class Chunks(RuleChunks, HeadDecays):
    """The n chunks of a block; implements `chunked_kernel.BlockProducts`.  sums: [n, heads, c]"""

    @staticmethod
    def summed(g: Tensor, block: Block) -> Tensor:
        return running_sums(without_padding(gathered(g[..., None], block), block)[..., 0].double())

    @property
    def ratio(self) -> int:
        return self.v.shape[1] // self.k.shape[1]

    @cached_property
    def queries(self) -> Tensor:
        """The queries, repeated for each value head of their key head: [n, heads, c, K]"""
        return self.q.repeat_interleave(self.ratio, dim=1)

    @cached_property
    def keys(self) -> Tensor:
        """The keys, repeated for each value head of their key head: [n, heads, c, K]"""
        return self.k.repeat_interleave(self.ratio, dim=1)

    @cached_property
    def key_products(self) -> Tensor:
        """K K^T below its diagonal, else 0: [n, key heads, 1, c, c]"""
        return (self.k @ self.k.mT).tril(-1)[:, :, None]

    @cached_property
    def query_products(self) -> Tensor:
        """Q K^T, [n, key heads, 1, c, c]"""
        return (self.q @ self.k.mT)[:, :, None]

    @cached_property
    def solution(self) -> Tensor:
        """T, [n, heads, c, c]"""
        system = self.times(self.decay, self.key_products).mul_(self.beta)
        identity = torch.eye(CHUNK, dtype=system.dtype, device=system.device).expand_as(system)
        return torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)

    @cached_property
    def weights(self) -> Tensor:
        """(Q K^T) D, [n, heads, c, c]"""
        return self.times(self.decay, self.query_products)

    def times(self, x: Tensor, factors: Tensor) -> Tensor:
        """x [n, heads, c, c] times a tensor [n, key heads, 1, c, c]."""
        return (x.unflatten(1, (-1, self.ratio)) * factors).flatten(1, 2)

    def scan(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run the chunks of the block, one step after the other.

        state: [fragments, heads, K, V], states before the block.  They are replaced in place by those after the block.

        Returns the state before each chunk, [n, heads, K, V], and V - exp(s) K S and N, both [n, heads, c, V].
        """
        states = state.new_empty(len(self.v), *state.shape[1:])
        errors, values = torch.empty_like(self.v), torch.empty_like(self.v)
        ends = self.from_start[:, :, -1:]
        for step in self.block.steps:
            active = state[: step.stop - step.start]
            states[step] = active
            predicted = self.keys[step] @ active
            torch.addcmul(self.v[step], self.from_start[step], predicted, value=-1, out=errors[step])
            torch.matmul(self.solution[step], self.beta[step] * errors[step], out=values[step])
            add_product(active.mul_(ends[step]), self.keys[step].mT, self.to_end[step] * values[step])
        return states, errors, values

    def outputs(self, state: Tensor) -> Tensor:
        """O, [n, heads, c, V].  state: as for `scan`"""
        states, _, values = self.scan(state)
        return add_product((self.queries @ states).mul_(self.from_start), self.weights, values)

    def gradients(self, state: Tensor, grad: Tensor, dstate: Tensor) -> Inputs:
        return _gradients(self, state, grad, dstate)

    def reverse_scan(self, grad: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor]:
        """Run the chunks of the block backward.

        grad: [n, heads, c, V], gradients of the outputs.  dstate: [fragments, heads, K, V], gradients of the states
        after the block, which are replaced in place by the gradients of the states before the block.  Returns the
        gradients of the state after each chunk [n, heads, K, V], and of beta (V - exp(s) K S) [n, heads, c, V].
        """
        dstates = dstate.new_empty(len(self.v), *dstate.shape[1:])
        dvalues = self.weights.mT @ grad
        from_outputs = self.queries.mT @ (self.from_start * grad)
        dupdates = torch.empty_like(self.v)
        ends, factor = self.from_start[:, :, -1:], -self.beta * self.from_start
        for step in reversed(self.block.steps):
            active = dstate[: step.stop - step.start]
            dstates[step] = active
            dvalue = torch.addcmul(dvalues[step], self.to_end[step], self.keys[step] @ active)
            torch.matmul(self.solution[step].mT, dvalue, out=dupdates[step])
            active.mul_(ends[step]).add_(from_outputs[step])
            add_product(active, self.keys[step].mT, factor[step] * dupdates[step])
        return dstates, dupdates


def _gradients(chunks: Chunks, state: Tensor, grad: Tensor, dstate: Tensor) -> Inputs:
    """Implements `BlockProducts.gradients`.

    dY means the gradient of Y.  With X = V - exp(s) K S and U = d(beta X):

        dV = beta U                     d(K S) = -exp(s) dV        d(Q S) = exp(s) dO
        d((Q K^T) D) = dO N^T           d(beta (K K^T) D) = -U N^T below the diagonal

    s occurs only in exp(s), exp(s_c - s) and D, so ds is a sum of products that other gradients need, too.  dg of a
    token is the sum of ds from the token to the end of its chunk.
    """
    states, errors, values = chunks.scan(state)
    dstates, dupdates = chunks.reverse_scan(grad, dstate)
    dv = chunks.beta * dupdates
    # d(Q S) S^T, d(K S) S^T and the gradient of K through the next state
    dqueries = (chunks.from_start * grad) @ states.mT
    dkeys = (-chunks.from_start * dv) @ states.mT
    dkeys_next = (chunks.to_end * values) @ dstates.mT

    from_key = (chunks.keys * dkeys_next).sum(-1)
    ds = (chunks.queries * dqueries).sum(-1) + (chunks.keys * dkeys).sum(-1) - from_key
    ds[..., -1] += from_key.sum(-1) + chunks.from_start[:, :, -1, 0] * (states * dstates).sum((-2, -1))

    # The gradients of Q K^T and K K^T of each value head: (gradients of the products with D) times D.
    dweights = (grad @ values.mT).mul_(chunks.decay)
    dsystem = (dupdates @ values.mT).mul_(chunks.decay).tril_(-1).neg_()
    products = chunks.times(dsystem, chunks.key_products)
    dbeta = (dupdates * errors).sum(-1) + products.sum(-1)
    products = products.mul_(chunks.beta).add_(chunks.times(dweights, chunks.query_products))
    ds += products.sum(-1) - products.sum(-2)

    dweights = per_key_head(dweights, chunks.ratio)
    dpairs = per_key_head(dsystem.mul_(chunks.beta), chunks.ratio)
    dq = per_key_head(dqueries, chunks.ratio) + dweights @ chunks.k
    dk = per_key_head(dkeys.add_(dkeys_next), chunks.ratio) + dweights.mT @ chunks.q + (dpairs + dpairs.mT) @ chunks.k
    return Inputs(*chunks.before_norms(dq, dk), dv, sums_to_end(ds), dbeta)


def inverse_norm(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
