"""The loss head in one process: every implementation agrees with the float64 definition over the real vocabulary."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from sft.config import LossConfig
from sft.mcore.loss import lm_loss
from tests.unit.loss_cases import (
    CHUNKED,
    EACH,
    FULL,
    FUSED,
    PADDED,
    SOFTCAP,
    SUPERVISED,
    TERMS,
    TOKENS,
    VOCAB,
    WIDTH,
    Case,
    caps,
    case,
    check,
    each,
    every,
    expected,
    inputs_of,
    name,
    run,
    same,
    shard_of,
    terms,
    terms_of,
    tolerance,
    with_terms,
)

# bf16 has 8 significant bits: a score of about 3 has an error of up to 8e-3, a mean over tokens a smaller one.
BF16_LOSS_TOLERANCE = 1e-2
BF16_GRADIENT_TOLERANCE = 2e-2  # relative to the gradient's norm


# --- the value and its gradients ---------------------------------------------------------------------------


@each
def test_every_term_written_out(loss: LossConfig, group: dist.ProcessGroup) -> None:
    """Scores [ln 3, 0], label 0, weight 2: p = [3/4, 1/4], -log p = 0.2876821, lse = ln 4 = 1.3862944,
    entropy = 2 ln 2 - 3/4 ln 3 = 0.5623351.

    Loss 2 (0.2876821 + 0.1 * 1.9218121 - 0.5 * 0.5623351) = 0.3973914.  Gradient of score 0: 2 (3/4 - 1 + 0.2 * 3/4 *
    1.3862944 + 0.5 * 3/4 (ln 3/4 + 0.5623351)) = 0.1218781; the two sum to 2 * 0.2 * 1.3862944 = 0.5545177.
    """
    c = Case(
        hidden=torch.tensor([[[1.0]]]),
        weight=torch.tensor([[1.0986123], [0.0]]),
        labels=torch.tensor([[0]]),
        weights=torch.tensor([[2.0]]),
    )
    found = run(c, with_terms(loss, {"z_loss_coef": 0.1, "entropy_coef": 0.5}), group, vocab=2)
    assert float(found.loss) == pytest.approx(0.3973914, abs=1e-6)
    rows = torch.stack([column for column in found.rows if column is not None]).flatten()
    torch.testing.assert_close(rows, torch.tensor([-0.2876821, 1.3862944, 0.5623351, 1.0]), rtol=0.0, atol=1e-6)
    torch.testing.assert_close(found.weight.flatten(), torch.tensor([0.1218781, 0.4326396]), rtol=0.0, atol=1e-6)


@each
def test_a_soft_cap_written_out(loss: LossConfig, group: dist.ProcessGroup) -> None:
    """Scores [20, 0] with limit 2: [2 tanh(10), 0] = [2, 0], label 1: -log p = ln(1 + e^2) = 2.1269280.

    Scores [1, 0]: [2 tanh(1/2), 0] = [0.9242343, 0]; p = 0.7159041, 1 - tanh(1/2)^2 = 0.7864477, product 0.5630211.
    """
    far, near = (
        Case(
            hidden=torch.tensor([[[score]]]),
            weight=torch.tensor([[1.0], [0.0]]),
            labels=torch.tensor([[1]]),
            weights=torch.ones(1, 1),
            softcap=2.0,
        )
        for score in (20.0, 1.0)
    )
    assert float(run(far, loss, group, vocab=2).loss) == pytest.approx(2.1269280, abs=1e-6)
    found = run(near, loss, group, vocab=2)
    torch.testing.assert_close(found.weight.flatten(), torch.tensor([0.5630211, -0.7159041]), rtol=0.0, atol=1e-6)


@every
@pytest.mark.parametrize(
    "supervised, softcap",
    [(SUPERVISED, None), ([0], None), ([22], None), (list(range(23)), None), (SUPERVISED, SOFTCAP)],
    ids=["some", "first", "last", "all", "softcap"],
)
def test_loss_and_gradients_are_those_of_the_definition(
    loss: LossConfig, supervised: list[int], softcap: float | None, group: dist.ProcessGroup
) -> None:
    c = case(supervised, softcap=softcap)
    found, wanted = run(c, loss, group), expected(c)
    check(found, wanted)
    assert not found.hidden[~c.supervised].any()  # exactly 0
    assert not found.weight[VOCAB:].any()


@caps
@terms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@each
def test_every_term_is_that_of_the_definition(
    loss: LossConfig, dtype: torch.dtype, more: dict[str, float], softcap: float | None, group: dist.ProcessGroup
) -> None:
    c, limit = case(softcap=softcap).to(dtype), tolerance(loss, dtype)
    check(run(c, with_terms(loss, more), group), expected(c, **more), limit, limit)


@each
@pytest.mark.parametrize("upstream", [-3.0, 1e-4, 0.0])
def test_upstream_gradient_scales_both(loss: LossConfig, upstream: float, group: dist.ProcessGroup) -> None:
    c = case()
    check(run(c, loss, group, upstream), expected(c, upstream))


@each
def test_no_vocabulary_padding(loss: LossConfig, group: dist.ProcessGroup) -> None:
    c = replace(case(), labels=torch.arange(TOKENS)[None] % PADDED)
    check(run(c, loss, group, vocab=PADDED), expected(c, vocab=PADDED))


@each
def test_scores_far_from_zero_do_not_overflow(loss: LossConfig, group: dist.ProcessGroup) -> None:
    """exp(1000) is inf in any format, so the largest score must be subtracted first."""
    c = Case(
        hidden=torch.tensor([[[1000.0]], [[-1000.0]]]),
        weight=torch.tensor([[1.0], [0.0]]),
        labels=torch.tensor([[1, 1]]),
        weights=torch.ones(1, 2),
    )
    for more in ({}, {"entropy_coef": 0.5}):  # the entropy of certain predictions is 0, and so is its gradient
        found = run(c, with_terms(loss, more), group, vocab=2)
        assert float(found.loss) == 1000.0  # the first token has probability 0, the second 1
        assert found.hidden.flatten().tolist() == [1.0, 0.0]
        assert found.weight.flatten().tolist() == [1000.0, -1000.0]


@caps
@each
def test_hidden_states_in_bf16(loss: LossConfig, softcap: float | None, group: dist.ProcessGroup) -> None:
    c = case(softcap=softcap).to(torch.bfloat16)
    check(run(c, loss, group), expected(c), BF16_LOSS_TOLERANCE, BF16_GRADIENT_TOLERANCE)


@caps
@each
def test_without_gradients_the_same_is_found(loss: LossConfig, softcap: float | None, group: dist.ProcessGroup) -> None:
    c, loss = case(softcap=softcap), with_terms(loss, TERMS["all"])
    objective, rows = terms_of(c, loss, group)
    trained = run(c, loss, group)
    assert not objective.requires_grad and torch.equal(objective, trained.loss)
    for mine, theirs in zip(rows[:4], trained.rows[:4], strict=True):
        assert mine is not None and theirs is not None and torch.equal(mine, theirs)


# --- correct predictions -----------------------------------------------------------------------------------


@caps
@each
def test_a_label_is_guessed_where_no_score_is_above_its_own(
    loss: LossConfig, softcap: float | None, group: dist.ProcessGroup
) -> None:
    """Scores of three tokens: [2, 1, 0], [0, 1, 2], [-1, -1, -2].  The last row of the weight is padding of the
    vocabulary, and has the largest score."""
    c = Case(
        hidden=torch.tensor([[[2.0, 1.0, 0.0]], [[0.0, 1.0, 2.0]], [[-1.0, -1.0, -2.0]]]),
        weight=torch.cat([torch.eye(3), torch.ones(1, 3) * 9]),
        labels=torch.tensor([[0, 1, 1]]),
        weights=torch.ones(1, 3),
        softcap=softcap,
    )
    assert terms_of(c, loss, group, 3)[1].correct.tolist() == [1.0, 0.0, 1.0]  # a tie counts as correct
    others = replace(c, labels=torch.tensor([[1, 2, 2]]))
    assert terms_of(others, loss, group, 3)[1].correct.tolist() == [0.0, 1.0, 0.0]


@each
def test_measured_entropy_has_no_gradient_and_changes_none(loss: LossConfig, group: dist.ProcessGroup) -> None:
    c, measuring = case(), with_terms(loss, {"entropy": True})
    assert terms_of(c, with_terms(loss, {"z_loss_coef": 0.1}), group)[1].entropy is None
    plain, found = run(c, loss, group), run(c, measuring, group)
    check(found, expected(c))
    same(replace(found, rows=()), replace(plain, rows=()))


# --- inputs without effect ---------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("size", [-1e4, 1e30])
def test_padding_of_the_vocabulary_changes_nothing(loss: LossConfig, size: float, group: dist.ProcessGroup) -> None:
    c, weight = case(), case().weight.clone()
    weight[VOCAB:] = size
    same(run(replace(c, weight=weight), loss, group), run(c, loss, group))


@each
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_unsupervised_rows_are_not_looked_at(loss: LossConfig, bad: float, group: dist.ProcessGroup) -> None:
    c, loss = case(), with_terms(loss, {"z_loss_coef": 1.0, "entropy_coef": 1.0})
    same(run(c.broken(bad), loss, group), run(c, loss, group))


@each
@pytest.mark.parametrize("label", [-100, VOCAB, 10**9])
def test_labels_of_unsupervised_tokens_do_not_matter(loss: LossConfig, label: int, group: dist.ProcessGroup) -> None:
    c = case()
    odd = replace(c, labels=torch.where(c.supervised, c.labels, label))
    same(run(odd, loss, group), run(c, loss, group))


@each
@terms
def test_no_supervised_token_is_exactly_zero(
    loss: LossConfig, more: dict[str, float], group: dist.ProcessGroup
) -> None:
    for c in (case([]), case([]).broken(torch.nan)):
        found = run(c, with_terms(loss, more), group)
        assert float(found.loss) == 0.0
        assert found.hidden.shape == (TOKENS, 1, WIDTH) and not found.hidden.any()
        assert found.weight.shape == (PADDED, WIDTH) and not found.weight.any()


@each
@terms
def test_one_row(loss: LossConfig, more: dict[str, float], group: dist.ProcessGroup) -> None:
    """The smallest microbatch: one token, supervised or not."""
    c, loss = case([0], tokens=1, seed=7), with_terms(loss, more)
    check(run(c, loss, group), expected(c, **more))
    found = run(case([], tokens=1), loss, group)
    assert not found.loss and not found.hidden.any() and not found.weight.any()


def test_inputs_are_left_alone(group: dist.ProcessGroup) -> None:
    for loss in EACH:
        c, copy = case(), case()
        run(c, with_terms(loss, TERMS["all"]), group)
        for field, value in vars(copy).items():
            assert value is None or torch.equal(getattr(c, field), value), field


# --- matrix products ---------------------------------------------------------------------------------------

PRODUCT = 2 * 8 * 12 * 32  # operations of one matrix product: n = 8 of 23 tokens, h = 12, V = 32 rows
both_formats = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def flops(c: Case, loss: LossConfig, group: dist.ProcessGroup) -> tuple[int, int]:
    """The operations of matrix products: for training, and for evaluation."""
    hidden, weight = inputs_of(c)
    shard, targets = shard_of(weight, group), c.targets()
    with FlopCounterMode(display=False) as training:
        lm_loss(hidden, shard, targets, loss)[0].backward()
    with FlopCounterMode(display=False) as evaluation, torch.no_grad():
        lm_loss(hidden, shard, targets, loss)
    return training.get_total_flops(), evaluation.get_total_flops()


@both_formats
@pytest.mark.parametrize("loss", FUSED, ids=name)
def test_fused_multiplies_supervised_tokens_only(
    loss: LossConfig, dtype: torch.dtype, group: dist.ProcessGroup
) -> None:
    """Scores, gradients of hidden states and of the weight: 2 n h V each."""
    assert flops(case().to(dtype), loss, group) == (3 * PRODUCT, PRODUCT)
    assert flops(case([]).to(dtype), loss, group) == (0, 0)


@both_formats
@pytest.mark.parametrize("loss", [*CHUNKED, FULL], ids=name)
def test_with_logits_every_token_is_projected(loss: LossConfig, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    """`full` also multiplies the tokens that `fused` skips: all 23 tokens, supervised or not."""
    one = 2 * 23 * 12 * 32
    assert flops(case().to(dtype), loss, group) == (3 * one, one)
