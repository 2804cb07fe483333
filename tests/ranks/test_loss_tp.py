"""The loss head with the vocabulary split over tensor-parallel ranks: fused, full and the definition agree.

The vocabulary is padded to 128 rows.  Of 70 tokens, four ranks hold 32, 32, 6 and none: the last one projects
to nothing but padding and must still join every collective.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from sft.config import LossConfig
from sft.layout import Layout
from sft.mcore import device, groups
from sft.mcore.loss import VocabShard, lm_loss
from tests.ranks.pool import RankPool, join
from tests.unit.test_loss import Case, Outcome, check, expected

TOKENS, WIDTH, ROWS = 24, 12, 128
SPREAD = [0, 2, 3, 7, 11, 12, 13, 19, 23]
LATE = [18, 20, 21, 22, 23]  # under sequence parallel, only the last rank's tokens
FUSED = [LossConfig(impl="fused", chunk_size=c) for c in (1, 4, None)]
FULL = LossConfig(impl="full")
EVERY = [*FUSED, FULL]

SPLITS = [(2, 70), (2, 40), (4, 70), (4, 128), (4, 20)]  # (tp, vocabulary)
on_splits = pytest.mark.parametrize("tp, vocab", SPLITS, ids=lambda n: str(n))
with_and_without = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence parallel"])

Ranks = Callable[[int], RankPool]


def case(vocab: int, supervised: Sequence[int] = SPREAD) -> Case:
    generator = torch.Generator().manual_seed(vocab)
    mask = torch.zeros(1, TOKENS, dtype=torch.bool)
    mask[0, list(supervised)] = True
    return Case(
        hidden=torch.randn(TOKENS, 1, WIDTH, generator=generator),
        weight=torch.randn(ROWS, WIDTH, generator=generator),
        labels=torch.randint(0, vocab, (1, TOKENS), generator=generator),
        mask=mask,
    )


# --- on the ranks ------------------------------------------------------------------------------------------


def on_each(
    tp: int,
    sequence_parallel: bool,
    vocab: int,
    cases: Sequence[Case],
    losses: Sequence[LossConfig],
    upstream: float = 1.0,
) -> list[Outcome]:
    """Every case with every loss: the loss, and gradients of this rank's hidden states and weight slice."""
    join()
    layout = Layout(
        world_size=tp,
        tp=tp,
        cp=1,
        pp=1,
        dp=1,
        virtual_stages=1,
        sequence_parallel=sequence_parallel,
        global_batch_size=1,
        num_microbatches=1,
        doc_multiple=1,
        pack_multiple=1,
    )
    place = groups.start(layout, device.start("cpu"), seed=1, timeout_s=60)
    try:
        return [_outcome(place, sequence_parallel, vocab, c, loss, upstream) for c in cases for loss in losses]
    finally:
        groups.stop()


def _outcome(
    place: groups.Groups, sequence_parallel: bool, vocab: int, c: Case, loss: LossConfig, upstream: float
) -> Outcome:
    mine, size = place.tp_rank, place.tp.size()
    hidden = c.hidden.chunk(size)[mine] if sequence_parallel else c.hidden
    hidden, weight = hidden.clone().requires_grad_(), c.weight.chunk(size)[mine].clone().requires_grad_()
    shard = VocabShard.of(weight, vocab, place.tp, sequence_parallel=sequence_parallel)
    with torch.no_grad():
        evaluated = lm_loss(hidden, shard, c.labels, c.mask, loss)
    total = lm_loss(hidden, shard, c.labels, c.mask, loss)
    assert torch.equal(evaluated, total.detach())  # the same with and without gradients
    (total * upstream).backward()
    assert hidden.grad is not None and weight.grad is not None
    return Outcome(loss=total.detach(), hidden=hidden.grad, weight=weight.grad)


# --- put together ------------------------------------------------------------------------------------------


def whole(outcomes: Sequence[Outcome], sequence_parallel: bool) -> Outcome:
    """One outcome from those of the tensor-parallel ranks; what must be the same on all is checked to be."""
    first = outcomes[0]
    assert all(torch.equal(o.loss, first.loss) for o in outcomes)
    if not sequence_parallel:
        assert all(torch.equal(o.hidden, first.hidden) for o in outcomes)
    hidden = torch.cat([o.hidden for o in outcomes]) if sequence_parallel else first.hidden
    return Outcome(loss=first.loss, hidden=hidden, weight=torch.cat([o.weight for o in outcomes]))


def run(
    ranks: Ranks,
    tp: int,
    sequence_parallel: bool,
    vocab: int,
    cases: Sequence[Case],
    losses: Sequence[LossConfig] = EVERY,
    upstream: float = 1.0,
) -> list[list[Outcome]]:
    """[case][loss]"""
    results = ranks(tp).run(on_each, tp, sequence_parallel, vocab, cases, losses, upstream)
    together = [whole(outcomes, sequence_parallel) for outcomes in zip(*results)]
    return [together[i : i + len(losses)] for i in range(0, len(together), len(losses))]


@with_and_without
@on_splits
def test_a_split_vocabulary_gives_the_loss_and_gradients_of_the_definition(
    ranks: Ranks, tp: int, vocab: int, sequence_parallel: bool
) -> None:
    cases = [case(vocab), case(vocab, LATE), case(vocab, range(TOKENS))]
    for c, outcomes in zip(cases, run(ranks, tp, sequence_parallel, vocab, cases)):
        wanted = expected(c, vocab=vocab)
        for found in outcomes:
            check(found, wanted)
            assert not found.weight[vocab:].any()
            assert not found.hidden[~c.mask[0]].any()


@with_and_without
@pytest.mark.parametrize("upstream", [0.25, -3.0])
def test_upstream_gradient_scales_both(ranks: Ranks, upstream: float, sequence_parallel: bool) -> None:
    c = case(70)
    (outcomes,) = run(ranks, 4, sequence_parallel, 70, [c], upstream=upstream)
    for found in outcomes:
        check(found, expected(c, upstream, vocab=70))


@with_and_without
def test_no_supervised_token_is_exactly_zero_and_no_rank_waits(ranks: Ranks, sequence_parallel: bool) -> None:
    (outcomes,) = run(ranks, 4, sequence_parallel, 70, [case(70, [])])
    for found in outcomes:
        assert float(found.loss) == 0.0
        assert found.hidden.shape == (TOKENS, 1, WIDTH) and not found.hidden.any()
        assert found.weight.shape == (ROWS, WIDTH) and not found.weight.any()


@with_and_without
@pytest.mark.parametrize("tp, vocab", [(2, 40), (4, 70)])
def test_padding_of_the_vocabulary_changes_nothing(ranks: Ranks, tp: int, vocab: int, sequence_parallel: bool) -> None:
    c = case(vocab)
    weight = c.weight.clone()
    weight[vocab:] = 1e4
    plain, huge = run(ranks, tp, sequence_parallel, vocab, [c, replace(c, weight=weight)])
    for a, b in zip(plain, huge):
        assert torch.equal(a.loss, b.loss)
        assert torch.equal(a.hidden, b.hidden)
        assert torch.equal(a.weight, b.weight)


@with_and_without
def test_labels_of_unsupervised_tokens_do_not_matter(ranks: Ranks, sequence_parallel: bool) -> None:
    """Outside the vocabulary or in its padding, on no rank or on another one."""
    c = case(70)
    odd = [replace(c, labels=torch.where(c.mask, c.labels, label)) for label in (-100, 69, 70, 127, 128, 10**9)]
    plain, *others = run(ranks, 4, sequence_parallel, 70, [c, *odd])
    for outcomes in others:
        for a, b in zip(plain, outcomes):
            assert torch.equal(a.loss, b.loss)
            assert torch.equal(a.hidden, b.hidden)
            assert torch.equal(a.weight, b.weight)


@with_and_without
@pytest.mark.parametrize("losses", [FUSED, [FULL]], ids=["fused", "full"])
def test_unsupervised_rows_may_hold_nan(ranks: Ranks, losses: list[LossConfig], sequence_parallel: bool) -> None:
    c = case(70)
    broken = [replace(c, hidden=torch.where(c.mask[0][:, None, None], c.hidden, bad)) for bad in (torch.nan, torch.inf)]
    for outcomes in run(ranks, 4, sequence_parallel, 70, broken, losses):
        for found in outcomes:
            check(found, expected(c, vocab=70))
