"""Computes statistics of scores over a split vocabulary, and the gradient of functions of these statistics.

`statistics` and `gradient` cover the whole vocabulary.  `statistics` calls `row_sums`, and `gradient` calls
`score_gradient`; each of these makes one pass over the scores of this shard.  Both passes exist here in plain torch,
and in Triton for CUDA (`softmax_triton.py`).  The torch passes work on blocks of a few rows, so no temporary is as
large as the scores.

With a soft cap c, c * tanh(s / c) replaces a score s (Gemma 2, arXiv:2408.00118), in the precision of the sums.  The
stored scores are not capped, and `gradient` is the gradient with respect to s: it has the factor 1 - tanh(s / c)^2.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from sft.mcore.loss.objective import GradientCoefficients, RowStatistics
from sft.mcore.loss.vocab_parallel import VocabShard, accumulation_dtype

TAKEN_OUT = -1e30  # a score that counts as no score: its exponential is 0 (`distill.py`); bf16 and fp32 have it
_FAR = -1e4  # replaces -inf, the largest score of an empty shard: -inf * 0 would be NaN; exp(_FAR) is 0 in every format
# Bytes of a block.  A block fits the cache of a CPU core; on CUDA it fills the device and is smaller than the scores.
_BLOCK_BYTES = {"cpu": 1 << 19, "cuda": 1 << 26}


def statistics(scores: Tensor, labels: Tensor, shard: VocabShard, *, entropy: bool) -> RowStatistics:
    """The statistics of each row over the whole vocabulary.  scores: [n, rows of this shard]; labels: int64 [n]

    Collective over tp: one all-gather of 3 floats per row, or 4 with entropy.
    """
    largest, total, score, *moment = _sums(scores, labels, shard, entropy)
    log_total = total.log()
    return RowStatistics(
        logprob=score - largest - log_total,  # this order is exact for values near 0
        lse=largest + log_total,
        entropy=log_total - moment[0] / total if moment else None,
        correct=(score >= largest).to(score.dtype),
    )


def largest_and_lse(scores: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """The largest score and the log-sum-exp of each row over the whole vocabulary, [n] each.  Scores of TAKEN_OUT count
    as no scores; in a row of such scores both results are below TAKEN_OUT / 2.

    scores: [n, rows of this shard].  Collective over tp: one all-gather of 3 floats per row
    """
    nowhere = torch.full(scores.shape[:1], -1, dtype=torch.int64, device=scores.device)
    largest, total, _ = _sums(scores, nowhere, shard, entropy=False)
    return largest, largest + total.log()


def _sums(scores: Tensor, labels: Tensor, shard: VocabShard, entropy: bool) -> Sequence[Tensor]:
    """`row_sums` over the whole vocabulary: 3 tensors [n], or 4 with `entropy`; no shard has a label of -1."""
    sums_of, _ = _passes(scores.is_cuda)
    local_sums: Tensor = sums_of(scores, labels - shard.first, shard.num_real, entropy, shard.softcap)
    if shard.group.size() == 1:
        return local_sums.unbind(0)
    gathered = shard.all_gather(local_sums)
    largests, totals, scores_, *moments = gathered.unbind(1)
    largest = largests.amax(0)
    shift = (largests - largest).clamp_(min=_FAR)
    scale = shift.exp()
    moment = [(scale * (part + totals * shift)).sum(0) for part in moments]
    return largest, (totals * scale).sum(0), scores_.sum(0), *moment


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

    out: the scores themselves, or a buffer of the same shape and dtype; columns that pad the vocabulary get 0
    """
    _, write_gradient = _passes(scores.is_cuda)
    write_gradient(
        scores, labels - shard.first, shard.num_real, rows.logprob, rows.lse, coefficients, out, shard.softcap
    )


def correct_labels(
    index: Tensor,
    labels: Tensor,
    rows: RowStatistics,
    coefficients: GradientCoefficients,
    shard: VocabShard,
    *,
    out: Tensor,
    listed: Tensor | None = None,
) -> None:
    """Correct the gradient with respect to the scores of further labels in `out`, the result of `gradient`.

    `gradient` knows only the first label of each row.

    index, labels: int64 [m], the row and the label of each further target; rows: [m], statistics of these targets
    coefficients: [m], the coefficients of the rows, with the `label` of these targets
    listed: bool [m], whether `out` already has the gradient of the label's score, but for the `label`; None: nowhere
    """
    assert rows.lse is not None
    own, column = _own(labels - shard.first, shard.num_real)
    exact = _label_gradient(rows.logprob, rows.lse, coefficients, shard.softcap)
    # Labels of other shards are clamped to a valid column here.  They must add 0 to it, not overwrite it.
    change = exact - out[index, column]
    if listed is not None:
        cap = 1.0 if shard.softcap is None else 1.0 - ((rows.logprob + rows.lse) / shard.softcap).square()
        change = torch.where(listed, coefficients.label * cap, change)
    change = torch.where(own, change, 0.0).to(out.dtype)
    out.index_put_((index, column), change, accumulate=True)


@functools.cache
def _passes(is_cuda: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`row_sums` and `score_gradient` for this device."""
    if is_cuda:
        with suppress(ImportError):  # torch for CUDA brings Triton on Linux, and only there
            from sft.mcore.loss import softmax_triton

            return softmax_triton.row_sums, softmax_triton.score_gradient
    return row_sums, score_gradient


def row_sums(scores: Tensor, local: Tensor, num_real: int, entropy: bool, softcap: float | None = None) -> Tensor:
    """Sums over this shard's real columns: scores z [n, columns] -> [3, n], or [4, n] with `entropy`.

    The rows of the result are the largest score m, the sum of exp(z - m), the label's score (0 if the label is in
    another shard), and with `entropy` the sum of exp(z - m) (z - m).

    local: the labels relative to the first row of this shard
    """
    sums = scores.new_zeros((4 if entropy else 3, scores.shape[0]), dtype=accumulation_dtype(scores.dtype))
    if num_real == 0:  # this shard holds only padding of the vocabulary
        sums[0] = -torch.inf
        return sums
    own, column = _own(local, num_real)
    for block in blocks(scores):
        _sum_block(scores[block, :num_real], column[block], sums[:, block], softcap)
    sums[2].masked_fill_(~own, 0.0)
    return sums


def _sum_block(scores: Tensor, column: Tensor, sums: Tensor, softcap: float | None) -> None:
    """Write the sums of one block to `sums`.  column: the label's column of each row

    This is a separate function, so that temporaries are freed before the next block.
    """
    wider = scores.to(sums.dtype)
    if softcap is not None:
        wider = torch.where(wider > TAKEN_OUT / 2, torch.tanh(wider / softcap).mul_(softcap), wider)
    sums[2] = wider.gather(1, column[:, None]).squeeze(1)
    torch.amax(wider, -1, out=sums[0])
    shifted = wider - sums[0][:, None]
    if sums.shape[0] == 4:
        torch.sum(shifted.exp().mul_(shifted), -1, out=sums[3])
    torch.sum(shifted.exp_(), -1, out=sums[1])


def score_gradient(
    scores: Tensor,
    local: Tensor,
    num_real: int,
    logprob: Tensor,
    lse: Tensor,
    coefficients: GradientCoefficients,
    out: Tensor,
    softcap: float | None = None,
) -> None:
    """Write the gradient with respect to the scores of this shard to `out` [n, columns].

    local: the labels relative to the first row of this shard; num_real: number of real columns; logprob, lse: [n]
    """
    out[:, num_real:] = 0.0
    if num_real == 0:
        return
    own, column = _own(local, num_real)
    for block in blocks(scores):
        _gradient_block(
            scores[block, :num_real],
            lse[block, None],
            coefficients.map(itemgetter(block)),
            out[block, :num_real],
            softcap,
        )
    exact, column = _label_gradient(logprob, lse, coefficients, softcap).to(out.dtype), column[:, None]
    out.scatter_(1, column, torch.where(own[:, None], exact[:, None], out.gather(1, column)))


def _label_gradient(logprob: Tensor, lse: Tensor, coefficients: GradientCoefficients, softcap: float | None) -> Tensor:
    """The gradient with respect to the label's score, [n].

    It is computed from the statistics, because bf16 would round p before 1 is subtracted.
    """
    slope = coefficients.softmax
    if coefficients.entropy is not None:
        slope = slope + coefficients.entropy * logprob
    exact = logprob.exp() * slope + coefficients.label
    if softcap is not None:
        exact = exact * (1.0 - ((logprob + lse) / softcap).square())  # the capped score is logprob + lse
    return exact


def _gradient_block(
    scores: Tensor, lse: Tensor, coefficients: GradientCoefficients, out: Tensor, softcap: float | None
) -> None:
    softmax = coefficients.softmax[:, None]
    if softcap is not None:
        share = torch.tanh(scores.to(lse.dtype) / softcap)
        capped = torch.empty_like(share)  # the gradient of the capped scores
        _gradient_block(share * softcap, lse, coefficients, capped, None)
        out.copy_(capped.mul_(1.0 - share.square_()))
    elif coefficients.entropy is not None:
        logprobs = scores.to(lse.dtype) - lse
        powers = logprobs.exp()
        out.copy_(powers.mul_(logprobs.mul_(coefficients.entropy[:, None]).add_(softmax)))
    elif out.dtype == lse.dtype:
        torch.sub(scores, lse, out=out).exp_().mul_(softmax)
    else:
        out.copy_((scores.to(lse.dtype) - lse).exp_().mul_(softmax))


def _own(local: Tensor, num_real: int) -> tuple[Tensor, Tensor]:
    """Whether each label is a column of this shard, and a valid column index for each label."""
    return (local >= 0) & (local < num_real), local.clamp(0, num_real - 1)


def blocks(x: Tensor) -> Iterator[slice]:
    """Slices of rows of `x` [n, ...], of about _BLOCK_BYTES each in fp32 or float64, but of at least one row."""
    row_bytes = max(1, x[:1].numel()) * torch.empty((), dtype=accumulation_dtype(x.dtype)).element_size()
    return slices(x.shape[0], max(1, _BLOCK_BYTES[x.device.type] // row_bytes))


def slices(count: int, size: int) -> Iterator[slice]:
    """Consecutive slices of `size` rows, the last one shorter: count 5, size 2 -> 0:2, 2:4, 4:5"""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
