"""Attention over packed documents with one matrix of scores, differentiated by autograd: the reference for kernels."""

import numpy as np
import torch
from torch import Tensor


def in_one_piece(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: np.ndarray,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """query [t, heads, d], key and value [t, key heads, d] -> output [t, heads, d], log-sum-exp [heads, t]."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    tokens = torch.arange(len(query))
    document = torch.bucketize(tokens, torch.from_numpy(cu_seqlens[1:].copy()), right=True)
    attends = (document[:, None] == document[None, :]).tril()
    if window is not None:
        attends &= tokens[:, None] - tokens[None, :] < window
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~attends, -torch.inf)
    if sinks is not None:  # one more key, whose value is 0
        scores = torch.cat((sinks[:, None, None].expand(-1, len(query), 1), scores), dim=-1)
        value = torch.cat((torch.zeros_like(value[:1]), value))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1)
