"""torch's flash operators in plain torch, by their documentation: `PLAIN` replaces them on machines without a GPU."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sft.mcore.attention.flash_kernel import Demand, Operators


def _forward(query: Tensor, keys: Tensor, values: Tensor, *boundaries: Any, **options: Any) -> tuple[Tensor, Tensor]:
    assert keys.shape == values.shape  # keys and values have the same width
    outs, sums = [], []
    for own, seen in _sequences(query, keys, *boundaries):
        scores, _ = _scores(query[own], keys[seen], **options)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), _for_each_head(values[seen], query)))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs).to(query.dtype), torch.cat(sums, dim=1)


def _backward(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    *boundaries: Any,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients by the equations of the paper (arXiv:2307.08691), from the given `out` and `lse`, which
    sinks have changed."""
    assert grad.shape == out.shape == (*query.shape[:2], values.shape[-1])
    dquery, dkeys, dvalues = (torch.zeros_like(x, dtype=_wide(x).dtype) for x in (query, keys, values))
    for own, seen in _sequences(query, keys, *boundaries):
        dout, key, value = _wide(grad[own]), _for_each_head(keys[seen], query), _for_each_head(values[seen], query)
        scores, slope = _scores(query[own], keys[seen], **options)
        weights = torch.exp(scores - lse[:, own, None])
        delta = (dout * out[own]).sum(-1).t()[:, :, None]
        dscores = weights * (torch.einsum("qhd,khd->hqk", dout, value) - delta) * slope
        dquery[own] = torch.einsum("hqk,khd->qhd", dscores, key)
        dkeys[seen] = _of_groups(torch.einsum("hqk,qhd->khd", dscores, _wide(query[own])), keys)
        dvalues[seen] = _of_groups(torch.einsum("hqk,qhd->khd", weights, dout), keys)
    return dquery.to(query.dtype), dkeys.to(keys.dtype), dvalues.to(values.dtype)


class _Anywhere(Operators):
    def why_not(self, demand: Demand) -> str | None:
        return None


PLAIN = _Anywhere(_forward, _backward, pads_values=True)


def _sequences(
    query: Tensor, keys: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> Iterator[tuple[slice, slice]]:
    """The queries and the keys of each sequence."""
    for tensor, cu_seqlens, longest in ((query, cu_seqlens_q, max_seqlen_q), (keys, cu_seqlens_k, max_seqlen_k)):
        assert cu_seqlens.dtype == torch.int32
        assert int(cu_seqlens[-1]) == len(tensor) and int(cu_seqlens.diff().max()) == longest
    q, k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(q) - 1):
        yield slice(*q[i : i + 2]), slice(*k[i : i + 2])


def _scores(
    query: Tensor, keys: Tensor, scale: float, num_before: int = -1, softcap: float = 0.0, causal: bool = True
) -> tuple[Tensor, Tensor | float]:
    """The scores [heads, queries, keys] of one sequence with a bottom-right causal mask or none, and their derivative
    by the products of queries and keys."""
    assert causal or num_before == -1
    distance = torch.arange(len(keys) - len(query), len(keys))[:, None] - torch.arange(len(keys))
    hidden = ((distance < 0) & causal) | (distance > (num_before if num_before >= 0 else len(keys)))
    scores = torch.einsum("qhd,khd->hqk", _wide(query), _for_each_head(keys, query)) * scale
    slope: Tensor | float = scale
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, slope = softcap * capped, scale * (1 - capped**2)
    return scores.masked_fill(hidden, -torch.inf), slope


def _wide(x: Tensor) -> Tensor:
    """`x` in fp32, or in its own type if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _for_each_head(x: Tensor, query: Tensor) -> Tensor:
    return _wide(x).repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _of_groups(x: Tensor, keys: Tensor) -> Tensor:
    return x.unflatten(1, (keys.shape[1], -1)).sum(2)
