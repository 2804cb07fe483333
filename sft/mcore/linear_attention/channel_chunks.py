"""Computes the delta rule with a decay for each channel of the keys, on the chunks of a block.

Source: Kimi Linear, arXiv:2510.26692.  The equations are those of chunks.py, with decays of channels instead of decays
of heads.  Decays of channels multiply keys and queries instead of rows of values:

    values  N = T beta (V - (exp(s) K) S)        T = (1 + strictly lower part of beta P(K))^-1
    output  O = (exp(s) Q) S + P(Q) N            next state  S' = exp(s_c) S + (exp(s_c - s) K)^T N
    P(X)_ij = sum over channels of X_i K_j exp(s_i - s_j) for i >= j, else 0

Decays differ between channels, so P is not a matrix product that is multiplied by decays.  P is the product of
exp(s_i) X_i and exp(-s_j) K_j, but exp(-s_j) may overflow.  A chunk is therefore cut into parts of PART tokens
(`Decays`).  Between two parts, exp(s_i - s_j) is the product of exp(s_i - r) and exp(r - s_j), where r is s at the
start of the later part, so neither factor exceeds 1.  Within a part, all pairs of tokens with the same distance are
computed at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sft.mcore.linear_attention.block_tensors import add_product, gathered, running_sums, sums_to_end, without_padding
from sft.mcore.linear_attention.chunks import RuleChunks
from sft.mcore.linear_attention.delta_rule import Inputs
from sft.mcore.linear_attention.schedule import CHUNK, Block

PART = 16  # tokens.  Larger parts take more elementwise operations.  Smaller parts take more, and smaller, products


@dataclass(frozen=True, eq=False)
class Decays:
    """Sums over channels for pairs of tokens of a chunk, with the decay from the earlier token to the later token.

    sums   [n, heads, c, K] float64, the sums s
    dtype  dtype of the results
    """

    sums: Tensor
    dtype: torch.dtype

    def pairs(self, x: Tensor, y: Tensor) -> Tensor:
        """For i >= j, the sum over channels of x_i y_j exp(s_i - s_j), else 0.

        x, y: [n, heads, c, K] -> [n, heads, c, c]
        """
        out = x.new_zeros(*x.shape[:3], CHUNK)
        for rows, earlier, later_decay, earlier_decay in self._between:
            later = x[:, :, rows] * later_decay
            torch.matmul(later, (y[:, :, earlier] * earlier_decay).mT, out=out[:, :, rows, earlier])
        by_part = _diagonal(out)
        x, y = _by_part(x), _by_part(y)
        for distance, decay in self._within:
            sums = (x[..., distance:, :] * y[..., : PART - distance, :] * decay).sum(-1)
            by_part.diagonal(-distance, -2, -1).copy_(sums)
        return out

    def pair_gradients(self, grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x and y in `pairs`.  grad: [n, heads, c, c]; its values for i < j are not read."""
        dx, dy = torch.zeros_like(x), torch.zeros_like(y)
        for rows, earlier, later_decay, earlier_decay in self._between:
            of_pairs = grad[:, :, rows, earlier]
            dx[:, :, rows] += later_decay * (of_pairs @ (y[:, :, earlier] * earlier_decay))
            dy[:, :, earlier] += earlier_decay * (of_pairs.mT @ (x[:, :, rows] * later_decay))
        by_part, dx_parts, dy_parts, x, y = _diagonal(grad), _by_part(dx), _by_part(dy), _by_part(x), _by_part(y)
        for distance, decay in self._within:
            decayed = by_part.diagonal(-distance, -2, -1)[..., None] * decay
            dx_parts[..., distance:, :] += decayed * y[..., : PART - distance, :]
            dy_parts[..., : PART - distance, :] += decayed * x[..., distance:, :]
        return dx, dy

    @property
    def _between(self) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Yield for each part but the first: its tokens, all tokens before it, exp(s_i - r) and exp(r - s_j)."""
        for start in range(PART, CHUNK, PART):
            rows, earlier = slice(start, start + PART), slice(0, start)
            reference = self.sums[:, :, start - 1 : start]
            later_decay = (self.sums[:, :, rows] - reference).to(self.dtype).exp_()
            yield rows, earlier, later_decay, (reference - self.sums[:, :, earlier]).to(self.dtype).exp_()

    @property
    def _within(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each distance, with the decays between the tokens of a part that have this distance."""
        sums = _by_part(self.sums)
        for distance in range(PART):
            yield distance, (sums[..., distance:, :] - sums[..., : PART - distance, :]).to(self.dtype).exp_()


class ChannelChunks(RuleChunks):
    """The n chunks of a block, which implement `chunked_kernel.BlockProducts`.

    There are as many key heads as value heads.  sums: [n, heads, c, K]
    """

    @staticmethod
    def summed(g: Tensor, block: Block) -> Tensor:
        return running_sums(without_padding(gathered(g, block), block).double().mT).mT

    @cached_property
    def from_start(self) -> Tensor:
        """exp(s), decay from the start of the chunk to each token: [n, heads, c, K]"""
        return self.sums.to(self.dtype).exp()

    @cached_property
    def to_end(self) -> Tensor:
        """exp(s_c - s): [n, heads, c, K]"""
        return (self.sums[:, :, -1:] - self.sums).to(self.dtype).exp()

    @cached_property
    def ends(self) -> Tensor:
        """exp(s_c), decay of the state over the chunk: [n, heads, K, 1]"""
        return self.from_start[:, :, -1:].mT

    @cached_property
    def decays(self) -> Decays:
        return Decays(self.sums, self.dtype)

    @cached_property
    def decayed_keys(self) -> Tensor:
        """exp(s) K, [n, heads, c, K]"""
        return self.from_start * self.k

    @cached_property
    def key_products(self) -> Tensor:
        """P(K) below its diagonal, else 0: [n, heads, c, c]"""
        return self.decays.pairs(self.k, self.k).tril_(-1)

    @cached_property
    def weights(self) -> Tensor:
        """P(Q), [n, heads, c, c]"""
        return self.decays.pairs(self.q, self.k)

    @cached_property
    def solution(self) -> Tensor:
        """T, [n, heads, c, c]"""
        identity = torch.eye(CHUNK, dtype=self.dtype, device=self.v.device).expand_as(self.key_products)
        system = self.key_products * self.beta
        return torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)

    def scan(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Like `Chunks.scan`: returns the states before each chunk, V - (exp(s) K) S, and N."""
        states = state.new_empty(len(self.v), *state.shape[1:])
        errors, values = torch.empty_like(self.v), torch.empty_like(self.v)
        following = self.to_end * self.k
        for step in self.block.steps:
            active = state[: step.stop - step.start]
            states[step] = active
            torch.sub(self.v[step], self.decayed_keys[step] @ active, out=errors[step])
            torch.matmul(self.solution[step], self.beta[step] * errors[step], out=values[step])
            add_product(active.mul_(self.ends[step]), following[step].mT, values[step])
        return states, errors, values

    def outputs(self, state: Tensor) -> Tensor:
        """O, [n, heads, c, V].  state: as for `scan`"""
        states, _, values = self.scan(state)
        return add_product((self.from_start * self.q) @ states, self.weights, values)

    def reverse_scan(self, grad: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor]:
        """Like `Chunks.reverse_scan`: gradients of the state after each chunk, and of beta (V - (exp(s) K) S)."""
        dstates = dstate.new_empty(len(self.v), *dstate.shape[1:])
        dvalues = self.weights.mT @ grad
        from_outputs = (self.from_start * self.q).mT @ grad
        dupdates, following = torch.empty_like(self.v), self.to_end * self.k
        for step in reversed(self.block.steps):
            active = dstate[: step.stop - step.start]
            dstates[step] = active
            dvalue = add_product(dvalues[step], following[step], active)
            torch.matmul(self.solution[step].mT, dvalue, out=dupdates[step])
            active.mul_(self.ends[step]).add_(from_outputs[step])
            add_product(active, self.decayed_keys[step].mT, -self.beta[step] * dupdates[step])
        return dstates, dupdates

    def gradients(self, state: Tensor, grad: Tensor, dstate: Tensor) -> Inputs:
        """Implements `BlockProducts.gradients`.

        dY means the gradient of Y.  With X = V - (exp(s) K) S and U = d(beta X):

            dV = beta U                     d(exp(s) K) = -dV S^T      d(exp(s) Q) = dO S^T
            dP(Q) = dO N^T                  d(beta P(K)) = -U N^T below the diagonal

        The s of a token occurs only in exponents of factors on its own q and k.  So ds is a sum of q dq and of k dk,
        with the signs of s in these exponents.  dg of a token is the sum of ds from the token to the end of its chunk.
        """
        states, errors, values = self.scan(state)
        dstates, dupdates = self.reverse_scan(grad, dstate)
        dv = self.beta * dupdates
        dq = self.from_start * (grad @ states.mT)
        rising = -self.from_start * (dv @ states.mT)  # gradients of k in terms with exp(s)
        falling = self.to_end * (values @ dstates.mT)  # gradients of k in terms with exp(-s)
        of_end = (self.k * falling).sum(2) + self.ends[..., 0] * (states * dstates).sum(-1)

        dsystem = (dupdates @ values.mT).tril_(-1).neg_()
        dbeta = (dupdates * errors).sum(-1) + (dsystem * self.key_products).sum(-1)
        of_query, of_key = self.decays.pair_gradients(grad @ values.mT, self.q, self.k)
        dq, falling = dq + of_query, falling + of_key
        of_query, of_key = self.decays.pair_gradients(dsystem * self.beta, self.k, self.k)
        rising, falling = rising + of_query, falling + of_key

        ds = self.q * dq + self.k * (rising - falling)
        ds[:, :, -1] += of_end
        dk = rising + falling
        return Inputs(*self.before_norms(dq, dk), dv, sums_to_end(ds.mT).mT, dbeta)


def _by_part(x: Tensor) -> Tensor:
    """A view of x [n, heads, c, d] as [n, heads, parts, PART, d]."""
    return x.unflatten(2, (-1, PART))


def _diagonal(x: Tensor) -> Tensor:
    """A view of the parts on the diagonal of x [n, heads, c, c]: [n, heads, parts, PART, PART]."""
    return x.unflatten(3, (-1, PART)).unflatten(2, (-1, PART)).diagonal(0, 2, 4).movedim(-1, 2)
