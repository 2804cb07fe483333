"""Computes the divergence of the student's next-token distribution from a teacher's, and its gradient.

Both distributions are reduced to the same outcomes: the k ids of the teacher's list, and with `tail: bucket` one more
outcome, the bucket, for all other tokens.  The log-probabilities of the outcomes at temperature 1 are divided by the
temperature T, for teacher and student alike, and normalised over the outcomes:

    log p_o(T) = log p_o / T - log(sum over outcomes of exp(log p_o / T))

If the list is the whole vocabulary, this is softmax(scores / T).  `docs/concepts/distill.md` has all formulas.

The bucket's probability is a sum over the other tokens, and not 1 minus the known ones, which would lose its digits if
it is small.  For this, TAKEN_OUT, whose exponential is 0, replaces the scores of the known ids in the chunk itself.
"""

import math

import torch
from torch import Tensor

from sft.config.distill import DistillConfig
from sft.mcore.loss.objective import GradientCoefficients, RowStatistics
from sft.mcore.loss.softmax import TAKEN_OUT, gradient, largest_and_lse
from sft.mcore.loss.teacher import Teacher
from sft.mcore.loss.vocab_parallel import VocabShard, accumulation_dtype

# Smallest probability of the teacher's bucket.  Known log-probabilities of fp32 sum to 1 up to such an error.
_SMALLEST_REST = 1e-7
_LARGEST_EXPONENT = 80.0  # exp(80) is finite in fp32, also as a factor of 1e3


class Distilled:
    """The divergence of the n rows of a chunk of scores [n, rows of this shard], and its gradient.

    The constructor takes the scores of the teacher's ids out of the chunk.  They come back with `put_back`, or `write`
    replaces them by their gradient.

    value   [n], divergences in nats; 0 without a teacher
    agrees  [n], 1 if no score of the student is above that of the teacher's first id, otherwise 0
    """

    def __init__(
        self, scores: Tensor, teacher: Teacher, rows: RowStatistics, shard: VocabShard, distill: DistillConfig
    ) -> None:
        """Collective over tp: one all-reduce of k floats per row, and one all-gather of 3.

        rows: the statistics of the scores
        """
        assert rows.lse is not None
        self._ids, self._weights, self._rows, self._shard = (teacher.ids, teacher.weights, rows, shard)
        self._take_out(scores)
        largest, lse = largest_and_lse(scores, shard)  # of all other tokens
        listed = torch.where(teacher.ids >= 0, self._scores, TAKEN_OUT)
        self.agrees = (teacher.is_known & (listed[:, 0] >= torch.maximum(largest, listed.amax(-1)))).to(lse.dtype)
        rest, has_rest = (lse - rows.lse, lse > TAKEN_OUT / 2)  # no rest: the list is the whole vocabulary
        self.value, derivatives = of_outcomes(self._scores - rows.lse[:, None], rest, teacher, has_rest, distill)
        # with respect to log p of each id; and to log p of the bucket, divided by p of the bucket
        self._of_known = derivatives[:, :-1]
        self._of_rest = torch.where(has_rest, derivatives[:, -1] * (-rest).clamp(max=_LARGEST_EXPONENT).exp(), 0.0)

    def _take_out(self, scores: Tensor) -> None:
        """Read the scores of the teacher's ids, and replace them by TAKEN_OUT.

        Sets _column, int64 [n, k], the columns of the ids that are `_local` to this shard; _stored [n, k], their scores
        in the dtype of the chunk; and _scores [n, k], the scores of all ids in the precision of the sums, with the soft
        cap, which are equal on all tp ranks.
        """
        shard, column = self._shard, self._ids.long() - self._shard.first
        self._local = (self._ids >= 0) & (column >= 0) & (column < shard.num_real)
        self._column = torch.where(self._local, column, 0)
        self._stored = scores.gather(1, self._column)
        wide = self._stored.to(accumulation_dtype(scores.dtype))
        if shard.softcap is not None:
            wide = torch.tanh(wide / shard.softcap).mul_(shard.softcap)
        self._scores = torch.where(self._local, wide, 0.0)
        shard.all_reduce(self._scores)
        # The smaller of both, because ids of other shards have column 0, which must stay as it is.
        scores.scatter_reduce_(1, self._column, torch.where(self._local, TAKEN_OUT, torch.inf).to(scores.dtype), "amin")

    def put_back(self, scores: Tensor) -> None:
        """Restore the chunk, bit for bit."""
        stored = torch.where(self._local, self._stored, -torch.inf)
        scores.scatter_reduce_(1, self._column, stored, "amax")

    def write(self, scores: Tensor, labels: Tensor, coefficients: GradientCoefficients, *, out: Tensor) -> None:
        """Write the gradient of the objective with respect to the scores to `out`: the scores, or another buffer.

        scores: the chunk without the teacher's ids; labels: int64 [n]
        coefficients: those of the objective without divergences
        """
        is_label, shard = self._ids == labels[:, None], self._shard
        elsewhere = torch.where(is_label.any(1), -1, labels)  # `gradient` writes no label of -1
        gradient(scores, elsewhere, self._rows, self.with_rest(coefficients), shard, out=out)
        logprobs = torch.where(is_label, self._rows.logprob[:, None], self._scores - self._lse[:, None])
        slope = coefficients.softmax[:, None]
        if coefficients.entropy is not None:
            slope = slope + coefficients.entropy[:, None] * logprobs
        known = logprobs.exp() * slope + torch.where(is_label, coefficients.label[:, None], 0.0)
        known += self._weights[:, None] * self._of_known
        if shard.softcap is not None:
            known *= 1.0 - (self._scores / shard.softcap).square()
        # `gradient` has written 0 for these scores, and ids of other shards add 0 to column 0.
        out.scatter_add_(1, self._column, torch.where(self._local, known, 0.0).to(out.dtype))

    def with_rest(self, coefficients: GradientCoefficients) -> GradientCoefficients:
        """The coefficients of the scores that are not in the teacher's lists, with the divergence."""
        return coefficients._replace(softmax=coefficients.softmax + self._weights * self._of_rest)

    def lists(self, index: Tensor, labels: Tensor) -> Tensor:
        """bool [m]: whether labels[i] is in the teacher's list of row index[i].  index, labels: int64 [m]"""
        return (self._ids[index] == labels[:, None]).any(1)

    @property
    def _lse(self) -> Tensor:
        assert self._rows.lse is not None
        return self._rows.lse


def of_outcomes(
    known: Tensor, rest: Tensor, teacher: Teacher, has_rest: Tensor, distill: DistillConfig
) -> tuple[Tensor, Tensor]:
    """The divergence [n], and its derivatives with respect to the student's log-probabilities, [n, k + 1].

    known: the student's log-probabilities of the teacher's ids, [n, k]; rest: that of all other tokens, [n]
    has_rest: bool [n], whether there are other tokens
    """
    listed, logprobs_at_1 = teacher.ids >= 0, teacher.logprobs.to(known.dtype)
    # In float64, because the sum may be close to 1.
    missing = 1.0 - torch.where(listed, logprobs_at_1, -torch.inf).double().exp().sum(-1)
    rest_at_1 = missing.clamp(min=_SMALLEST_REST).log().to(known.dtype)
    is_outcome = torch.cat((listed, (has_rest & teacher.is_known & (distill.tail == "bucket"))[:, None]), dim=1)

    def tempered(of_known: Tensor, of_rest: Tensor) -> Tensor:
        """Log-probabilities over the outcomes at the temperature, [n, k + 1]; TAKEN_OUT where there is no outcome."""
        logprobs = torch.cat((of_known, of_rest[:, None]), dim=1)
        return torch.where(is_outcome, logprobs / distill.temperature, TAKEN_OUT).log_softmax(-1)

    log_p, log_q = tempered(logprobs_at_1, rest_at_1), tempered(known, rest)  # of teacher and student
    p, q = (torch.where(is_outcome, logprobs.exp(), 0.0) for logprobs in (log_p, log_q))
    if distill.direction == "forward":
        value, derivatives = (p * (log_p - log_q)).sum(-1), q - p
    elif distill.direction == "reverse":
        away = log_q - log_p
        value = (q * away).sum(-1)
        derivatives = q * (away - value[:, None])
    else:
        middle = torch.logaddexp(log_p, log_q) - math.log(2.0)
        away = log_q - middle
        to_middle = (q * away).sum(-1)
        value = 0.5 * ((p * (log_p - middle)).sum(-1) + to_middle)
        derivatives = 0.5 * q * (away - to_middle[:, None])
    return value, derivatives / distill.temperature
