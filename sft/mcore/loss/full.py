"""Computes the reference loss: all logits at once, with megatron-core's vocab-parallel cross-entropy and autograd."""

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor

from sft.config import LossConfig
from sft.mcore.device import send
from sft.mcore.loss.objective import RowStatistics, Targets
from sft.mcore.loss.vocab_parallel import VocabShard, accumulation_dtype


def token_statistics(hidden: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig) -> RowStatistics:
    """The statistics of every target.  Log-probability, log-sum-exp and entropy have gradients."""
    logits = shard.logits(hidden, targets.rows)
    logits = logits.to(accumulation_dtype(logits.dtype))
    if shard.softcap is not None:
        logits = shard.softcap * torch.tanh(logits / shard.softcap)
    labels = targets.labels.new_zeros(logits.shape[0]).index_copy(0, targets.rows, targets.labels)
    # Copied, because core's function overwrites its input, and the log-sum-exp below reads the logits again.
    real = torch.arange(logits.shape[1], device=logits.device) < shard.num_real
    masked = torch.where(real, logits, -torch.inf)
    rows, own, further = targets.rows, targets.labels, targets.further
    if further is not None:
        more = rows[send(further.tokens, rows.device)]
        rows, own = torch.cat((rows, more)), torch.cat((own, further.labels))
    correct = _correct(masked.detach()[rows], own - shard.first, shard)
    all_nll = _cross_entropy(masked, labels)
    nll = all_nll[targets.rows]
    if further is not None:  # the same log-sum-exp, and the scores of two labels
        change = _scores_of(logits, more, labels[more], shard) - _scores_of(logits, more, further.labels, shard)
        nll = torch.cat((nll, all_nll[more] + change))
    lse = entropy = None
    if loss.z_loss_coef or loss.measures_entropy:
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(loss.z_loss_coef or loss.entropy_coef)):
            lse, entropy = _lse_and_entropy(logits[:, : shard.num_real][rows], shard)
        entropy = entropy if loss.entropy_coef else entropy.detach() if loss.entropy else None
    return RowStatistics(logprob=-nll, lse=lse, entropy=entropy, correct=correct)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p(label) of each row, [n].  logits [n, rows of this shard] are overwritten; labels: [n]"""
    nll: Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits.unsqueeze(1), labels.unsqueeze(1))
    return nll.squeeze(1)


def _scores_of(logits: Tensor, rows: Tensor, labels: Tensor, shard: VocabShard) -> Tensor:
    """The score of the label labels[i] in row rows[i] of logits [n, rows of this shard]: [m].

    rows, labels: int64 [m]
    """
    local = labels - shard.first
    is_local = (local >= 0) & (local < shard.num_real)
    own = logits[rows, local.clamp(0, logits.shape[1] - 1)]
    return _sum_over_tp(torch.where(is_local, own, 0.0), shard)


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
