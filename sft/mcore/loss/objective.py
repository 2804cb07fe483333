"""The objective: which tokens enter it, their weights, the loss of a token, and the gradient with respect to scores.

    loss of a token = weight * (-log p(label) + z_loss_coef * lse^2 - entropy_coef * entropy)

lse is the log-sum-exp of the token's scores.  The z-loss keeps lse near 0, so scores do not drift in a long run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sft.batch import Microbatch
from sft.config import LossConfig
from sft.mcore.device import send
from sft.mcore.loss.vocab_parallel import accumulation_dtype


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The supervised tokens of a microbatch on this rank."""

    rows: Tensor  # int64 [n], increasing: indices of the supervised tokens among the rank's tokens
    labels: Tensor  # int64 [n]
    weights: Tensor  # float32 [n], above 0

    @staticmethod
    def of(microbatch: Microbatch, device: torch.device) -> "Targets":
        """Select the supervised tokens on the CPU.  A selection on the GPU would synchronise with the host."""
        weights = microbatch.loss_weights.flatten()
        rows = weights.nonzero().squeeze(-1)
        chosen = rows, microbatch.labels.flatten()[rows], weights[rows]
        rows, labels, weights = (send(part, device) for part in chosen)
        return Targets(rows=rows, labels=labels, weights=weights)

    def __len__(self) -> int:
        return self.rows.numel()


class RowStatistics(NamedTuple):
    """Statistics of n tokens, from their scores over the whole vocabulary: float32 [n], or float64 for float64 scores.

    lse and entropy may be None if the config does not need them; `softmax.statistics` always returns lse.
    """

    logprob: Tensor  # log p(label)
    lse: Tensor | None  # log-sum-exp of the scores
    entropy: Tensor | None  # in nats
    correct: Tensor  # 1 if no score is above the label's score, otherwise 0; has no gradient

    @staticmethod
    def empty(num_rows: int, like: Tensor, *, entropy: bool) -> "RowStatistics":
        """Uninitialised statistics of `num_rows` rows, on the device of `like`."""
        logprob, lse, correct, *rest = like.new_empty(
            (4 if entropy else 3, num_rows), dtype=accumulation_dtype(like.dtype)
        )
        return RowStatistics(logprob=logprob, lse=lse, entropy=rest[0] if entropy else None, correct=correct)

    def map(self, change: Callable[[Tensor], Tensor]) -> "RowStatistics":
        """Apply `change` to each column that is not None."""
        return RowStatistics._make(None if column is None else change(column) for column in self)

    def assign(self, part: slice, rows: "RowStatistics") -> None:
        for target, source in zip(self, rows):
            if target is not None and source is not None:
                target[part] = source

    def without_gradient(self, loss: LossConfig) -> list[Tensor]:
        """The columns that have no gradient."""
        return [self.correct] + ([self.entropy] if self.entropy is not None and not loss.entropy_coef else [])


class GradientCoefficients(NamedTuple):
    """The gradient of a function of (logprob, lse, entropy) with respect to a token's scores z, as three coefficients:

        d/dz_j = softmax * p_j + entropy * p_j * log p_j + label * [1 if j is the label, else 0]

    Here p_j is the softmax of z.  Each coefficient is [n]; `entropy` is None if the function does not depend on the
    entropy.
    """

    softmax: Tensor
    entropy: Tensor | None
    label: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "GradientCoefficients":
        return GradientCoefficients._make(None if column is None else change(column) for column in self)


def objective(rows: RowStatistics, weights: Tensor, loss: LossConfig) -> Tensor:
    """The sum of the tokens' losses, a float64 scalar.  weights: float32 [n]"""
    per_token = -rows.logprob
    if loss.z_loss_coef:
        assert rows.lse is not None
        per_token = per_token + loss.z_loss_coef * rows.lse.square()
    if loss.entropy_coef:
        assert rows.entropy is not None
        per_token = per_token - loss.entropy_coef * rows.entropy
    return (weights * per_token).sum(dtype=torch.float64)


def objective_coefficients(rows: RowStatistics, weights: Tensor, loss: LossConfig) -> GradientCoefficients:
    """The gradient coefficients of `objective`, for an upstream gradient of 1.

    d(-logprob) = p - onehot,  d lse^2 = 2 lse p,  d entropy = -p (log p + entropy)
    """
    weights = weights.to(rows.logprob.dtype)
    softmax, entropy = weights, None
    if loss.z_loss_coef:
        assert rows.lse is not None
        softmax = softmax + 2 * loss.z_loss_coef * weights * rows.lse
    if loss.entropy_coef:
        assert rows.entropy is not None
        entropy = loss.entropy_coef * weights
        softmax = softmax + entropy * rows.entropy
    return GradientCoefficients(softmax=softmax, entropy=entropy, label=-weights)


def upstream_coefficients(
    rows: RowStatistics, dlogprob: Tensor | None, dlse: Tensor | None, dentropy: Tensor | None, *_: Tensor | None
) -> GradientCoefficients:
    """The gradient coefficients for upstream gradients of logprob, lse and entropy, each [n]; None: it is 0."""
    zeros = torch.zeros_like(rows.logprob)
    label = zeros if dlogprob is None else dlogprob
    softmax = (zeros if dlse is None else dlse) - label
    entropy = None
    if dentropy is not None:
        assert rows.entropy is not None
        entropy = -dentropy
        softmax = softmax - dentropy * rows.entropy
    return GradientCoefficients(softmax=softmax, entropy=entropy, label=label)
