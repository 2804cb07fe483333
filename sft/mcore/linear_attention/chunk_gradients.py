"""Gradients of the gated delta rule on the chunks of a block.

Names are those of chunks.py, with d before a name for its gradient.  With X = V - exp(s) K S and U = d(beta X):

    dV = beta U                     d(K S) = -exp(s) dV        d(Q S) = exp(s) dO
    d((Q K^T) D) = dO N^T           d(beta (K K^T) D) = -U N^T below the diagonal

s is in exp(s), exp(s_c - s) and D alone, so ds is a sum of products that other gradients contain.  dg of a token is the
sum of ds from the token to the end of its chunk.
"""

from torch import Tensor

from sft.mcore.linear_attention.chunks import Chunks, sums_to_end
from sft.mcore.linear_attention.delta_rule import Inputs


def gradients(chunks: Chunks, state: Tensor, grad: Tensor, dstate: Tensor) -> Inputs:
    """Gradients of the inputs, [n, heads, c, ...], with arbitrary numbers for padding.

    state   [fragments, heads, K, V], before the block
    grad    [n, heads, c, V], gradients of the outputs, 0 for padding
    dstate  [fragments, heads, K, V], gradients of the states after the block, which become those of the states before
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

    # Gradients of Q K^T and K K^T per value head, from here on times D
    dweights = (grad @ values.mT).mul_(chunks.decay)
    dsystem = (dupdates @ values.mT).mul_(chunks.decay).tril_(-1).neg_()
    products = chunks.times(dsystem, chunks.key_products)
    dbeta = (dupdates * errors).sum(-1) + products.sum(-1)
    products = products.mul_(chunks.beta).add_(chunks.times(dweights, chunks.query_products))
    ds += products.sum(-1) - products.sum(-2)

    dweights = chunks.per_key_head(dweights)
    dpairs = chunks.per_key_head(dsystem.mul_(chunks.beta))
    dq = chunks.per_key_head(dqueries) + dweights @ chunks.k
    dk = chunks.per_key_head(dkeys.add_(dkeys_next)) + dweights.mT @ chunks.q + (dpairs + dpairs.mT) @ chunks.k
    dq = chunks.q_scale * (dq - chunks.q * (chunks.q * dq).sum(-1, keepdim=True) * chunks.q.shape[-1])
    dk = chunks.k_scale * (dk - chunks.k * (chunks.k * dk).sum(-1, keepdim=True))
    return Inputs(dq, dk, dv, sums_to_end(ds), dbeta)
