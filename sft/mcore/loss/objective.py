"""Defines the objective: its tokens and their weights, the loss of a token, and the gradient with respect to scores.

    loss of a token = weight * (label_weight * -log p(label) + z_loss_coef * lse^2 - entropy_coef * entropy)
                      + weight * distill_weight * T^2 * divergence

The divergence is that from a teacher (`distill.py`), with `loss.distill`; without, label_weight is 1.

lse is the log-sum-exp of the token's scores.  The z-loss keeps lse near 0, so scores do not drift in a long run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sft.batch import Microbatch
from sft.config import LossConfig
from sft.mcore.device import send
from sft.mcore.loss.teacher import Teacher
from sft.mcore.loss.vocab_parallel import accumulation_dtype


class FurtherTargets(NamedTuple):
    """Additional targets of tokens that several branches follow (`sft.batch.BranchTargets`).

    tokens   int64 [m] on the CPU, not decreasing: each target's token, as an index in `Targets.rows`
    labels   int64 [m]
    weights  float32 [m], above 0
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor

    def within(self, part: slice) -> slice:
        """The slice of the targets whose tokens are in `part`: tokens 0 0 4 7, part 4:8 -> 2:4"""
        return slice(*torch.searchsorted(self.tokens, torch.tensor([part.start, part.stop])).tolist())

    def __len__(self) -> int:
        return self.tokens.numel()


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The supervised tokens of a microbatch on this rank."""

    rows: Tensor  # int64 [n], increasing: indices of the supervised tokens among the rank's tokens
    labels: Tensor  # int64 [n]
    weights: Tensor  # float32 [n], above 0
    further: FurtherTargets | None = None  # None: each token has one target
    teacher: Teacher | None = None  # None: no token has a teacher

    @staticmethod
    def of(microbatch: Microbatch, device: torch.device, teacher_factors: Tensor | None = None) -> "Targets":
        """Select the supervised tokens on the CPU.  A selection on the GPU would synchronise with the host.

        teacher_factors: float32 [t], the factor of each token's divergence in the objective, in addition to the sum of
        the weights of its targets; None: 0
        """
        weights, further = microbatch.loss_weights.flatten(), None
        rows = weights.nonzero().squeeze(-1)
        teacher = None
        if microbatch.teacher is not None:
            factors = torch.zeros_like(weights) if teacher_factors is None else teacher_factors
            teacher = Teacher.of(microbatch.teacher[rows], (_sums_of_weights(microbatch) * factors)[rows], device)
        if microbatch.further is not None and len(microbatch.further.rows):
            table = microbatch.further
            more = [send(torch.from_numpy(column), device) for column in (table.labels, table.weights)]
            further = FurtherTargets(torch.searchsorted(rows, torch.from_numpy(table.rows)), *more)
        chosen = rows, microbatch.labels.flatten()[rows], weights[rows]
        rows, labels, weights = (send(part, device) for part in chosen)
        return Targets(rows=rows, labels=labels, weights=weights, further=further, teacher=teacher)

    def __len__(self) -> int:
        """Number of supervised tokens, each with one or several targets."""
        return self.rows.numel()

    @property
    def all_weights(self) -> Tensor:
        """float32 [n + m]: the weights of the first targets of all tokens, then the weights of further targets."""
        return self.weights if self.further is None else torch.cat((self.weights, self.further.weights))


def _sums_of_weights(microbatch: Microbatch) -> Tensor:
    """float32 [t]: the sum of the weights of each token's targets."""
    weights, further = microbatch.loss_weights.flatten(), microbatch.further
    if further is None:
        return weights
    return weights.index_add(0, torch.from_numpy(further.rows), torch.from_numpy(further.weights))


class RowStatistics(NamedTuple):
    """Statistics of n targets, from the scores of their tokens: float32 [n], or float64 for float64 scores.

    The targets of a microbatch have the order of `Targets.all_weights`.

    lse and entropy may be None if the config does not need them; `softmax.statistics` always returns lse.  divergence
    and agrees are None without a teacher; the further targets of a token repeat the numbers of its first target.
    """

    logprob: Tensor  # log p(label)
    lse: Tensor | None  # log-sum-exp of the scores
    entropy: Tensor | None  # in nats
    correct: Tensor  # 1 if no score is above the label's score, otherwise 0; has no gradient
    divergence: Tensor | None = None  # from the teacher, in nats; 0 if this token has none
    agrees: Tensor | None = None  # 1 if no score is above that of the teacher's first id, otherwise 0; has no gradient

    @staticmethod
    def empty(num_rows: int, like: Tensor, *, entropy: bool, teacher: bool) -> "RowStatistics":
        """Uninitialised statistics of `num_rows` rows, on the device of `like`."""
        logprob, lse, correct, *rest = like.new_empty(
            (3 + entropy + 2 * teacher, num_rows), dtype=accumulation_dtype(like.dtype)
        )
        divergence, agrees = rest[-2:] if teacher else (None, None)
        return RowStatistics(logprob, lse, rest[0] if entropy else None, correct, divergence, agrees)

    def map(self, change: Callable[[Tensor], Tensor]) -> "RowStatistics":
        """Apply `change` to each column that is not None."""
        return RowStatistics._make(None if column is None else change(column) for column in self)

    def assign(self, part: slice, rows: "RowStatistics") -> None:
        for target, source in zip(self, rows):
            if target is not None and source is not None:
                target[part] = source

    def by_text(self, counts: np.ndarray) -> "RowStatistics":
        """Copies on the CPU, where each target is repeated once for each text that supervises it.

        The result has no `lse`: each column that is copied to the CPU makes the host wait for the GPU once more.

        counts: int64 [n], the number of texts that supervise each target
        """
        repeats = torch.from_numpy(counts)
        return self._replace(lse=None).map(lambda column: column.cpu().repeat_interleave(repeats))

    def followed_by(self, rows: "RowStatistics") -> "RowStatistics":
        """The statistics of these targets, followed by `rows`, the statistics of other targets."""
        columns = zip(self, rows)
        return RowStatistics._make(a if a is None or b is None else torch.cat((a, b)) for a, b in columns)

    def without_gradient(self, loss: LossConfig) -> list[Tensor]:
        """The columns that have no gradient."""
        columns = [self.correct, self.agrees, None if loss.entropy_coef else self.entropy]
        return [column for column in columns if column is not None]

    def with_teacher_of(self, rows: "RowStatistics", index: Tensor) -> "RowStatistics":
        """These statistics with divergence and agreement of `rows`.  index: int64 [n], the row of each target"""
        if rows.divergence is None or rows.agrees is None:
            return self
        return self._replace(divergence=rows.divergence[index], agrees=rows.agrees[index])


class GradientCoefficients(NamedTuple):
    """The gradient of a function of (logprob, lse, entropy) with respect to a token's scores z, as three coefficients:

        d/dz_j = softmax * p_j + entropy * p_j * log p_j + label * [1 if j is the label, else 0]

    Here p_j is the softmax of z.  Each coefficient is [n]; `entropy` is None if the function does not depend on the
    entropy.
    """

    softmax: Tensor
    entropy: Tensor | None
    label: Tensor

    def with_further(self, index: Tensor, further: "GradientCoefficients") -> "GradientCoefficients":
        """The coefficients of tokens with the sums over their further targets.  `label` stays that of the first target.

        index: int64 [m], the token of each further target; further: the coefficients of these targets, [m]
        """
        entropy = self.entropy
        if entropy is not None and further.entropy is not None:
            entropy = entropy.index_add(0, index, further.entropy)
        return GradientCoefficients(self.softmax.index_add(0, index, further.softmax), entropy, self.label)

    def map(self, change: Callable[[Tensor], Tensor]) -> "GradientCoefficients":
        return GradientCoefficients._make(None if column is None else change(column) for column in self)


def objective(rows: RowStatistics, weights: Tensor, loss: LossConfig) -> Tensor:
    """The sum of the tokens' losses without divergences, a float64 scalar.  weights: float32 [n]"""
    per_token = -loss.distill.label_weight * rows.logprob
    if loss.z_loss_coef:
        assert rows.lse is not None
        per_token = per_token + loss.z_loss_coef * rows.lse.square()
    if loss.entropy_coef:
        assert rows.entropy is not None
        per_token = per_token - loss.entropy_coef * rows.entropy
    return (weights * per_token).sum(dtype=torch.float64)


def divergence_term(rows: RowStatistics, teacher: Teacher | None) -> Tensor | float:
    """The sum of the divergences, each times its weight: a float64 scalar; 0 without a teacher.

    rows: statistics of n tokens, or of n + m targets whose first n are the targets of the teacher's tokens
    """
    if teacher is None or rows.divergence is None:
        return 0.0
    return (teacher.weights * rows.divergence[: len(teacher.weights)]).sum(dtype=torch.float64)


def objective_coefficients(rows: RowStatistics, weights: Tensor, loss: LossConfig) -> GradientCoefficients:
    """The gradient coefficients of `objective`, for an upstream gradient of 1; the divergence has its own gradient.

    d(-logprob) = p - onehot,  d lse^2 = 2 lse p,  d entropy = -p (log p + entropy)
    """
    weights = weights.to(rows.logprob.dtype)
    softmax, entropy = loss.distill.label_weight * weights, None
    if loss.z_loss_coef:
        assert rows.lse is not None
        softmax = softmax + 2 * loss.z_loss_coef * weights * rows.lse
    if loss.entropy_coef:
        assert rows.entropy is not None
        entropy = loss.entropy_coef * weights
        softmax = softmax + entropy * rows.entropy
    return GradientCoefficients(softmax=softmax, entropy=entropy, label=-loss.distill.label_weight * weights)


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
