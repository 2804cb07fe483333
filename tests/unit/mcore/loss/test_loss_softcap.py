"""The loss head with soft-capped logits (model.logits_softcap), against the definition in float64."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sft.config import LossConfig
from sft.mcore.loss import Targets, VocabShard, lm_loss
from tests.ranks.alive import Alive
from tests.unit.loss_cases import (
    EACH,
    EVERY,
    PADDED,
    SUPERVISED,
    TERMS,
    VOCAB,
    Case,
    case,
    check,
    expected,
    inputs_of,
    name,
    run,
    run_statistics,
    same,
    terms_of,
    tolerance,
    with_terms,
    world_of_one,
)

SOFTCAP = 1.5  # scores have a standard deviation of 3.5: most are close to the limit, and some are far below it
# bf16 keeps 8 bits: a score of 1.5 is off by 4e-3.
BF16_LOSS_TOLERANCE = 1e-2
BF16_GRADIENT_TOLERANCE = 2e-2  # of the gradient's norm

every = pytest.mark.parametrize("loss", EVERY, ids=name)
each = pytest.mark.parametrize("loss", EACH, ids=lambda c: c.impl)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[dist.ProcessGroup]:
    with world_of_one() as tp:
        yield tp


def capped(softcap: float = SOFTCAP) -> Case:
    return replace(case(), softcap=softcap)


@each
def test_written_out(loss: LossConfig, group: dist.ProcessGroup) -> None:
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
def test_loss_and_gradients_are_those_of_the_definition(loss: LossConfig, group: dist.ProcessGroup) -> None:
    c = capped()
    found, without = run(c, loss, group), run(replace(c, softcap=None), loss, group)
    check(found, expected(c))
    assert abs(float(found.loss - without.loss)) > 0.1 * float(without.loss)
    assert not found.hidden[~c.supervised].any() and not found.weight[VOCAB:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("terms", TERMS)
@each
def test_every_term_is_that_of_the_definition(
    loss: LossConfig, terms: str, dtype: torch.dtype, group: dist.ProcessGroup
) -> None:
    c, limit = capped().to(dtype), tolerance(loss, dtype)
    check(run(c, with_terms(loss, TERMS[terms]), group), expected(c, **TERMS[terms]), limit, limit)


@each
def test_every_statistic_has_a_gradient(loss: LossConfig, group: dist.ProcessGroup) -> None:
    c, generator = capped(), torch.Generator().manual_seed(1)
    upstream: list[Tensor | None] = list(torch.randn(3, len(SUPERVISED), generator=generator, dtype=torch.float64))
    found = run_statistics(c, with_terms(loss, {"z_loss_coef": 1.0, "entropy_coef": 1.0}), group, upstream)
    check(found, expected(c, upstream))


@each
def test_hidden_states_in_bf16(loss: LossConfig, group: dist.ProcessGroup) -> None:
    c = capped().to(torch.bfloat16)
    check(run(c, loss, group), expected(c), BF16_LOSS_TOLERANCE, BF16_GRADIENT_TOLERANCE)


@each
def test_the_best_score_stays_the_best(loss: LossConfig, group: dist.ProcessGroup) -> None:
    """The label is the largest of 17 scores in every second token."""
    c = capped(6.0)
    best = (c.hidden[:, 0] @ c.weight[:VOCAB].t()).argmax(-1)
    right = torch.arange(len(best)) % 2 == 0
    c = replace(c, labels=torch.where(right, best, (best + 1) % VOCAB)[None])
    assert terms_of(c, loss, group)[1].correct.tolist() == right[c.supervised].double().tolist()


@each
def test_a_frozen_weight_changes_no_bit_of_the_hidden_gradient(loss: LossConfig, group: dist.ProcessGroup) -> None:
    c = capped()
    trained = run(c, loss, group)
    hidden, weight = inputs_of(c)
    weight.requires_grad_(False)
    shard = VocabShard.of(weight, VOCAB, group, sequence_parallel=False, softcap=SOFTCAP)
    total, rows = lm_loss(hidden, shard, c.targets(), loss)
    total.backward()
    assert hidden.grad is not None and torch.equal(hidden.grad, trained.hidden) and torch.equal(total, trained.loss)
    assert weight.grad is None


@each
def test_without_gradients_the_loss_is_the_same(loss: LossConfig, group: dist.ProcessGroup) -> None:
    c, loss = capped(), with_terms(loss, TERMS["all"])
    objective, rows = terms_of(c, loss, group)
    same(replace(run(c, loss, group), loss=objective), run(c, loss, group))
    assert len(c.weight) == PADDED and rows.logprob.isfinite().all()


def test_a_vocabulary_of_gemma_makes_no_logits(group: dist.ProcessGroup) -> None:
    """64 tokens over 262,208 entries of width 8, in chunks of 4: what exists beside the inputs at a time.

    Scores of 4 tokens and the gradient of the weight, 8 wide, are 12 x 262,208 numbers.  A pass takes blocks of
    1/2 MiB, here one row, and makes up to 5 tensors of its size.  Logits of all tokens would be 64 x 262,208 numbers.
    """
    vocab, width, tokens, chunk = 262_208, 8, 64, 4
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, 1, width, generator=generator).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    targets = Targets(rows=torch.arange(tokens), labels=labels, weights=torch.ones(tokens))
    shard = VocabShard.of(weight, vocab, group, sequence_parallel=False, softcap=SOFTCAP)
    with Alive() as alive:
        total, _ = lm_loss(hidden, shard, targets, LossConfig(impl="fused", chunk_size=chunk))
    assert alive.peak <= 4 * vocab * (width + chunk + 5)
    scores = hidden.detach()[:, 0].double() @ weight.detach().double().t()
    logprobs = (SOFTCAP * torch.tanh(scores / SOFTCAP)).log_softmax(-1)
    assert float(total.detach()) == pytest.approx(-float(logprobs[torch.arange(tokens), labels].sum()), rel=1e-6)
