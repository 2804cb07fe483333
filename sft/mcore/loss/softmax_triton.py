"""The two passes of `softmax.py` in Triton for CUDA.  One program per row reads the row once.

`row_sums` keeps a running maximum, and rescales its sums when the maximum grows.  `score_gradient` may overwrite the
scores, because the same program reads and writes an element.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.mcore.loss.objective import GradientCoefficients
from sft.mcore.loss.vocab_parallel import accumulation_dtype

_BLOCK = 4096  # columns at a time
_WARPS = 8


def row_sums(scores: Tensor, local: Tensor, num_real: int, entropy: bool) -> Tensor:
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
        ENTROPY=coefficients.entropy is not None,
        WIDE=tl.float64 if lse.dtype == torch.float64 else tl.float32,
        BLOCK=min(_BLOCK, triton.next_power_of_2(scores.shape[1])),
        num_warps=_WARPS,
    )


@triton.jit
def _row_sums(  # type: ignore[no-untyped-def]
    scores, stride, local, num_real, sums, sums_stride, ENTROPY: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    base = scores + row * stride
    largest = tl.full((), float("-inf"), WIDE)
    total = tl.full((), 0.0, WIDE)
    moment = tl.full((), 0.0, WIDE)
    for start in range(0, num_real, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(base + columns, mask=columns < num_real, other=float("-inf")).to(WIDE)
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
        logprobs = tl.load(base + columns, mask=real, other=0.0).to(WIDE) - norm
        logprobs = tl.where(columns == target, exact, logprobs)
        g = tl.exp(logprobs) * slope
        if ENTROPY:
            g += tl.exp(logprobs) * logprobs * tl.load(entropy + row)
        g += tl.where(columns == target, on_label, 0.0)
        g = tl.where(real, g, 0.0)
        tl.store(out + row * out_stride + columns, g.to(out.dtype.element_ty), mask=columns < num_columns)
