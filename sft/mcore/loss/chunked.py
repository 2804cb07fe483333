"""Computes all logits at once, but the softmax and its gradient in chunks of tokens.

The logits and their gradient each exist once, in the dtype of the logits, also if tokens have several targets.
"""

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from sft.config import LossConfig
from sft.mcore.device import send
from sft.mcore.loss.distill import Distilled
from sft.mcore.loss.objective import RowStatistics, Targets, upstream_coefficients
from sft.mcore.loss.softmax import correct_labels, gradient, slices, statistics
from sft.mcore.loss.vocab_parallel import VocabShard


def token_statistics(hidden: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig) -> RowStatistics:
    """The statistics of every target.  Log-probability, log-sum-exp and entropy have gradients."""
    return row_statistics(shard.logits(hidden, targets.rows), shard, targets, loss)


def row_statistics(logits: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig) -> RowStatistics:
    """Like `token_statistics`, from logits [t, rows of this shard], which stay unchanged."""
    return RowStatistics._make(_RowStatistics.apply(logits, shard, targets, loss))


class _RowStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        num_tokens = logits.shape[0]
        labels = targets.labels.new_zeros(num_tokens).index_copy_(0, targets.rows, targets.labels)
        entropy = loss.measures_entropy
        teacher = None if targets.teacher is None else targets.teacher.spread(targets.rows, num_tokens)
        all_rows = RowStatistics.empty(num_tokens, logits, entropy=entropy, teacher=teacher is not None)
        for c in slices(num_tokens, loss.chunk(num_tokens)):
            rows = statistics(logits[c], labels[c], shard, entropy=entropy)
            if teacher is not None:
                # The logits are as before afterwards, which `data` does not report to autograd.
                distilled = Distilled(logits.data[c], teacher.map(itemgetter(c)), rows, shard, loss.distill)
                distilled.put_back(logits.data[c])
                rows = rows._replace(divergence=distilled.value, agrees=distilled.agrees)
                del distilled  # before the next chunk has its own
            all_rows.assign(c, rows)
        rows = all_rows.map(lambda column: column[targets.rows])
        if targets.further is not None:
            more = _further_statistics(logits, shard, targets, loss)
            rows = rows.followed_by(more.with_teacher_of(rows, send(targets.further.tokens, logits.device)))
        ctx.mark_non_differentiable(*rows.without_gradient(loss))
        ctx.save_for_backward(logits, labels, *rows)
        ctx.shard, ctx.targets, ctx.loss = shard, targets, loss
        return rows

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, labels, *columns = ctx.saved_tensors
        num_tokens, index = logits.shape[0], ctx.targets.rows
        rows = RowStatistics._make(columns)

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(num_tokens).index_copy_(0, index, values[: len(index)])

        teacher = ctx.targets.teacher
        if teacher is not None:  # the divergences of further targets are copies, and have no gradient
            of_value = upstream[4]
            weights = torch.zeros_like(teacher.weights) if of_value is None else of_value[: len(index)]
            teacher = teacher._replace(weights=weights).spread(index, num_tokens)
        coefficients = upstream_coefficients(rows, *upstream)
        all_rows, all_coefficients = rows.map(spread), coefficients.map(spread)
        if (further := ctx.targets.further) is not None:
            own = index[send(further.tokens, index.device)]
            more, others = rows.map(lambda x: x[len(index) :]), coefficients.map(lambda x: x[len(index) :])
            all_coefficients = all_coefficients.with_further(own, others)
        unsupervised = labels.new_ones(num_tokens, dtype=torch.bool).index_fill_(0, index, False)
        dlogits = torch.empty_like(logits)
        for c in slices(num_tokens, ctx.loss.chunk(num_tokens)):
            rows, coefficients = all_rows.map(itemgetter(c)), all_coefficients.map(itemgetter(c))
            if teacher is None:
                gradient(logits[c], labels[c], rows, coefficients, ctx.shard, out=dlogits[c])
            else:
                scores = logits.data[c]
                distilled = Distilled(scores, teacher.map(itemgetter(c)), rows, ctx.shard, ctx.loss.distill)
                distilled.write(scores, labels[c], coefficients, out=dlogits[c])
                distilled.put_back(scores)
                all_coefficients.softmax[c] = distilled.with_rest(coefficients).softmax
                del distilled
            if index.numel() < num_tokens:  # scores of unsupervised tokens may be NaN
                dlogits[c].masked_fill_(unsupervised[c, None], 0.0)
        if further is not None:
            shared = all_coefficients.map(lambda column: column[own])._replace(label=others.label)
            listed = None if teacher is None else (teacher.ids[own] == further.labels[:, None]).any(1)
            correct_labels(own, further.labels, more, shared, ctx.shard, out=dlogits, listed=listed)
        return dlogits, None, None, None


def _further_statistics(logits: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig) -> RowStatistics:
    """The statistics of further targets, from a chunk of their tokens' logits at a time."""
    assert targets.further is not None
    own, labels = targets.rows[send(targets.further.tokens, logits.device)], targets.further.labels
    entropy = loss.measures_entropy
    rows = RowStatistics.empty(len(own), logits, entropy=entropy, teacher=False)
    for c in slices(len(own), loss.chunk(len(logits))):
        rows.assign(c, statistics(logits[own[c]], labels[c], shard, entropy=entropy))
    return rows
