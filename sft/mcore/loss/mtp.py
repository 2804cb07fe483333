"""The loss of multi-token prediction, a term of the objective.

    objective = lm loss + train.mtp_loss_weight * mean of -log p over the predicted tokens of the global batch

A token is predicted if it is supervised and has two tokens of its document before it.  Each counts the same, whatever
loss.reduction says.  `model/mtp.py` computes the hidden states.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sft.batch import Microbatch
from sft.config import Config
from sft.mcore.device import send
from sft.mcore.loss import Targets, VocabShard, lm_loss
from sft.mcore.model.mtp import NextTokens
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.layout import Layout


class MtpLoss:
    """Computes the term of each microbatch of a step, and keeps the sums of -log p for the log."""

    def __init__(self, config: Config) -> None:
        self._weight, self._trains_head = config.train.mtp_loss_weight, config.train.mtp == "joint"
        self._loss = config.loss.model_copy(update={"z_loss_coef": 0.0, "entropy_coef": 0.0, "entropy": False})
        self._scale = 0.0
        self._nll: list[Tensor] = []

    def begin(self) -> None:
        """Start a step or an evaluation."""
        self._nll.clear()

    def set_scale(self, denominator: float, num_predicted: float) -> None:
        """Sets the scale of the term for the next step; both arguments are those of the global batch.

        denominator: the engine divides the gradients of the whole objective by it
        """
        self._scale = self._weight * denominator / max(1.0, num_predicted)

    def term(self, hidden: Tensor, shard: VocabShard, microbatch: Microbatch) -> Tensor:
        """The term of the objective.  hidden: of the block, for the tokens of this rank"""
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
        """Fields of SupervisedTokens, of microbatch `index`; empty without multi-token prediction."""
        if not self._nll:
            return {}
        return dict(mtp_nll=self._nll[index].item(), num_mtp_tokens=int(microbatch.second_mask.sum()))


def next_tokens(microbatch: Microbatch, layout: Layout, groups: ProcessGroups) -> NextTokens:
    """The inputs of the block: labels are the tokens after each token.  Last tokens of documents count as padding."""
    lengths = torch.from_numpy(microbatch.lengths)
    is_last = microbatch.position_ids >= lengths[microbatch.documents] - 1
    documents = send(microbatch.documents.masked_fill(is_last, -1), groups.device)
    if layout.sequence_parallel:
        documents = documents.chunk(layout.tp, dim=1)[groups.tp_rank]
    return NextTokens(tokens=send(microbatch.labels, groups.device), documents=documents)
