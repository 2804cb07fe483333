"""Statistics of scores over a split vocabulary, and the gradient of anything that depends on them.

Neither writes to the scores, unless `out` is them.
"""

import functools
from types import ModuleType

from torch import Tensor

from sft.mcore.loss import softmax_torch
from sft.mcore.loss.objective import GradientCoefficients, RowStatistics
from sft.mcore.loss.vocab_parallel import VocabShard

_FAR = -1e4  # exp(_FAR) is 0 in every format; keeps an empty shard's "-inf - x" out of products with 0


def statistics(scores: Tensor, labels: Tensor, shard: VocabShard, *, entropy: bool) -> RowStatistics:
    """scores [n, rows of this shard], labels int64 [n] -> over the whole vocabulary.  Collective over tp: one call,
    3 floats a row, 4 with entropy."""
    local = labels - shard.first
    local_sums: Tensor = _passes(scores).row_sums(scores, local, shard.num_real, entropy)
    if shard.group.size() == 1:
        largest, total, score, *moment = local_sums.unbind(0)
    else:
        gathered = shard.all_gather(local_sums)
        largests, totals, scores_, *moments = gathered.unbind(1)
        largest = largests.amax(0)
        shift = (largests - largest).clamp_(min=_FAR)
        scale = shift.exp()
        total = (totals * scale).sum(0)
        score = scores_.sum(0)
        moment = [(scale * (part + totals * shift)).sum(0) for part in moments]
    log_total = total.log()
    return RowStatistics(
        logprob=score - largest - log_total,  # in this order: exact where it is near 0
        lse=largest + log_total,
        entropy=log_total - moment[0] / total if moment else None,
        correct=(score >= largest).to(score.dtype),
    )


def gradient(
    scores: Tensor,
    labels: Tensor,
    rows: RowStatistics,
    coefficients: GradientCoefficients,
    shard: VocabShard,
    *,
    out: Tensor,
) -> None:
    """Write the gradient with respect to the scores, as `GradientCoefficients` defines it, to `out` [n, rows].

    out: the scores themselves, or a buffer of their shape and dtype; columns that pad the vocabulary get 0
    """
    local = labels - shard.first
    _passes(scores).score_gradient(scores, local, shard.num_real, rows.logprob, rows.lse, coefficients, out)


def _passes(scores: Tensor) -> ModuleType:
    return _on_cuda() if scores.is_cuda else softmax_torch


@functools.cache
def _on_cuda() -> ModuleType:
    try:
        from sft.mcore.loss import softmax_triton
    except ImportError:  # torch for CUDA brings Triton on Linux, and only there
        return softmax_torch
    return softmax_triton
