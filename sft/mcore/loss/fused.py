"""Hidden states -> loss without logits: supervised rows only, chunk by chunk in one buffer.

Training knows its upstream gradient beforehand (the objective is a sum with fixed weights), so `lm_loss` takes
all gradients while a chunk's scores are at hand: 3 GEMMs, and nothing is kept but the gradients themselves.
`token_statistics` serves any other objective and projects a second time in backward: 4 GEMMs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sft.config import LossConfig
from sft.mcore.loss.objective import RowStatistics, Targets, objective, objective_slopes, slopes
from sft.mcore.loss.softmax import gradient, statistics
from sft.mcore.loss.softmax_torch import blocks
from sft.mcore.loss.vocab_parallel import VocabShard, wide


def lm_loss(hidden: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig) -> tuple[Tensor, RowStatistics]:
    """See `sft.mcore.loss.lm_loss`.  The upstream gradient of the objective must be 1 where the weight's gradient
    is summed in `main_grad`: it is there before backward begins.  RuntimeError otherwise."""
    train = torch.is_grad_enabled() and (hidden.requires_grad or shard.weight.requires_grad)
    total, *columns = _Loss.apply(hidden, shard.weight, shard, targets, loss, train)
    return total, RowStatistics.of(columns)


def token_statistics(hidden: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig) -> RowStatistics:
    """See `sft.mcore.loss.token_statistics`."""
    return RowStatistics.of(_TokenStatistics.apply(hidden, shard.weight, shard, targets, loss))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        shard: VocabShard,
        targets: Targets,
        loss: LossConfig,
        train: bool,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        head = _Head(hidden, shard, targets, loss)
        sums = _Gradients(head) if train else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        every = head.room()
        for part in head.chunks():
            inputs = sums.inputs(head.whole, part) if sums else head.whole[targets.rows[part]]
            scores = head.project(inputs)
            rows = head.statistics(scores, part)
            total += objective(rows, targets.weights[part], loss)
            every[part] = rows
            if sums:
                on_scores = objective_slopes(rows, targets.weights[part], loss)
                gradient(scores, targets.labels[part], rows, on_scores, shard, out=scores)
                sums.add(part, scores, inputs)
        ctx.mark_non_differentiable(*(column for column in every.columns if column is not None))
        ctx.sums = sums
        return total, *every.columns

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError("The gradients of the fused loss are used up: it goes backward once.")
        if upstream is None:
            return (None,) * 6
        return *sums.finish(upstream), None, None, None, None


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        head = _Head(hidden, shard, targets, loss)
        every = head.room()
        for part in head.chunks():
            every[part] = head.statistics(head.project(head.whole[targets.rows[part]]), part)
        ctx.mark_non_differentiable(*every.without_gradient(loss))
        ctx.save_for_backward(hidden, weight, *every.columns)
        ctx.shard, ctx.targets, ctx.loss = shard, targets, loss
        return every.columns

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, _, *columns = ctx.saved_tensors
        every = RowStatistics.of(columns)
        on_every = slopes(every, *upstream)
        head = _Head(hidden, ctx.shard, ctx.targets, ctx.loss)
        sums = _Gradients(head)
        for part in head.chunks():
            inputs = sums.inputs(head.whole, part)
            scores = head.project(inputs)
            gradient(scores, ctx.targets.labels[part], every[part], on_every[part], ctx.shard, out=scores)
            sums.add(part, scores, inputs)
        return *sums.finish(), None, None, None


class _Head:
    """The supervised rows of one call, and the one buffer their scores are taken in."""

    def __init__(self, hidden: Tensor, shard: VocabShard, targets: Targets, loss: LossConfig) -> None:
        self.hidden, self.shard, self.targets, self.loss = hidden, shard, targets, loss
        self.whole = shard.gather(hidden)  # [t, h]
        self._chunk = loss.chunk(len(targets))
        self._buffer = shard.weight.new_empty((min(self._chunk, len(targets)), shard.weight.shape[0]))

    def chunks(self) -> Iterator[slice]:
        for start in range(0, len(self.targets), self._chunk):
            yield slice(start, min(start + self._chunk, len(self.targets)))

    def project(self, inputs: Tensor) -> Tensor:
        """[m, h] -> [m, rows of this shard], overwritten by the next call."""
        return torch.mm(inputs, self.shard.weight.detach().t(), out=self._buffer[: inputs.shape[0]])

    def statistics(self, scores: Tensor, part: slice) -> RowStatistics:
        return statistics(scores, self.targets.labels[part], self.shard, entropy=self.loss.measures_entropy)

    def room(self) -> RowStatistics:
        """For the statistics of every row."""
        return RowStatistics.empty(len(self.targets), self.whole, entropy=self.loss.measures_entropy)


class _Gradients:
    """The gradients of one call, summed over chunks: of the weight in wide precision, straight into `main_grad` where
    there is one; of the hidden states in their own.

    The hidden states' buffer [t, h] is the gradient that is handed on.  Until `finish` its first n rows are those of
    the n supervised tokens: first a chunk's inputs, then, when both products have read them, their gradient.
    """

    def __init__(self, head: "_Head") -> None:
        self._shard, self._index, self._shape = head.shard, head.targets.rows, head.hidden.shape
        self._num_rows = len(head.targets)
        self._every = self._num_rows == head.whole.shape[0]  # rows are increasing: 0 .. t - 1, nothing to select
        self._hidden = torch.empty_like(head.whole)
        self._hidden[self._num_rows :] = 0
        weight, main_grad = head.shard.weight, head.shard.main_grad
        self._into_main_grad = main_grad is not None
        self._weight = weight.new_empty(weight.shape, dtype=wide(weight.dtype)) if main_grad is None else main_grad
        self._empty = main_grad is None  # nothing has been summed yet, not even zeros

    def inputs(self, whole: Tensor, part: slice) -> Tensor:
        """Hidden states of the rows `part`, [m, h]."""
        if self._every:
            return whole[part]
        return torch.index_select(whole, 0, self._index[part], out=self._hidden[part])

    def add(self, part: slice, dscores: Tensor, inputs: Tensor) -> None:
        """dscores [m, rows of this shard] of inputs [m, h]; the inputs may be overwritten."""
        _add_product(self._weight, dscores.t(), inputs, onto_nothing=self._empty)
        self._empty = False
        torch.mm(dscores, self._shard.weight.detach(), out=self._hidden[part])

    def finish(self, upstream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Gradients of the hidden states this rank gave and of its weight, times `upstream` (None: 1)."""
        shard, some = self._shard, self._hidden[: self._num_rows]
        if self._empty:
            self._weight.zero_()
        if upstream is not None and self._into_main_grad:
            torch._assert_async(upstream == 1, "the weight's gradient was summed for an upstream gradient of 1")
        elif upstream is not None:
            some.mul_(upstream.to(some.dtype))
            if not self._empty:
                self._weight.mul_(upstream.to(self._weight.dtype))
        if not shard.sequence_parallel:
            shard.all_reduce(some)
        if not self._every:
            _spread(self._hidden, self._index)
        hidden = shard.reduce_scatter(self._hidden) if shard.sequence_parallel else self._hidden
        return hidden.view(self._shape), self._weight_gradient(shard.weight)

    def _weight_gradient(self, weight: Tensor) -> Tensor:
        if not self._into_main_grad:
            return self._weight.to(weight.dtype)
        # As megatron-core's own layers do: DistributedDataParallel waits for a gradient, but leaves it where this is
        # set, unless the weight has another use, whose gradient comes added to this one.
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, onto_nothing: bool) -> None:
    """total += a @ b, summed in the precision of `total`; `onto_nothing` takes what is in `total` for zeros."""
    beta = 0 if onto_nothing else 1
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif total.is_cuda:
        torch.addmm(total, a, b, torch.float32, beta=beta, out=total)
    else:  # no such product on a CPU
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


def _spread(dense: Tensor, index: Tensor) -> None:
    """Row i of the first n moves to row index[i] >= i, last first; the others are zero.  In place."""
    for part in reversed(list(blocks(dense[: index.numel()]))):
        _move(dense, part, index[part])


def _move(dense: Tensor, part: slice, index: Tensor) -> None:
    moved = dense[part].clone()
    dense[part] = 0
    dense[index] = moved
