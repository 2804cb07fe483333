"""The loss head in the real trainer: one curve for every implementation, weighting and layout.

Its gradient of the output weight goes into the `main_grad` of megatron-core's DistributedDataParallel, together with
that of the embedding if both are tied.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from sft.data.loader import Loader
from sft.mcore.engine import Engine
from tests.ranks import scenarios
from tests.ranks.layouts import CP, LOSS_TOLERANCE, NORM_TOLERANCE, PP, SP
from tests.ranks.pool import Ranks

NUM_STEPS = 2
LENGTHS = [100, 37, 64, 5, 111, 90, 2, 128, 33, 31, 75] * 2  # 11 packs of up to 128 tokens
SMALL = ["model.num_layers=2", "data.seq_length=128", "loss.chunk_size=7"]
FUSED, CHUNKED, FULL = ["loss.impl=fused"], ["loss.impl=chunked"], ["loss.impl=full", "loss.chunk_size=null"]
# All terms of the objective, each large enough to change the result.
RICH = ["loss.reduction=sqrt", "loss.z_loss_coef=0.01", "loss.entropy_coef=0.1", "loss.entropy=true"]
TIED = ["model.tie_embeddings=true"]
DP = ["parallel.cp=1"]


# --- on the ranks ------------------------------------------------------------------------------------------


def loader_of(engine: Engine) -> Loader:
    return scenarios.loader_of(engine, scenarios.SkewedCorpus(LENGTHS))


def curves(many: Sequence[Sequence[str]]) -> list[dict[str, list[float]]]:
    """Runs NUM_STEPS steps from random weights for each list of overrides.  A result has, by name, the value in each
    step."""
    return [curve(overrides) for overrides in many]


def curve(overrides: Sequence[str]) -> dict[str, list[float]]:
    with scenarios.running([*SMALL, *overrides]) as engine:
        loader = loader_of(engine)
        results = [engine.train_step(loader.microbatches(step)) for step in range(NUM_STEPS)]
        return {
            "loss": [r.objective / r.denominator for r in results],
            "nll": [r.nll / r.num_tokens for r in results],
            "entropy": [r.entropy / r.num_tokens for r in results],
            "denominator": [r.denominator for r in results],
            "num_tokens": [float(r.num_tokens) for r in results],
            "grad_norm": [r.grad_norm for r in results],
        }


def first_batch(overrides: Sequence[str]) -> list[tuple[tuple[int, ...], list[int], list[float]]]:
    """For each pack of the first step on one rank: its samples, their offsets, and -log p of every label."""
    with scenarios.running([*SMALL, *overrides]) as engine:
        found = []
        for mb in loader_of(engine).microbatches(0):
            losses = scenarios.local_token_losses(engine, mb)
            assert losses is not None
            found.append((mb.sample_ids, mb.cu_seqlens.tolist(), losses.tolist()))
        return found


# --- one curve ---------------------------------------------------------------------------------------------


def same_curve(found: dict[str, list[float]], reference: dict[str, list[float]]) -> None:
    for name, values in reference.items():
        limit = NORM_TOLERANCE if name == "grad_norm" else LOSS_TOLERANCE
        np.testing.assert_allclose(found[name], values, rtol=limit, err_msg=name)


@pytest.mark.parametrize("tie,layouts", [([], [CP, SP]), (TIED, [PP])], ids=["untied", "tied"])
def test_one_curve_whatever_the_implementation(ranks: Ranks, tie: list[str], layouts: list[list[str]]) -> None:
    """With every term of the objective; the covering set has the plain loss."""
    ((reference, *others),) = ranks(1).run(curves, [impl + tie + RICH for impl in (FULL, FUSED, CHUNKED)])
    assert len(set(reference["loss"])) == NUM_STEPS
    assert 5.0 < min(reference["entropy"]) and max(reference["entropy"]) < np.log(301)
    for other in others:
        same_curve(other, reference)
    for found in ranks(2).run(curves, [impl + tie + RICH + layout for impl in (FUSED, FULL) for layout in layouts]):
        for curve_of_rank in found:
            same_curve(curve_of_rank, reference)


# --- weights of samples ------------------------------------------------------------------------------------

WEIGHTINGS = [(r, d) for r in ("sample", "sqrt") for d in ("weights", "tokens")]
EXPONENTS = {"sample": -1.0, "sqrt": -0.5}


def weighting(reduction: str, denominator: str) -> list[str]:
    return [f"loss.reduction={reduction}", f"loss.denominator={denominator}"]


@pytest.fixture(scope="module")
def weighted(ranks: Ranks) -> dict[tuple[str, str], dict[str, list[float]]]:
    """The curves of one process, by reduction and denominator."""
    (found,) = ranks(1).run(curves, [weighting(*w) for w in WEIGHTINGS])
    return dict(zip(WEIGHTINGS, found, strict=True))


@pytest.fixture(scope="module")
def token_losses(ranks: Ranks) -> list[np.ndarray]:
    """-log p of the supervised labels of each sample in the first batch that has such labels."""
    corpus = scenarios.SkewedCorpus(LENGTHS)
    (packs,) = ranks(1).run(first_batch, [])
    found = []
    for sample_ids, starts, losses in packs:
        for sample_id, start in zip(sample_ids, starts):
            labels = np.flatnonzero(corpus.sample(sample_id).weights[1:])  # label j is token j + 1
            found.append(np.array(losses)[start + labels])
    assert len(found) > 4 and len({len(losses) for losses in found}) > 3
    return [losses for losses in found if len(losses)]


@pytest.mark.parametrize("reduction, denominator", WEIGHTINGS)
def test_the_loss_of_the_first_step_is_the_weighted_mean_of_its_tokens(
    weighted: dict[tuple[str, str], dict[str, list[float]]],
    token_losses: list[np.ndarray],
    reduction: str,
    denominator: str,
) -> None:
    counts = np.array([len(losses) for losses in token_losses])
    weights = counts ** EXPONENTS[reduction]
    total = sum(weight * losses.sum() for weight, losses in zip(weights, token_losses))
    divisor = (weights * counts).sum() if denominator == "weights" else counts.sum()
    found = weighted[reduction, denominator]
    assert found["num_tokens"][0] == counts.sum()
    assert found["denominator"][0] == pytest.approx(divisor, rel=LOSS_TOLERANCE)
    assert found["loss"][0] == pytest.approx(total / divisor, rel=LOSS_TOLERANCE)
    assert found["nll"][0] == pytest.approx(np.concatenate(token_losses).mean(), rel=LOSS_TOLERANCE)
    if (reduction, denominator) == ("sample", "weights"):  # the mean over samples of the mean of each sample
        assert found["loss"][0] == pytest.approx(np.mean([losses.mean() for losses in token_losses]), rel=1e-6)


@pytest.mark.parametrize("reduction", EXPONENTS)
def test_the_denominator_divides_the_gradient_and_nothing_else(
    weighted: dict[tuple[str, str], dict[str, list[float]]], reduction: str
) -> None:
    by_weights, by_tokens = weighted[reduction, "weights"], weighted[reduction, "tokens"]
    assert by_tokens["denominator"] == by_tokens["num_tokens"]
    assert by_weights["denominator"][0] < 0.7 * by_tokens["denominator"][0]
    for name in ("loss", "grad_norm"):
        sums = [found[name][0] * found["denominator"][0] for found in (by_weights, by_tokens)]
        assert sums[0] == pytest.approx(sums[1], rel=LOSS_TOLERANCE), name


@pytest.mark.parametrize("layout", [CP, DP], ids=["cp", "dp"])
def test_weighted_curves_are_those_of_one_process(
    ranks: Ranks, weighted: dict[tuple[str, str], dict[str, list[float]]], layout: list[str]
) -> None:
    for found in ranks(2).run(curves, [weighting(*w) + layout for w in WEIGHTINGS]):
        for mine, w in zip(found, WEIGHTINGS, strict=True):
            same_curve(mine, weighted[w])
