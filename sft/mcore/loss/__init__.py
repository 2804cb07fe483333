"""Computes the objective from hidden states, summed over the supervised tokens on this rank: the loss head.

    fused    never holds all logits: computes the scores of supervised tokens chunk by chunk, and their gradients in the
             forward pass (3 GEMMs, not 4)
    chunked  computes the logits of all tokens; softmax and its gradient chunk by chunk, as in most trainers
    full     computes the logits of all tokens, with megatron-core's own cross-entropy; the reference

All three split the vocabulary over tp, and accept hidden states that sequence parallelism has split.  None of them
communicates over cp or divides by a number of tokens.  Rows that only pad the vocabulary never enter the softmax.  If
the output weight is frozen (`requires_grad` is False), none of them computes its gradient (1 GEMM less) or allocates
memory for it; the gradient of the hidden states is the same, bit for bit.

Reading order: `lm_loss` here, `objective.py` (the objective), then `fused.py`, `chunked.py` or `full.py`.  These three
modules share `vocab_parallel.py` (the vocabulary over tp), `softmax.py` (statistics and gradient of scores) and
`distill.py` (the divergence from a teacher).
"""

from torch import Tensor

from sft.config import LossConfig
from sft.mcore.loss import chunked, full, fused
from sft.mcore.loss.objective import RowStatistics, Targets, divergence_term, objective
from sft.mcore.loss.vocab_parallel import VocabShard

__all__ = ["RowStatistics", "Targets", "VocabShard", "lm_loss"]


def lm_loss(hidden: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig) -> tuple[Tensor, RowStatistics]:
    """The objective, a float64 sum over the supervised tokens, and the statistics of their targets, without gradient.

    hidden: [t, 1, h], or [t / tp, 1, h] under sequence parallelism.  The result is equal on all tp ranks.  On a rank
    without a supervised token, the objective and its gradients are 0; the rank still takes part in all collectives.
    """
    if loss.impl == "fused":
        return fused.lm_loss(hidden, shard, targets, loss)
    rows = (chunked if loss.impl == "chunked" else full).token_statistics(hidden, shard, targets, loss)
    total = objective(rows, targets.all_weights, loss) + divergence_term(rows, targets.teacher)
    return total, rows.map(Tensor.detach)
