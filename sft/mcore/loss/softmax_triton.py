"""Implements the two passes of `softmax.py` in Triton for CUDA.  Each row has one program, which reads the row once.

`row_sums` keeps a running maximum, and rescales its sums when the maximum grows.  `score_gradient` may overwrite the
scores, because the same program reads and writes an element.  A kernel gets a soft cap of 0 if there is none.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.mcore.loss.objective import GradientCoefficients
from sft.mcore.loss.softmax import TAKEN_OUT
from sft.mcore.loss.vocab_parallel import accumulation_dtype

_BLOCK = 4096  # columns at a time
_WARPS = 8
_NO_SCORE = tl.constexpr(TAKEN_OUT / 2)  # scores below have no soft cap


def row_sums(scores: Tensor, local: Tensor, num_real: int, entropy: bool, softcap: float | None = None) -> Tensor:
    """See `softmax.row_sums`."""
    sums = scores.new_empty((4 if entropy else 3, scores.shape[0]), dtype=accumulation_dtype(scores.dtype))
    if scores.shape[0]:
        block = min(_BLOCK, triton.next_power_of_2(scores.shape[1]))
        _row_sums[(scores.shape[0],)](
            scores,
            scores.stride(0),
            local,
            num_real,
            sums,
            sums.stride(0),
            softcap or 0.0,
            CAPPED=softcap is not None,
            ENTROPY=entropy,
            WIDE=tl.float64 if sums.dtype == torch.float64 else tl.float32,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return sums


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
    """See `softmax.score_gradient`."""
    if scores.shape[0] == 0:
        return
    # The kernel reads `entropy` only if ENTROPY is true.
    entropy = coefficients.softmax if coefficients.entropy is None else coefficients.entropy
    _score_gradient[(scores.shape[0],)](
        scores,
        scores.stride(0),
        out,
        out.stride(0),
        local,
        num_real,
        scores.shape[1],
        logprob.contiguous(),
        lse.contiguous(),
        coefficients.softmax.contiguous(),
        entropy.contiguous(),
        coefficients.label.contiguous(),
        softcap or 0.0,
        CAPPED=softcap is not None,
        ENTROPY=coefficients.entropy is not None,
        WIDE=tl.float64 if lse.dtype == torch.float64 else tl.float32,
        BLOCK=min(_BLOCK, triton.next_power_of_2(scores.shape[1])),
        num_warps=_WARPS,
    )


@triton.jit
def _row_sums(  # type: ignore[no-untyped-def]
    scores,
    stride,
    local,
    num_real,
    sums,
    sums_stride,
    softcap,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = scores + row * stride
    largest = tl.full((), float("-inf"), WIDE)
    total = tl.full((), 0.0, WIDE)
    moment = tl.full((), 0.0, WIDE)
    for start in range(0, num_real, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(base + columns, mask=columns < num_real, other=float("-inf")).to(WIDE)
        if CAPPED:
            z = tl.where(z > _NO_SCORE, softcap * _tanh(z / softcap), z)
        new = tl.maximum(largest, tl.max(z, 0))
        # Earlier sums are relative to `largest`.  It is -inf in the first block, and -inf - new must not be used.
        shift = tl.where(total > 0, largest - new, 0.0)
        scale = tl.exp(shift)
        away = z - new
        powers = tl.exp(away)
        if ENTROPY:
            moment = scale * (moment + total * shift) + tl.sum(tl.where(columns < num_real, powers * away, 0.0), 0)
        total = total * scale + tl.sum(powers, 0)
        largest = new
    label = tl.load(local + row)
    own = (label >= 0) & (label < num_real)
    picked = tl.load(base + label, mask=own, other=0.0).to(WIDE)
    if CAPPED:
        picked = softcap * _tanh(picked / softcap)
    tl.store(sums + row, largest)
    tl.store(sums + sums_stride + row, total)
    tl.store(sums + 2 * sums_stride + row, picked)
    if ENTROPY:
        tl.store(sums + 3 * sums_stride + row, moment)


@triton.jit
def _score_gradient(  # type: ignore[no-untyped-def]
    scores,
    stride,
    out,
    out_stride,
    local,
    num_real,
    num_columns,
    logprob,
    lse,
    softmax,
    entropy,
    label,
    softcap,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = scores + row * stride
    norm = tl.load(lse + row)
    slope = tl.load(softmax + row)
    on_label = tl.load(label + row)
    exact = tl.load(logprob + row)  # not score - lse, which cancels near 0
    target = tl.load(local + row)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        real = columns < num_real
        z = tl.load(base + columns, mask=real, other=0.0).to(WIDE)
        if CAPPED:
            share = _tanh(z / softcap)
            z = softcap * share
        logprobs = z - norm
        logprobs = tl.where(columns == target, exact, logprobs)
        g = tl.exp(logprobs) * slope
        if ENTROPY:
            g += tl.exp(logprobs) * logprobs * tl.load(entropy + row)
        g += tl.where(columns == target, on_label, 0.0)
        if CAPPED:
            g *= 1.0 - share * share
        g = tl.where(real, g, 0.0)
        tl.store(out + row * out_stride + columns, g.to(out.dtype.element_ty), mask=columns < num_columns)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """tanh(x).  For |x| < 0.1 it is a Taylor series, because 1 - exp(-2 |x|) would lose digits.

    At x = 0.1, the first omitted term is 1e-12 times x.
    """
    size = tl.abs(x)
    power = tl.exp(-2.0 * size)
    far = tl.where(x < 0.0, -1.0, 1.0) * (1.0 - power) / (1.0 + power)
    square = x * x
    near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(size < 0.1, near, far)
