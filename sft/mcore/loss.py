"""The loss head: hidden states -> summed cross-entropy of the supervised tokens on this rank.

    fused  no logits: supervised rows only, chunk by chunk, gradients in the forward pass (3 GEMMs, not 4)
    full   megatron-core's output layer and vocab-parallel cross-entropy; the reference

Both are vocab-parallel over tp, sequence-parallel aware and local to the context-parallel rank: no communication
over cp, no division.  Rows of the vocabulary that only pad it never enter the softmax.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor

from sft.config import LossConfig


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """The part of the output projection on this rank.

    weight        [rows, h], a slice of the padded vocabulary
    first         the vocabulary id of row 0
    num_real      rows that are real tokens (the rest pads the vocabulary)
    """

    weight: Tensor
    first: int
    num_real: int
    group: dist.ProcessGroup
    sequence_parallel: bool

    @staticmethod
    def of(weight: Tensor, vocab_size: int, group: dist.ProcessGroup, *, sequence_parallel: bool) -> "VocabShard":
        rows = weight.shape[0]
        first = group.rank() * rows
        num_real = min(max(vocab_size - first, 0), rows)
        return VocabShard(
            weight=weight, first=first, num_real=num_real, group=group, sequence_parallel=sequence_parallel
        )


def lm_loss(hidden: Tensor, shard: VocabShard, labels: Tensor, loss_mask: Tensor, loss: LossConfig) -> Tensor:
    """Sum over supervised tokens of -log p(label): a float64 scalar with gradient, the same on every tp rank.

    hidden [t, 1, h], or [t / tp, 1, h] under sequence parallel; labels int64 [1, t]; loss_mask bool [1, t].
    Without a supervised token the loss is exactly 0 and so are its gradients; all collectives are joined.
    """
    labels, mask = labels.flatten(), loss_mask.flatten()
    if loss.impl == "full":
        return _full(hidden, shard, labels, mask)
    rows = mask.nonzero().squeeze(-1)
    chunk = min(loss.chunk_size or rows.numel(), rows.numel())
    train = torch.is_grad_enabled()
    result: Tensor = _FusedLinearCrossEntropy.apply(hidden, shard.weight, labels[rows], rows, chunk, shard, train)
    return result


def _full(hidden: Tensor, shard: VocabShard, labels: Tensor, mask: Tensor) -> Tensor:
    # Selected, not multiplied, before and after: an unsupervised row may hold NaN, and NaN * 0 is NaN.
    per_token = full_token_loss(hidden, shard, torch.where(mask, labels, 0), supervised=mask)
    return torch.where(mask, per_token, 0.0).sum(dtype=torch.float64)


def full_token_loss(hidden: Tensor, shard: VocabShard, labels: Tensor, *, supervised: Tensor | None = None) -> Tensor:
    """-log p(label) of every token, float32 [t], by megatron-core's vocab-parallel cross-entropy.

    Rows that are not in `supervised` (all are, if it is None) are read as zeros.
    """
    if shard.sequence_parallel:
        whole = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=shard.group)
    else:
        whole = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=shard.group)
    if supervised is not None:
        whole = torch.where(supervised[:, None, None], whole, 0.0)
    logits = torch.nn.functional.linear(whole, shard.weight)  # [t, 1, rows]
    logits[..., shard.num_real :] = -torch.inf
    per_token: Tensor = tensor_parallel.vocab_parallel_cross_entropy(_at_least_fp32(logits), labels.unsqueeze(1))
    return per_token.squeeze(1)


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Gradients are taken while a chunk's logits are at hand, for an upstream gradient of 1, and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: Tensor,
        chunk: int,
        shard: VocabShard,
        train: bool,
    ) -> Tensor:
        whole = _gather_rows(hidden, shard)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        dhidden = whole.new_zeros((rows.numel(), whole.shape[-1]))
        dweight = torch.zeros_like(weight, dtype=_wide(weight.dtype)) if train else None
        logits = weight.new_empty((chunk, weight.shape[0]))
        for start in range(0, rows.numel(), chunk or 1):
            part = slice(start, min(start + chunk, rows.numel()))
            inputs, targets = whole[rows[part]], labels[part]
            scores = logits[: inputs.shape[0]]
            torch.mm(inputs, weight.t(), out=scores)
            lse, target_score, own = _statistics(scores, targets, shard)
            total += (lse - target_score).sum(dtype=torch.float64)
            if dweight is not None:
                dscores = _softmax_minus_onehot(scores, lse, targets, own, shard)
                torch.mm(dscores, weight, out=dhidden[part])
                dweight += dscores.t().to(dweight.dtype) @ inputs.to(dweight.dtype)
        if dweight is not None:
            ctx.save_for_backward(dhidden, dweight, rows)
            ctx.shard, ctx.num_rows, ctx.shape = shard, whole.shape[0], hidden.shape
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        dhidden, dweight, rows = ctx.saved_tensors
        scale = grad.to(dweight.dtype)
        dhidden = (dhidden * scale.to(dhidden.dtype)) if grad != 1 else dhidden
        dweight = dweight * scale if grad != 1 else dweight
        whole = _reduce_rows(dhidden, rows, ctx.num_rows, ctx.shard).view(ctx.shape)
        return whole, dweight.to(ctx.shard.weight.dtype), None, None, None, None, None


def _statistics(scores: Tensor, targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
    """scores [n, rows] of this shard -> over the whole vocabulary: log-sum-exp [n], the target's score [n];
    and which targets are in this shard, bool [n].  One collective of 3 floats per row."""
    real = scores[:, : shard.num_real].to(_wide(scores.dtype))
    local = targets - shard.first
    own = (local >= 0) & (local < shard.num_real)
    if shard.num_real:
        largest = real.amax(-1)
        total = (real - largest[:, None]).exp_().sum(-1)
        picked = real.gather(1, local.clamp(0, shard.num_real - 1)[:, None]).squeeze(1)
        target_score = torch.where(own, picked, 0.0)
    else:  # this rank holds nothing but padding of the vocabulary
        largest = real.new_full(targets.shape, -torch.inf)
        total = target_score = real.new_zeros(targets.shape)
    if shard.group.size() > 1:
        mine = torch.stack((largest, total, target_score))
        everyone = mine.new_empty((shard.group.size() * 3, targets.numel()))
        dist.all_gather_into_tensor(everyone, mine, group=shard.group)
        largests, totals, target_scores = everyone.view(shard.group.size(), 3, -1).unbind(1)
        largest = largests.amax(0)
        total = (totals * (largests - largest).exp()).sum(0)
        target_score = target_scores.sum(0)
    return largest + total.log(), target_score, own


def _softmax_minus_onehot(scores: Tensor, lse: Tensor, targets: Tensor, own: Tensor, shard: VocabShard) -> Tensor:
    """d loss / d scores, written over the scores."""
    real = scores[:, : shard.num_real]
    real.copy_((real.to(lse.dtype) - lse[:, None]).exp_())
    scores[:, shard.num_real :] = 0.0
    mine = own.nonzero().squeeze(-1)
    scores[mine, targets[mine] - shard.first] -= 1.0
    return scores


def _gather_rows(hidden: Tensor, shard: VocabShard) -> Tensor:
    """[t, 1, h] or its sequence-parallel slice -> [t, h]"""
    local = hidden.flatten(0, 1)
    if not shard.sequence_parallel:
        return local
    whole = local.new_empty((local.shape[0] * shard.group.size(), local.shape[1]))
    dist.all_gather_into_tensor(whole, local.contiguous(), group=shard.group)
    return whole


def _reduce_rows(dhidden: Tensor, rows: Tensor, num_rows: int, shard: VocabShard) -> Tensor:
    """Gradient of the supervised rows, partial over tp -> gradient of the hidden states this rank gave."""
    if shard.group.size() > 1 and not shard.sequence_parallel:
        dhidden = dhidden.clone()
        dist.all_reduce(dhidden, group=shard.group)
    whole = dhidden.new_zeros((num_rows, dhidden.shape[1]))
    whole[rows] = dhidden
    if not shard.sequence_parallel:
        return whole
    local = whole.new_empty((num_rows // shard.group.size(), whole.shape[1]))
    dist.reduce_scatter_tensor(local, whole, group=shard.group)
    return local


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(_wide(x.dtype))
