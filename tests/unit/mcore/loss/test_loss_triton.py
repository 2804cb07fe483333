"""The Triton passes of the loss head agree with those in torch; Triton's interpreter runs them, so no GPU is needed.

Triton takes a gigabyte and comes only with torch for CUDA, so `make test` skips this file.  `make test-triton` installs
Triton and runs this file, and so does CI.
"""

import pytest
import torch
from torch import Tensor

from tests.unit.fixtures import triton_interpreter

triton_interpreter.without_a_gpu()

from sft.mcore.loss import softmax as softmax_torch  # noqa: E402
from sft.mcore.loss import softmax_triton  # noqa: E402
from sft.mcore.loss.objective import GradientCoefficients  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-5  # fp32 sums over 300 columns in another order; a rounding is 6e-8
BF16_TOLERANCE = 8e-3  # one rounding to 8 bits, which may go either way

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
shapes = pytest.mark.parametrize(
    "rows, columns, real",
    [(5, 300, 300), (5, 300, 256), (5, 300, 257), (4, 300, 7), (3, 300, 0), (1, 1, 1), (0, 300, 7)],
    ids=str,
)
caps = pytest.mark.parametrize("softcap", [None, 12.0], ids=["", "softcap"])
with_entropy = pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rows span several blocks, of which the last one is partial."""
    monkeypatch.setattr(softmax_triton, "_BLOCK", 64)


def case(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scores whose largest values come late in a row, and labels, some of them in other shards."""
    generator = torch.Generator().manual_seed(7)
    scores = torch.randn(rows, columns, generator=generator) * 5 + torch.linspace(0, 20, columns)
    labels = torch.randint(-columns // 4, columns + columns // 4 + 1, (rows,), generator=generator)
    return scores.to(dtype).to(DEVICE), labels.to(DEVICE)


@dtypes
@shapes
@with_entropy
@caps
def test_sums_of_rows(
    rows: int, columns: int, real: int, dtype: torch.dtype, entropy: bool, softcap: float | None
) -> None:
    scores, labels = case(rows, columns, dtype)
    found, wanted = (p.row_sums(scores, labels, real, entropy, softcap) for p in (softmax_triton, softmax_torch))
    assert found.dtype == wanted.dtype and found.shape == wanted.shape == (4 if entropy else 3, rows)
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@dtypes
@shapes
@with_entropy
@caps
def test_gradient_of_scores(
    rows: int, columns: int, real: int, dtype: torch.dtype, entropy: bool, softcap: float | None
) -> None:
    scores, labels = case(rows, columns, dtype)
    largest, total, score, *_ = softmax_torch.row_sums(scores, labels, real, False, softcap)
    lse = largest + total.log() if real else torch.ones_like(largest)
    generator = torch.Generator().manual_seed(8)
    softmax, surprise, label = torch.randn(3, rows, generator=generator).to(lse.dtype).to(DEVICE)
    coefficients = GradientCoefficients(softmax=softmax, entropy=surprise if entropy else None, label=label)
    wanted, found, in_place = torch.full_like(scores, torch.nan), torch.full_like(scores, torch.nan), scores.clone()
    softmax_torch.score_gradient(scores, labels, real, score - lse, lse, coefficients, wanted, softcap)
    softmax_triton.score_gradient(scores, labels, real, score - lse, lse, coefficients, found, softcap)
    softmax_triton.score_gradient(in_place, labels, real, score - lse, lse, coefficients, in_place, softcap)
    tolerance = BF16_TOLERANCE if dtype == torch.bfloat16 else TOLERANCE
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=TOLERANCE)
    assert torch.equal(in_place, found)
    assert not found[:, real:].any()


@dtypes
@with_entropy
@caps
def test_scores_that_a_teacher_took_out(dtype: torch.dtype, entropy: bool, softcap: float | None) -> None:
    """They add nothing to the sums, and get no gradient; a soft cap does not make them finite.  One row has no other
    scores."""
    scores, labels = case(5, 300, dtype)
    outside = torch.full_like(labels, -1)
    scores[:, ::7] = softmax_torch.TAKEN_OUT
    scores[2] = softmax_torch.TAKEN_OUT
    found, wanted = (p.row_sums(scores, outside, 257, entropy, softcap) for p in (softmax_triton, softmax_torch))
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    rest = scores[:, [i for i in range(257) if i % 7]]
    alone = softmax_torch.row_sums(rest, outside, rest.shape[1], entropy, softcap)
    others = [0, 1, 3, 4]
    torch.testing.assert_close(found[:, others], alone[:, others], rtol=TOLERANCE, atol=TOLERANCE)
    assert found[0, 2] < softmax_torch.TAKEN_OUT / 2
    lse = torch.where(found[0] < softmax_torch.TAKEN_OUT / 2, 0.0, found[0] + found[1].log())
    generator = torch.Generator().manual_seed(8)
    softmax, surprise, label = torch.randn(3, 5, generator=generator).to(lse.dtype).to(DEVICE)
    coefficients = GradientCoefficients(softmax=softmax, entropy=surprise if entropy else None, label=label)
    gradients = [torch.full_like(scores, torch.nan) for _ in range(2)]
    for passes, out in zip((softmax_triton, softmax_torch), gradients):
        passes.score_gradient(scores, outside, 257, torch.zeros_like(lse), lse, coefficients, out, softcap)
        assert not out[:, ::7].any() and not out[2].any()
    torch.testing.assert_close(
        *gradients, rtol=BF16_TOLERANCE if dtype == torch.bfloat16 else TOLERANCE, atol=TOLERANCE
    )


def test_rows_that_are_far_apart_in_memory() -> None:
    """A slice of a wider buffer: the kernel must find rows by their stride."""
    scores, labels = case(6, 300, torch.float32)
    part = scores[:, :100]
    found, wanted = (passes.row_sums(part, labels, 90, True) for passes in (softmax_triton, softmax_torch))
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
