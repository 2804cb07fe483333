"""Computes all logits at once, but the softmax and its gradient in chunks of tokens.

The logits and their gradient each exist once, in the dtype of the logits; twice if a token has several targets.
"""

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from sft.config import LossConfig
from sft.mcore.device import send
from sft.mcore.loss.objective import RowStatistics, Targets, upstream_coefficients
from sft.mcore.loss.softmax import gradient, slices, statistics
from sft.mcore.loss.vocab_parallel import VocabShard


def token_statistics(hidden: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig) -> RowStatistics:
    """The statistics of every target.  Log-probability, log-sum-exp and entropy have gradients."""
    return row_statistics(shard.logits(hidden, targets.rows), shard, targets, loss)


def row_statistics(logits: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig) -> RowStatistics:
    """`token_statistics` from logits [t, rows of this shard], which stay unchanged."""
    rows = RowStatistics._make(_RowStatistics.apply(logits, shard, targets, loss))
    further = targets.further
    if further is None:
        return rows
    own, numbers = targets.rows[send(further.tokens, logits.device)], torch.arange(len(further), device=logits.device)
    others = Targets(rows=numbers, labels=further.labels, weights=further.weights)
    return rows.followed_by(row_statistics(logits.index_select(0, own), shard, others, loss))


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
            return values.new_zeros(num_tokens).index_copy_(0, index, values)

        all_rows, all_coefficients = rows.map(spread), upstream_coefficients(rows, *upstream).map(spread)
        unsupervised = labels.new_ones(num_tokens, dtype=torch.bool).index_fill_(0, index, False)
        dlogits = torch.empty_like(logits)
        for c in slices(num_tokens, ctx.loss.chunk(num_tokens)):
            rows, coefficients = all_rows.map(itemgetter(c)), all_coefficients.map(itemgetter(c))
            gradient(logits[c], labels[c], rows, coefficients, ctx.shard, out=dlogits[c])
            if index.numel() < num_tokens:  # scores of unsupervised tokens may be NaN
                dlogits[c].masked_fill_(unsupervised[c, None], 0.0)
        return dlogits, None, None, None
