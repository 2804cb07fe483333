"""Turns what the loss head measured on a rank into numbers on the CPU for the log."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.batch import Microbatch
from sft.mcore.loss.objective import RowStatistics
from sft.metrics.accumulator import SupervisedTokens, TaughtTokens


def supervised_tokens(
    microbatch: Microbatch, objective: Tensor, rows: RowStatistics, denominator: str, **more: Any
) -> SupervisedTokens:
    """The numbers of one microbatch.  Copies them to the CPU, and so waits for the device.

    denominator: `loss.denominator`; more: further fields of SupervisedTokens
    """
    rows = rows.by_text(microbatch.target_counts)
    return SupervisedTokens(
        objective=objective.item(),
        denominator=microbatch.denominator(denominator),
        nll=-rows.logprob.double().numpy(),
        entropy=None if rows.entropy is None else rows.entropy.numpy(),
        correct=rows.correct.numpy(),
        num_rows=int(microbatch.loss_mask.sum()),
        teacher=_taught_tokens(microbatch, rows),
        **more,
    )


def _taught_tokens(microbatch: Microbatch, rows: RowStatistics) -> TaughtTokens | None:
    """The divergences of the targets `rows` on the CPU, with the teacher's numbers; None without a teacher."""
    if microbatch.teacher is None or rows.divergence is None or rows.agrees is None:
        return None
    index = torch.from_numpy(np.repeat(microbatch.target_rows, microbatch.target_counts))
    teacher = microbatch.teacher[index]
    covered = torch.where(teacher.ids >= 0, teacher.logprobs, -torch.inf).double().exp().sum(-1)
    return TaughtTokens(
        divergence=rows.divergence.double().numpy(),
        agrees=rows.agrees.double().numpy(),
        covered=covered.numpy(),
        is_taught=teacher.has_teacher.numpy(),
    )
