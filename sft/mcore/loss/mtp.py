"""Computes the loss of multi-token prediction, a term of the objective.

    objective = lm loss + train.mtp_loss_weight * mean of -log p over the predicted tokens of the global batch

The block predicts a token if the token is supervised and at least two tokens of its document precede it.  All predicted
tokens have equal weights, with any loss.reduction.  `model/mtp.py` computes the hidden states.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sft.batch import Microbatch
from sft.config import Config
from sft.config.distill import DistillConfig
from sft.mcore.device import send
from sft.mcore.loss import Targets, VocabShard, lm_loss
from sft.mcore.model.mtp import NextTokens
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.layout import Layout


class MtpLoss:
    """Computes the term of each microbatch of a step, and keeps the sums of -log p for the log."""

    def __init__(self, config: Config) -> None:
        self._weight, self._trains_head = config.train.mtp_loss_weight, config.train.mtp == "joint"
        plain = {"z_loss_coef": 0.0, "entropy_coef": 0.0, "entropy": False, "distill": DistillConfig()}
        self._loss = config.loss.model_copy(update=plain)
        self._scale = 0.0
        self._nll: list[Tensor] = []

    def begin(self) -> None:
        """Start a step or an evaluation: drop the sums of -log p of the one before."""
        self._nll.clear()

    def set_scale(self, denominator: float, num_predicted: float) -> None:
        """Set the scale of the term for the next step.

        denominator: denominator of the global batch, by which the engine divides the gradients of the whole objective
        num_predicted: number of predicted tokens of the global batch
        """
        self._scale = self._weight * denominator / max(1.0, num_predicted)

    def term(self, hidden: Tensor, shard: VocabShard, microbatch: Microbatch) -> Tensor:
        """The term of the objective for one microbatch.

        hidden: the block's hidden states for this rank's tokens, with the shape of `hidden` in `lm_loss`
        """
        rows = microbatch.second_mask.flatten().nonzero().squeeze(-1)
        targets = Targets(
            rows=send(rows, hidden.device),
            labels=send(microbatch.second_labels.flatten()[rows], hidden.device),
            weights=torch.full((len(rows),), self._scale, dtype=torch.float32, device=hidden.device),
        )
        if not self._trains_head:
            shard = replace(shard, weight=shard.weight.detach())
        term, statistics = lm_loss(hidden, shard, targets, self._loss)
        self._nll.append(-statistics.logprob.sum(dtype=torch.float64))
        return term

    def measured(self, index: int, microbatch: Microbatch) -> dict[str, Any]:
        """Fields of SupervisedTokens for the microbatch with number `index`; empty without multi-token prediction."""
        if not self._nll:
            return {}
        return dict(mtp_nll=self._nll[index].item(), num_mtp_tokens=int(microbatch.second_mask.sum()))


def next_tokens(microbatch: Microbatch, layout: Layout, groups: ProcessGroups) -> NextTokens:
    """The block's inputs.  The label of a token is the token after it.  Last tokens of documents count as padding."""
    lengths = torch.from_numpy(microbatch.lengths)
    is_last = microbatch.position_ids >= lengths[microbatch.documents] - 1
    documents = send(microbatch.documents.masked_fill(is_last, -1), groups.device)
    if layout.sequence_parallel:
        documents = documents.chunk(layout.tp, dim=1)[groups.tp_rank]
    return NextTokens(tokens=send(microbatch.labels, groups.device), documents=documents)
