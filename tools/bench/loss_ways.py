"""The loss head as users or other trainers write it.  Tokens with label IGNORED are not supervised.

hidden [t, 1, h], weight [v, h], labels [t] int64 -> the negative sum of the labels' log-probs
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """F.linear and F.cross_entropy."""
    logits = F.linear(hidden.flatten(0, 1), weight)
    return F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=IGNORED)


def concatenate(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Computes all logits, then their log-probs chunk by chunk; concatenates the list of chunks at the end."""
    logits = F.linear(hidden.flatten(0, 1), weight)
    logprobs = _Concatenated.apply(logits, labels.clamp(min=0), chunk)
    return _negative_sum(logprobs, labels)


def recompute(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Computes log-probs in chunks of hidden states; backward recomputes the logits of each chunk."""
    logprobs = _Recomputed.apply(hidden.flatten(0, 1), weight, labels.clamp(min=0), chunk)
    return _negative_sum(logprobs, labels)


def _negative_sum(logprobs: Tensor, labels: Tensor) -> Tensor:
    return -(logprobs * (labels != IGNORED)).sum()


class _Concatenated(torch.autograd.Function):
    """Log-probs of given logits, in chunks that are collected in a list, as in SkyRL PR #1610."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, chunk: int) -> Tensor:
        logprobs = []
        for scores, label in zip(logits.split(chunk), labels.split(chunk)):
            logprobs.append(torch.log_softmax(scores.float(), -1).gather(1, label[:, None]).squeeze(1))
        ctx.save_for_backward(logits, labels)
        ctx.chunk = chunk
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels = ctx.saved_tensors
        gradients = []
        for scores, label, gradient in zip(*(x.split(ctx.chunk) for x in (logits, labels, upstream))):
            softmax = torch.softmax(scores.float(), -1)
            one_hot = F.one_hot(label, logits.shape[1])  # int64
            gradients.append(one_hot.float().sub_(softmax).mul_(gradient[:, None]))
        return torch.cat(gradients), None, None  # fp32: autograd casts it


class _Recomputed(torch.autograd.Function):
    """Log-probs from hidden states; backward recomputes the logits, as in SkyRL PR #1841."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        logprobs = torch.empty(len(labels), device=hidden.device)
        for h, label, out in zip(*(x.split(chunk) for x in (hidden, labels, logprobs))):
            scores = (h @ weight.t()).float()
            out.copy_(scores.gather(1, label[:, None]).squeeze(1) - torch.logsumexp(scores, -1))
        ctx.save_for_backward(hidden, weight, labels)
        ctx.chunk = chunk
        return logprobs

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        dhidden = torch.empty_like(hidden)
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        for h, label, gradient, dh in zip(*(x.split(ctx.chunk) for x in (hidden, labels, upstream, dhidden))):
            scores = (h @ weight.t()).float()
            dscores = torch.softmax(scores, -1).mul_(-gradient[:, None])
            dscores.scatter_add_(1, label[:, None], gradient[:, None])
            narrow = dscores.to(weight.dtype)
            torch.mm(narrow, weight, out=dh)
            dweight += (narrow.t() @ h).float()
        return dhidden, dweight.to(weight.dtype), None, None
