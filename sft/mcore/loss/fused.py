"""Computes the loss without holding all logits: a buffer has the scores of one chunk of supervised tokens at a time.

In training the upstream gradient is known in advance, because the objective is a sum with fixed weights.  So `lm_loss`
computes all gradients while the scores of a chunk exist (3 GEMMs), and keeps only the gradients.  If the output weight
is frozen, it needs one GEMM less and no buffer for the weight's gradient.
"""

from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sft.config import LossConfig
from sft.mcore.device import send
from sft.mcore.loss.distill import Distilled
from sft.mcore.loss.objective import (
    GradientCoefficients,
    RowStatistics,
    Targets,
    divergence_term,
    objective,
    objective_coefficients,
)
from sft.mcore.loss.softmax import blocks, correct_labels, gradient, slices, statistics
from sft.mcore.loss.vocab_parallel import VocabShard, accumulation_dtype


def lm_loss(hidden: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig) -> tuple[Tensor, RowStatistics]:
    """See `sft.mcore.loss.lm_loss`.

    If the output weight has a `main_grad`, the forward pass already adds the weight's gradient to `main_grad`.  In this
    case, an upstream gradient other than 1 raises RuntimeError.
    """
    train = torch.is_grad_enabled() and (hidden.requires_grad or shard.weight.requires_grad)
    total, *columns = _Loss.apply(hidden, shard.weight, shard, targets, loss, train)
    return total, RowStatistics._make(columns)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig, train: bool
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        head = _ChunkedHead(hidden, shard, targets, loss)
        gradients = _Gradients(head) if train else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        all_rows = head.allocate_statistics()
        for part in head.chunks():
            inputs = gradients.inputs(head.whole, part) if gradients else head.whole[targets.rows[part]]
            scores = head.project(inputs)
            total += head.measure(scores, part, all_rows, train)
            if gradients:
                gradients.add(part, scores, inputs)
        ctx.mark_non_differentiable(*(column for column in all_rows if column is not None))
        ctx.gradients = gradients
        return total, *all_rows

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("backward of the fused loss can run only once: its gradients are not kept.")
        if upstream is None:
            return (None,) * 6
        return *gradients.finish(upstream), None, None, None, None


class _Further(NamedTuple):
    """The further targets of a chunk of tokens.

    tokens   int64 [m], each target's token, as an index in the chunk
    numbers  the targets' slice of the statistics of all targets
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    rows: RowStatistics
    numbers: slice


class _ChunkedHead:
    """The supervised tokens of one call, and the buffer that holds the scores of one chunk of them."""

    def __init__(self, hidden: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig) -> None:
        self.hidden, self.shard, self.targets, self.loss = hidden, shard, targets, loss
        self.whole = shard.gather(hidden)  # [t, h]
        self._chunk = loss.chunk(len(targets))
        self._buffer = shard.weight.new_empty((min(self._chunk, len(targets)), shard.weight.shape[0]))

    def chunks(self) -> Iterator[slice]:
        return slices(len(self.targets), self._chunk)

    def project(self, inputs: Tensor) -> Tensor:
        """Scores of inputs [m, h] -> [m, rows of this shard].  The next call overwrites these scores."""
        return torch.mm(inputs, self.shard.weight.detach().t(), out=self._buffer[: inputs.shape[0]])

    def measure(self, scores: Tensor, part: slice, all_rows: RowStatistics, train: bool) -> Tensor:
        """The objective of the tokens `part`, whose statistics are written to `all_rows`.

        train: whether the gradient of the objective replaces the scores
        """
        targets, loss, teacher = self.targets, self.loss, None
        labels, weights = targets.labels[part], targets.weights[part]
        rows = statistics(scores, labels, self.shard, entropy=loss.measures_entropy)
        further = self._further(scores, part)
        distilled = None
        if targets.teacher is not None:
            teacher = targets.teacher.map(itemgetter(part))
            distilled = Distilled(scores, teacher, rows, self.shard, loss.distill)
            rows = rows._replace(divergence=distilled.value, agrees=distilled.agrees)
        all_rows.assign(part, rows)
        total = objective(rows, weights, loss) + divergence_term(rows, teacher)
        if further is not None:
            further = further._replace(rows=further.rows.with_teacher_of(rows, further.tokens))
            all_rows.assign(further.numbers, further.rows)
            total = total + objective(further.rows, further.weights, loss)
        if train:
            coefficients = objective_coefficients(rows, weights, loss)
            self._write_gradient(scores, labels, rows, coefficients, further, distilled)
        return total

    def _further(self, scores: Tensor, part: slice) -> "_Further | None":
        """The further targets of the tokens `part`, with their statistics; None: there are none."""
        if self.targets.further is None:
            return None
        numbers = self.targets.further.within(part)
        if numbers.start == numbers.stop:
            return None
        index, labels, weights = (column[numbers] for column in self.targets.further)
        index = send(index - part.start, scores.device)
        rows = statistics(scores[index], labels, self.shard, entropy=self.loss.measures_entropy)
        first = len(self.targets)
        return _Further(index, labels, weights, rows, slice(first + numbers.start, first + numbers.stop))

    def _write_gradient(
        self,
        scores: Tensor,
        labels: Tensor,
        rows: RowStatistics,
        coefficients: GradientCoefficients,
        further: "_Further | None",
        distilled: Distilled | None,
    ) -> None:
        """Replace the scores of a chunk by their gradient.  coefficients: those of the first targets' objective"""
        if further is not None:
            others = objective_coefficients(further.rows, further.weights, self.loss)
            coefficients = coefficients.with_further(further.tokens, others)
        if distilled is None:
            gradient(scores, labels, rows, coefficients, self.shard, out=scores)
        else:
            distilled.write(scores, labels, coefficients, out=scores)
            coefficients = distilled.with_rest(coefficients)
        if further is not None:
            index, more = further.tokens, further.labels
            shared = coefficients.map(lambda column: column[index])._replace(label=others.label)
            listed = None if distilled is None else distilled.lists(index, more)
            correct_labels(index, more, further.rows, shared, self.shard, out=scores, listed=listed)

    def allocate_statistics(self) -> RowStatistics:
        """Empty statistics of all targets."""
        targets = self.targets
        return RowStatistics.empty(
            len(targets.all_weights),
            self.whole,
            entropy=self.loss.measures_entropy,
            teacher=targets.teacher is not None,
        )


class _Gradients:
    """The gradients of one call: of the hidden states, and of the weight if it requires one, summed over chunks.

    One buffer [t, h], in the dtype of the hidden states, holds both inputs and gradients.  Until `finish`, its first n
    rows belong to the n supervised tokens.  A row first holds the hidden state of its token, and after all GEMMs of its
    chunk have read it, the gradient.
    """

    def __init__(self, head: "_ChunkedHead") -> None:
        self._shard, self._index, self._shape = head.shard, head.targets.rows, head.hidden.shape
        self._num_rows = len(head.targets)
        self._all_supervised = self._num_rows == head.whole.shape[0]  # rows are 0 .. t - 1
        self._hidden = torch.empty_like(head.whole)
        self._hidden[self._num_rows :] = 0
        self._weight = _WeightGradient(head.shard) if head.shard.weight.requires_grad else None

    def inputs(self, whole: Tensor, part: slice) -> Tensor:
        """The hidden states of the supervised tokens `part`, [m, h], from `whole` [t, h]."""
        if self._all_supervised:
            return whole[part]
        return torch.index_select(whole, 0, self._index[part], out=self._hidden[part])

    def add(self, part: slice, dscores: Tensor, inputs: Tensor) -> None:
        """Add the gradients of a chunk: dscores [m, rows of this shard], inputs [m, h].  May overwrite the inputs."""
        if self._weight is not None:
            self._weight.add(dscores, inputs)
        torch.mm(dscores, self._shard.weight.detach(), out=self._hidden[part])

    def finish(self, upstream: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients of this rank's hidden states and of its weight (None: frozen), times `upstream`."""
        shard, supervised = self._shard, self._hidden[: self._num_rows]
        if self._weight is not None and self._weight.in_main_grad:
            torch._assert_async(upstream == 1, "the weight's gradient was summed for an upstream gradient of 1")
        else:
            supervised.mul_(upstream.to(supervised.dtype))
        if not shard.sequence_parallel:
            shard.all_reduce(supervised)
        if not self._all_supervised:
            _spread(self._hidden, self._index)
        hidden = shard.reduce_scatter(self._hidden) if shard.sequence_parallel else self._hidden
        return hidden.view(self._shape), (None if self._weight is None else self._weight.finish(upstream))


class _WeightGradient:
    """The gradient of the shard's weight, summed in float32, or float64 for a float64 weight.

    The sum is in the weight's `main_grad`, if that has the dtype of the sum, else in a new tensor.
    """

    def __init__(self, shard: VocabShard) -> None:
        self._weight, main_grad = shard.weight, shard.main_grad
        self.in_main_grad = main_grad is not None
        self._sum = (
            shard.weight.new_empty(shard.weight.shape, dtype=accumulation_dtype(shard.weight.dtype))
            if main_grad is None
            else main_grad
        )
        self._uninitialised = main_grad is None

    def add(self, dscores: Tensor, inputs: Tensor) -> None:
        _add_product(self._sum, dscores.t(), inputs, overwrite=self._uninitialised)
        self._uninitialised = False

    def finish(self, upstream: Tensor) -> Tensor:
        """The gradient of the weight for autograd, times `upstream`, which must be 1 if the sum is in `main_grad`."""
        weight = self._weight
        if self.in_main_grad:
            # As in core's layers: DistributedDataParallel waits for a gradient, and ignores its value if the flag is
            # set.  If the weight has another use, autograd sums the gradients of both uses, so this one must be zeros.
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
        if self._uninitialised:  # no supervised token
            self._sum.zero_()
        else:
            self._sum.mul_(upstream.to(self._sum.dtype))
        return self._sum.to(weight.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, overwrite: bool) -> None:
    """Compute total += a @ b, or total = a @ b with `overwrite`, in the precision of `total`."""
    beta = 0 if overwrite else 1
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif total.is_cuda:
        torch.addmm(total, a, b, torch.float32, beta=beta, out=total)
    else:  # on a CPU, torch has no GEMM with a wider output dtype
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


def _spread(dense: Tensor, index: Tensor) -> None:
    """Move row i of `dense`, for i < n, to row index[i], in place.  All other rows become zero.

    index: int64 [n], increasing.  Since index[i] >= i, the last rows move first, so no row is overwritten before it has
    moved.
    """
    for part in reversed(list(blocks(dense[: index.numel()]))):
        _move(dense, part, index[part])


def _move(dense: Tensor, part: slice, index: Tensor) -> None:
    moved = dense[part].clone()
    dense[part] = 0
    dense[index] = moved
