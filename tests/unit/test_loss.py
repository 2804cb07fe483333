"""The loss head in one process: every implementation against the definition in float64, over the real vocabulary.

The process group is a gloo world of one.  Nothing here needs the redirection of `mcore/device.py`, which
lasts as long as the process and is kept out of this one.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sft.config import LossConfig
from sft.mcore.loss import lm_loss, token_statistics
from tests.unit.loss_cases import (
    CHUNKED,
    EACH,
    EVERY,
    FULL,
    FUSED,
    LOSS_TOLERANCE,
    PADDED,
    SUPERVISED,
    TERMS,
    TOKENS,
    VOCAB,
    WIDTH,
    Case,
    Outcome,
    case,
    check,
    error,
    expected,
    name,
    run,
    run_statistics,
    same,
    shard_of,
    terms,
    terms_of,
    tolerance,
    with_terms,
    world_of_one,
)

# bf16 keeps 8 bits: scores of about 3 are off by up to 8e-3, a mean over tokens less.
BF16_LOSS_TOLERANCE = 1e-2
BF16_GRADIENT_TOLERANCE = 2e-2  # of the gradient's norm


every = pytest.mark.parametrize("loss", EVERY, ids=name)
each = pytest.mark.parametrize("loss", EACH, ids=lambda c: c.impl)
fused = pytest.mark.parametrize("loss", FUSED, ids=name)
infinities = pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[dist.ProcessGroup]:
    with world_of_one() as tp:
        yield tp


# --- the value and its gradients ---------------------------------------------------------------------------


@every
def test_written_out(loss: LossConfig, group: dist.ProcessGroup) -> None:
    """Scores [1, 0], label 0: ln(1 + e^-1) = 0.3132617; scores [0, 2], label 0: ln(1 + e^2) = 2.1269280.

    Gradient of the scores: softmax minus one-hot, [-0.2689414, 0.2689414] and [-0.8807971, 0.8807971].
    """
    c = Case(
        hidden=torch.tensor([[[1.0, 0.0]], [[9.0, 9.0]], [[0.0, 2.0]]]),
        weight=torch.tensor([[1.0, 0.0], [0.0, 1.0], [7.0, 7.0]]),  # the third row only pads the vocabulary
        labels=torch.tensor([[0, 1, 0]]),
        weights=torch.tensor([[1.0, 0.0, 1.0]]),
    )
    found = run(c, loss, group, vocab=2)
    assert float(found.loss) == pytest.approx(0.3132617 + 2.1269280, abs=1e-6)
    hidden = [[-0.2689414, 0.2689414], [0.0, 0.0], [-0.8807971, 0.8807971]]
    weight = [[-0.2689414, -1.7615942], [0.2689414, 1.7615942], [0.0, 0.0]]
    torch.testing.assert_close(found.hidden[:, 0], torch.tensor(hidden), rtol=0.0, atol=1e-6)
    torch.testing.assert_close(found.weight, torch.tensor(weight), rtol=0.0, atol=1e-6)


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


@every
@pytest.mark.parametrize("supervised", [SUPERVISED, [0], [22], list(range(23))], ids=["some", "first", "last", "all"])
def test_loss_and_gradients_are_those_of_the_definition(
    loss: LossConfig, supervised: list[int], group: dist.ProcessGroup
) -> None:
    c = case(supervised)
    found, wanted = run(c, loss, group), expected(c)
    check(found, wanted)
    assert not found.hidden[~c.supervised].any()  # exactly 0
    assert not found.weight[VOCAB:].any()


@terms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@each
def test_every_term_is_that_of_the_definition(
    loss: LossConfig, dtype: torch.dtype, more: dict[str, float], group: dist.ProcessGroup
) -> None:
    c, limit = case().to(dtype), tolerance(loss, dtype)
    check(run(c, with_terms(loss, more), group), expected(c, **more), limit, limit)


@pytest.mark.parametrize("column", ["logprob", "lse", "entropy", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@each
def test_every_statistic_has_a_gradient_of_its_own(
    loss: LossConfig, dtype: torch.dtype, column: str, group: dist.ProcessGroup
) -> None:
    """Upstream gradients of either sign, unlike per token; `full` makes lse only for the z-loss."""
    c, limit = case().to(dtype), tolerance(loss, dtype)
    generator = torch.Generator().manual_seed(1)
    upstream: list[Tensor | None] = list(torch.randn(3, len(SUPERVISED), generator=generator, dtype=torch.float64))
    if column != "all":
        upstream = [times if name == column else None for name, times in zip(("logprob", "lse", "entropy"), upstream)]
    loss = with_terms(loss, {"z_loss_coef": 1.0, "entropy_coef": 1.0})
    found, wanted = run_statistics(c, loss, group, upstream), expected(c, upstream)
    check(found, wanted, limit, limit)
    assert not found.hidden[~c.supervised].any()
    assert not found.weight[VOCAB:].any()


@each
def test_every_token_weighs_what_it_is_told(loss: LossConfig, group: dist.ProcessGroup) -> None:
    """Against a loop over tokens, each the loss of a call with that token alone and a weight of 1."""
    c = case()
    alone = [run(replace(c, weights=torch.eye(TOKENS)[i : i + 1]), FULL, group) for i in SUPERVISED]
    weights = c.weights[0, SUPERVISED].double()
    wanted = Outcome(
        loss=torch.stack([w * one.loss for w, one in zip(weights, alone)]).sum(),
        hidden=torch.stack([w * one.hidden for w, one in zip(weights, alone)]).sum(0),
        weight=torch.stack([w * one.weight for w, one in zip(weights, alone)]).sum(0),
    )
    assert weights.unique().numel() == len(SUPERVISED)
    check(run(c, loss, group), wanted)


@every
@pytest.mark.parametrize("upstream", [0.25, -3.0, 1e-4, 0.0])
def test_upstream_gradient_scales_both(loss: LossConfig, upstream: float, group: dist.ProcessGroup) -> None:
    c = case()
    check(run(c, loss, group, upstream), expected(c, upstream))


@every
def test_no_vocabulary_padding(loss: LossConfig, group: dist.ProcessGroup) -> None:
    c = replace(case(), labels=torch.arange(TOKENS)[None] % PADDED)
    check(run(c, loss, group, vocab=PADDED), expected(c, vocab=PADDED))


@every
def test_scores_far_from_zero_do_not_overflow(loss: LossConfig, group: dist.ProcessGroup) -> None:
    """exp(1000) is inf in any format: the largest score must come off first."""
    c = Case(
        hidden=torch.tensor([[[1000.0]], [[-1000.0]]]),
        weight=torch.tensor([[1.0], [0.0]]),
        labels=torch.tensor([[1, 1]]),
        weights=torch.ones(1, 2),
    )
    for more in ({}, {"entropy_coef": 0.5}):  # of certain predictions: 0, and so is its gradient
        found = run(c, with_terms(loss, more), group, vocab=2)
        assert float(found.loss) == 1000.0  # the first token is hopeless, the second certain
        assert found.hidden.flatten().tolist() == [1.0, 0.0]
        assert found.weight.flatten().tolist() == [1000.0, -1000.0]


@every
def test_hidden_states_in_bf16(loss: LossConfig, group: dist.ProcessGroup) -> None:
    c = case().to(torch.bfloat16)
    check(run(c, loss, group), expected(c), BF16_LOSS_TOLERANCE, BF16_GRADIENT_TOLERANCE)


@each
@terms
def test_without_gradients_the_same_is_found(
    loss: LossConfig, more: dict[str, float], group: dist.ProcessGroup
) -> None:
    c, loss = case(), with_terms(loss, more)
    objective, rows = terms_of(c, loss, group)
    trained = run(c, loss, group)
    assert not objective.requires_grad
    assert torch.equal(objective, trained.loss)
    for mine, theirs in zip(rows, trained.rows, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or torch.equal(mine, theirs)


# --- guesses -----------------------------------------------------------------------------------------------


@every
def test_a_label_is_guessed_where_no_score_is_above_its_own(loss: LossConfig, group: dist.ProcessGroup) -> None:
    """Scores of three tokens: [2, 1, 0], [0, 1, 2], [-1, -1, -2]; the last row of the weight pads the vocabulary, and
    its score is the largest."""
    c = Case(
        hidden=torch.tensor([[[2.0, 1.0, 0.0]], [[0.0, 1.0, 2.0]], [[-1.0, -1.0, -2.0]]]),
        weight=torch.cat([torch.eye(3), torch.ones(1, 3) * 9]),
        labels=torch.tensor([[0, 1, 1]]),
        weights=torch.ones(1, 3),
    )
    assert terms_of(c, loss, group, 3)[1].correct.tolist() == [1.0, 0.0, 1.0]  # a tie counts
    others = replace(c, labels=torch.tensor([[1, 2, 2]]))
    assert terms_of(others, loss, group, 3)[1].correct.tolist() == [0.0, 1.0, 0.0]


# --- entropy -----------------------------------------------------------------------------------------------


@each
def test_entropy_is_measured_where_it_is_asked_for(loss: LossConfig, group: dist.ProcessGroup) -> None:
    for more, measured in (({}, False), ({"z_loss_coef": 0.1}, False), ({"entropy": True}, True)):
        assert (terms_of(case(), with_terms(loss, more), group)[1].entropy is not None) == measured
        shard = shard_of(case().weight, group)
        rows = token_statistics(case().hidden, shard, case().targets(), with_terms(loss, more))
        assert (rows.entropy is not None) == measured


@each
def test_measured_entropy_has_no_gradient_and_changes_none(loss: LossConfig, group: dist.ProcessGroup) -> None:
    c, measuring = case(), with_terms(loss, {"entropy": True})
    plain, found = run(c, loss, group), run(c, measuring, group)
    assert found.rows[2] is not None
    assert error(found.rows[2], expected(c).rows[2]) <= LOSS_TOLERANCE  # type: ignore[arg-type]
    same(replace(found, rows=()), replace(plain, rows=()))
    hidden, weight = c.hidden.clone().requires_grad_(), c.weight.clone().requires_grad_()
    rows = token_statistics(hidden, shard_of(weight, group), c.targets(), measuring)
    assert rows.logprob.requires_grad
    assert rows.entropy is not None and not rows.entropy.requires_grad


# --- what must not matter ----------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("size", [1e4, -1e4, 1e30])
def test_padding_of_the_vocabulary_changes_nothing(loss: LossConfig, size: float, group: dist.ProcessGroup) -> None:
    c = case()
    weight = c.weight.clone()
    weight[VOCAB:] = size
    huge = run(replace(c, weight=weight), loss, group)
    same(huge, run(c, loss, group))
    check(huge, expected(c))


@every
@infinities
def test_unsupervised_rows_are_not_looked_at(loss: LossConfig, bad: float, group: dist.ProcessGroup) -> None:
    c = case()
    found = run(c.broken(bad), loss, group)
    check(found, expected(c))
    same(found, run(c, loss, group))


@every
@infinities
def test_statistics_do_not_look_at_unsupervised_rows(loss: LossConfig, bad: float, group: dist.ProcessGroup) -> None:
    c, loss = case(), with_terms(loss, {"z_loss_coef": 1.0, "entropy_coef": 1.0})
    upstream: list[Tensor | None] = list(torch.randn(3, len(SUPERVISED), generator=torch.Generator().manual_seed(2)))
    found = run_statistics(c.broken(bad), loss, group, upstream)
    check(found, expected(c, upstream))
    same(found, run_statistics(c, loss, group, upstream))


@every
@pytest.mark.parametrize("label", [-100, -1, VOCAB, PADDED - 1, PADDED, 10**9])
def test_labels_of_unsupervised_tokens_do_not_matter(loss: LossConfig, label: int, group: dist.ProcessGroup) -> None:
    c = case()
    odd = replace(c, labels=torch.where(c.supervised, c.labels, label))
    same(run(odd, loss, group), run(c, loss, group))


@every
@terms
def test_no_supervised_token_is_exactly_zero(
    loss: LossConfig, more: dict[str, float], group: dist.ProcessGroup
) -> None:
    for c in (case([]), case([]).broken(torch.nan)):
        found = run(c, with_terms(loss, more), group)
        assert float(found.loss) == 0.0
        assert found.hidden.shape == (TOKENS, 1, WIDTH) and not found.hidden.any()
        assert found.weight.shape == (PADDED, WIDTH) and not found.weight.any()


@every
@terms
def test_one_row(loss: LossConfig, more: dict[str, float], group: dist.ProcessGroup) -> None:
    """The smallest microbatch: one token, with and without supervision."""
    c, loss = case([0], tokens=1, seed=7), with_terms(loss, more)
    check(run(c, loss, group), expected(c, **more))
    found = run(case([], tokens=1), loss, group)
    assert not found.loss and not found.hidden.any() and not found.weight.any()


def test_inputs_are_left_alone(group: dist.ProcessGroup) -> None:
    upstream: list[Tensor | None] = [torch.ones(len(SUPERVISED))] * 3
    for loss in EVERY:
        c, copy = case(), case()
        run(c, loss, group)
        run_statistics(c, with_terms(loss, TERMS["all"]), group, upstream)
        for field, value in vars(copy).items():
            assert torch.equal(getattr(c, field), value), field


# --- what is computed --------------------------------------------------------------------------------------

PRODUCT = 2 * 8 * 12 * 32  # operations of one matrix product: n = 8 of 23 tokens, h = 12, V = 32 rows
both_formats = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def flops(c: Case, loss: LossConfig, group: dist.ProcessGroup, *, train: bool) -> tuple[int, float]:
    """Floating-point operations in matrix products, forward and backward, and the loss."""
    hidden, weight = c.hidden.clone().requires_grad_(), c.weight.clone().requires_grad_()
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(train):
        total = lm_loss(hidden, shard_of(weight, group), c.targets(), loss)[0]
        if train:
            total.backward()
    assert total.requires_grad == train
    return counter.get_total_flops(), float(total.detach())


def statistics_flops(c: Case, loss: LossConfig, group: dist.ProcessGroup) -> tuple[int, int]:
    """Of `token_statistics`: forward, and forward and backward."""
    hidden, weight = c.hidden.clone().requires_grad_(), c.weight.clone().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        rows = token_statistics(hidden, shard_of(weight, group), c.targets(), loss)
        forward = counter.get_total_flops()
        rows.logprob.sum().backward()
    return forward, counter.get_total_flops()


@both_formats
@fused
def test_three_products_to_train_and_one_to_evaluate(
    loss: LossConfig, dtype: torch.dtype, group: dist.ProcessGroup
) -> None:
    """Scores, gradients of hidden states and of the weight: 2 n h V each, n supervised tokens only."""
    c = case().to(dtype)
    train, train_loss = flops(c, loss, group, train=True)
    evaluation, evaluation_loss = flops(c, loss, group, train=False)
    assert (train, evaluation) == (3 * PRODUCT, PRODUCT)
    assert evaluation_loss == train_loss


@both_formats
@fused
def test_four_products_where_the_upstream_gradient_comes_later(
    loss: LossConfig, dtype: torch.dtype, group: dist.ProcessGroup
) -> None:
    assert statistics_flops(case().to(dtype), loss, group) == (PRODUCT, 4 * PRODUCT)
    c = case([]).to(dtype)  # nothing is computed for nothing
    assert flops(c, loss, group, train=True) == flops(c, loss, group, train=False) == (0, 0.0)
    assert statistics_flops(c, loss, group) == (0, 0)


@both_formats
@pytest.mark.parametrize("loss", [*CHUNKED, FULL], ids=name)
def test_with_logits_every_token_is_projected(loss: LossConfig, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    """What fused saves: all 23 tokens, supervised or not."""
    one, c = 2 * 23 * 12 * 32, case().to(dtype)
    assert flops(c, loss, group, train=True)[0] == 3 * one
    assert flops(c, loss, group, train=False)[0] == one
    assert statistics_flops(c, loss, group) == (one, 3 * one)
