"""Computes all logits at once, but the softmax and its gradient in chunks of tokens.

The logits and their gradient each exist once, in the dtype of the logits, also if tokens have several targets.
"""

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from sft.config import LossConfig
from sft.mcore.device import send
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
        all_rows = RowStatistics.empty(num_tokens, logits, entropy=entropy)
        for c in slices(num_tokens, loss.chunk(num_tokens)):
            all_rows.assign(c, statistics(logits[c], labels[c], shard, entropy=entropy))
        rows = all_rows.map(lambda column: column[targets.rows])
        if targets.further is not None:
            rows = rows.followed_by(_further_statistics(logits, shard, targets, loss))
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
            gradient(logits[c], labels[c], rows, coefficients, ctx.shard, out=dlogits[c])
            if index.numel() < num_tokens:  # scores of unsupervised tokens may be NaN
                dlogits[c].masked_fill_(unsupervised[c, None], 0.0)
        if further is not None:
            shared = all_coefficients.map(lambda column: column[own])._replace(label=others.label)
            correct_labels(own, further.labels, more, shared, ctx.shard, out=dlogits)
        return dlogits, None, None, None


def _further_statistics(logits: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig) -> RowStatistics:
    """The statistics of further targets, from a chunk of their tokens' logits at a time."""
    assert targets.further is not None
    own, labels = targets.rows[send(targets.further.tokens, logits.device)], targets.further.labels
    entropy = loss.measures_entropy
    rows = RowStatistics.empty(len(own), logits, entropy=entropy)
    for c in slices(len(own), loss.chunk(len(logits))):
        rows.assign(c, statistics(logits[own[c]], labels[c], shard, entropy=entropy))
    return rows
