"""Computes the reference loss: all logits at once, with megatron-core's vocab-parallel cross-entropy and autograd."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor

from sft.config import LossConfig
from sft.mcore.device import send
from sft.mcore.loss.distill import of_outcomes
from sft.mcore.loss.objective import RowStatistics, Targets
from sft.mcore.loss.softmax import TAKEN_OUT
from sft.mcore.loss.vocab_parallel import VocabShard, accumulation_dtype


def token_statistics(hidden: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig) -> RowStatistics:
    """The statistics of every target.  Log-probability, log-sum-exp and entropy have gradients."""
    logits = shard.logits(hidden, targets.rows)
    logits = logits.to(accumulation_dtype(logits.dtype))
    if shard.softcap is not None:
        logits = shard.softcap * torch.tanh(logits / shard.softcap)
    labels = targets.labels.new_zeros(logits.shape[0]).index_copy(0, targets.rows, targets.labels)
    rows, own, further = targets.rows, targets.labels, targets.further
    if further is not None:
        more = rows[send(further.tokens, rows.device)]
        own_scores, further_scores, logits = _scores_of(logits, more, (labels[more], further.labels), shard)
        rows, own = torch.cat((rows, more)), torch.cat((own, further.labels))
    divergence, agrees = _divergence(logits, shard, targets, loss)
    # Copied, because core's function overwrites its input, and the log-sum-exp below reads the logits again.
    real = torch.arange(logits.shape[1], device=logits.device) < shard.num_real
    masked = torch.where(real, logits, -torch.inf)
    correct = _correct(masked.detach()[rows], own - shard.first, shard)
    all_nll = _cross_entropy(masked, labels)
    nll = all_nll[targets.rows]
    if further is not None:  # the same log-sum-exp, and the scores of two labels
        nll = torch.cat((nll, all_nll[more] + own_scores - further_scores))
    lse = entropy = None
    if loss.z_loss_coef or loss.measures_entropy:
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(loss.z_loss_coef or loss.entropy_coef)):
            lse, entropy = _lse_and_entropy(logits[:, : shard.num_real][rows], shard)
        entropy = entropy if loss.entropy_coef else entropy.detach() if loss.entropy else None
    return RowStatistics(-nll, lse, entropy, correct, divergence, agrees)


def _divergence(
    logits: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig
) -> tuple[Tensor | None, Tensor | None]:
    """The divergence from the teacher, with a gradient, and the agreement of each target, [n + m]; None without a
    teacher.

    logits: [t, rows of this shard], with the soft cap
    """
    if targets.teacher is None:
        return None, None
    teacher, columns = (targets.teacher.spread(targets.rows, logits.shape[0]), logits.shape[1])
    column = teacher.ids.long() - shard.first
    local = (teacher.ids >= 0) & (column >= 0) & (column < shard.num_real)
    known = _sum_over_tp(torch.where(local, logits.gather(1, torch.where(local, column, 0)), 0.0), shard)
    # One more column for ids of other shards.
    is_out = torch.zeros(len(logits), columns + 1, dtype=torch.bool, device=logits.device)
    is_out = is_out.scatter_(1, torch.where(local, column, columns), True)[:, :-1]
    is_out[:, shard.num_real :] = True
    others = torch.where(is_out, TAKEN_OUT, logits)
    largest = others.detach().amax(-1)
    shard.all_reduce(largest, dist.ReduceOp.MAX)
    has_rest = largest > TAKEN_OUT / 2
    shift = torch.where(has_rest, largest, 0.0)
    total = _sum_over_tp((others - shift[:, None]).exp().sum(-1), shard)
    rest = torch.where(has_rest, shift + torch.where(has_rest, total, 1.0).log(), TAKEN_OUT)
    listed = torch.where(teacher.ids >= 0, known, TAKEN_OUT)
    lse = torch.logaddexp(listed.logsumexp(-1), rest)
    value, _ = of_outcomes(known - lse[:, None], rest - lse, teacher, has_rest, loss.distill)
    agrees = teacher.is_known & (listed[:, 0] >= torch.maximum(largest, listed.amax(-1)))
    rows = targets.rows
    if targets.further is not None:
        rows = torch.cat((rows, rows[send(targets.further.tokens, rows.device)]))
    return value[rows], agrees[rows].to(value.dtype)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p(label) of each row, [n].  logits [n, rows of this shard] are overwritten; labels: [n]"""
    nll: Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits.unsqueeze(1), labels.unsqueeze(1))
    return nll.squeeze(1)


def _scores_of(
    logits: Tensor, rows: Tensor, labels: tuple[Tensor, Tensor], shard: VocabShard
) -> tuple[Tensor, Tensor, Tensor]:
    """logits [n, rows of this shard] -> the scores of two labels in each of these rows, [m] each, and the logits.

    rows: int64 [m]; labels: int64 [m] each.  Further operations must use the logits that are returned
    """
    local = torch.cat(labels) - shard.first
    is_local = (local >= 0) & (local < shard.num_real)
    scores, logits = _PickedScores.apply(logits, rows.repeat(2), local.clamp(0, logits.shape[1] - 1))
    first, second = _sum_over_tp(torch.where(is_local, scores, 0.0), shard).chunk(2)
    return first, second, logits


class _PickedScores(torch.autograd.Function):
    """logits [n, v], rows and columns int64 [m] -> logits[rows, columns], [m], and the logits.

    Indexing would make a second gradient of all logits.  This adds the gradients of the scores to that of the logits,
    which belongs to this function alone, because the logits that it returns are used by other operations only.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, columns)
        return logits[rows, columns], logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, dscores: Tensor, dlogits: Tensor) -> tuple[Tensor, None, None]:
        return dlogits.index_put_(ctx.saved_tensors, dscores, accumulate=True), None, None


def _correct(scores: Tensor, local: Tensor, shard: VocabShard) -> Tensor:
    """scores [n, rows of this shard] -> [n], 1 if no score on any tp rank is above the label's score, else 0.

    local: [n], labels relative to the first row of this shard
    """
    is_local = (local >= 0) & (local < shard.num_real)
    own = scores.gather(1, local.clamp(0, scores.shape[1] - 1)[:, None]).squeeze(1)
    largest = torch.stack([scores.amax(-1), torch.where(is_local, own, -torch.inf)])
    shard.all_reduce(largest, dist.ReduceOp.MAX)
    return (largest[1] >= largest[0]).to(scores.dtype)


def _lse_and_entropy(scores: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """[n, real rows of this shard] -> log-sum-exp [n] and entropy [n] over the whole vocabulary."""
    if shard.num_real:
        largest = scores.detach().amax(-1)
    else:
        largest = scores.new_full(scores.shape[:1], -torch.inf)
    shard.all_reduce(largest, dist.ReduceOp.MAX)
    total = _sum_over_tp((scores - largest[:, None]).exp().sum(-1), shard)
    lse = largest + total.log()
    # Each shard's part of the entropy depends on lse, so backward sums the gradients of lse over the shards.
    logprobs = scores - tensor_parallel.copy_to_tensor_model_parallel_region(lse, group=shard.group)[:, None]
    return lse, -_sum_over_tp((logprobs.exp() * logprobs).sum(-1), shard)


def _sum_over_tp(partial: Tensor, shard: VocabShard) -> Tensor:
    total: Tensor = tensor_parallel.reduce_from_tensor_model_parallel_region(partial, group=shard.group)
    return total
