"""Two passes over the scores of one shard in plain torch: what `softmax_triton.py` does on CUDA, and its definition.

Both work on blocks of a few rows, so that no temporary has the size of the scores.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from sft.mcore.loss.objective import GradientCoefficients
from sft.mcore.loss.vocab_parallel import accumulation_dtype

# Bytes of a block: within a CPU core's cache; on CUDA enough to fill the device, and little beside the scores.
_BLOCK_BYTES = {"cpu": 1 << 19, "cuda": 1 << 26}


def row_sums(scores: Tensor, local: Tensor, num_real: int, entropy: bool) -> Tensor:
    """[3 or 4, n] of this shard's real columns: largest score m, sum of exp(z - m), the label's score (0 where
    the label is in another shard), and sum of exp(z - m) (z - m)."""
    sums = scores.new_zeros((4 if entropy else 3, scores.shape[0]), dtype=accumulation_dtype(scores.dtype))
    if num_real == 0:  # this shard holds only padding of the vocabulary
        sums[0] = -torch.inf
        return sums
    for block in blocks(scores):
        _sum_block(scores[block, :num_real], sums[:, block])
    own, column = _own(local, num_real)
    picked = scores.gather(1, column[:, None]).squeeze(1).to(sums.dtype)
    sums[2] = torch.where(own, picked, 0.0)
    return sums


def _sum_block(scores: Tensor, sums: Tensor) -> None:
    """A function of its own, so that its temporaries are freed before the next block."""
    wider = scores.to(sums.dtype)
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
) -> None:
    out[:, num_real:] = 0.0
    if num_real == 0:
        return
    own, column = _own(local, num_real)
    for block in blocks(scores):
        _gradient_block(scores[block, :num_real], lse[block, None], coefficients[block], out[block, :num_real])
    # The label's column again, from the statistics: bf16 would round p before 1 is subtracted.
    slope = (
        coefficients.softmax if coefficients.entropy is None else coefficients.softmax + coefficients.entropy * logprob
    )
    exact = (logprob.exp() * slope + coefficients.label).to(out.dtype)
    column = column[:, None]
    out.scatter_(1, column, torch.where(own[:, None], exact[:, None], out.gather(1, column)))


def _gradient_block(scores: Tensor, lse: Tensor, coefficients: GradientCoefficients, out: Tensor) -> None:
    softmax = coefficients.softmax[:, None]
    if coefficients.entropy is not None:
        logprobs = scores.to(lse.dtype) - lse
        powers = logprobs.exp()
        out.copy_(powers.mul_(logprobs.mul_(coefficients.entropy[:, None]).add_(softmax)))
    elif out.dtype == lse.dtype:
        torch.sub(scores, lse, out=out).exp_().mul_(softmax)
    else:
        out.copy_((scores.to(lse.dtype) - lse).exp_().mul_(softmax))


def blocks(x: Tensor) -> Iterator[slice]:
    """Runs of rows of `x` [n, ...] of some _BLOCK_BYTES each, at least one row."""
    row_bytes = max(1, x[:1].numel()) * torch.empty((), dtype=accumulation_dtype(x.dtype)).element_size()
    rows = max(1, _BLOCK_BYTES[x.device.type] // row_bytes)
    for start in range(0, x.shape[0], rows):
        yield slice(start, min(start + rows, x.shape[0]))


def _own(local: Tensor, num_real: int) -> tuple[Tensor, Tensor]:
    """Which labels are columns of this shard, and a column that may be read for each."""
    return (local >= 0) & (local < num_real), local.clamp(0, num_real - 1)
