"""The loss head with the vocabulary split over tensor-parallel ranks: every implementation and the definition agree.

The vocabulary is padded to 128 rows.  Of its 70 tokens, four ranks hold 32, 32, 6 and none: the last rank computes only
scores of padding, and must still join every collective.

Starting ranks takes longer than all computations: each layout runs the calls of every test once.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sft.config import LossConfig
from sft.mcore import device, process_groups
from sft.mcore.loss import VocabShard, lm_loss
from tests.ranks.pool import Ranks, join
from tests.unit.loss_cases import TERMS, Case, Outcome, check, expected, same, tensor_parallel, with_terms

TOKENS, WIDTH, ROWS = 24, 12, 128
SPREAD = [0, 2, 3, 7, 11, 12, 13, 19, 23]
LATE = [18, 20, 21, 22, 23]  # with sequence parallelism, tokens of the last rank only
FUSED = [LossConfig(impl="fused", chunk_size=c) for c in (1, 4, None)]
CHUNKED = [LossConfig(impl="chunked", chunk_size=c) for c in (7, None)]
FULL = LossConfig(impl="full")
EVERY = [*FUSED, *CHUNKED, FULL]
# one config of each implementation
EACH = [LossConfig(impl="fused", chunk_size=4), LossConfig(impl="chunked", chunk_size=7), FULL]

VOCABULARIES = {2: [70, 40], 4: [70, 128, 20]}  # by tp
INFINITIES = [torch.nan, torch.inf, -torch.inf]
# labels outside the vocabulary or in its padding; no rank or another rank holds them
ODD_LABELS = [-100, 69, 70, 127, 128, 10**9]


def case(vocab: int, supervised: Sequence[int] = SPREAD) -> Case:
    generator = torch.Generator().manual_seed(vocab)
    mask = torch.zeros(1, TOKENS)
    mask[0, list(supervised)] = 1.0
    return Case(
        hidden=torch.randn(TOKENS, 1, WIDTH, generator=generator),
        weight=torch.randn(ROWS, WIDTH, generator=generator),
        labels=torch.randint(0, vocab, (1, TOKENS), generator=generator),
        weights=mask * (0.1 + torch.rand(1, TOKENS, generator=generator)),
    )


# --- the calls, by topic -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of `lm_loss`."""

    case: Case
    loss: LossConfig
    vocab: int = 70
    upstream: float = 1.0
    into_main_grad: bool = False
    frozen: bool = False

    def check(self, found: Outcome) -> None:
        """Checks that `found` equals the result of the definition."""
        c, loss = self.case, self.loss
        wanted = expected(c, self.upstream, self.vocab, z_loss_coef=loss.z_loss_coef, entropy_coef=loss.entropy_coef)
        check(found, replace(wanted, weight=torch.zeros_like(wanted.weight)) if self.frozen else wanted)
        assert not found.weight[self.vocab :].any()  # exactly 0
        assert not found.hidden[~c.supervised].any()


Calls = Callable[[int], list[Call]]  # by tp


def plain(tp: int) -> list[Call]:
    cases = [(vocab, case(vocab)) for vocab in VOCABULARIES[tp]]
    cases += [(70, case(70, supervised)) for supervised in (LATE, range(TOKENS), [5])]
    return [Call(vocab=vocab, case=c, loss=loss) for vocab, c in cases for loss in EVERY]


def more_terms(tp: int) -> list[Call]:
    losses = [with_terms(loss, more) for more in TERMS.values() for loss in EACH]
    return [Call(vocab=vocab, case=case(vocab), loss=loss) for vocab in VOCABULARIES[tp] for loss in losses]


def main_grads(tp: int) -> list[Call]:
    calls = [Call(case=case(70, s), loss=loss) for s in (SPREAD, LATE) for loss in FUSED]
    return [replace(call, into_main_grad=True) for call in calls]


def frozen(tp: int) -> list[Call]:
    """Pairs of calls: with a trained weight and with a frozen one."""
    trained = [Call(case=case(70, s), loss=with_terms(loss, TERMS["all"])) for s in (SPREAD, LATE, []) for loss in EACH]
    trained += [replace(call, into_main_grad=True) for call in trained if call.loss.impl == "fused"]
    trained += [Call(case=case(70), loss=loss, upstream=1 / 3) for loss in EACH]
    return [call for pair in ((call, replace(call, frozen=True)) for call in trained) for call in pair]


def capped(tp: int) -> list[Call]:
    """Scores of standard deviation 3.5, most of them beyond the limit; also with a frozen weight."""
    c, loss = replace(case(70), softcap=1.5), [with_terms(loss, TERMS["all"]) for loss in EACH]
    return [Call(case=c, loss=x, frozen=frozen) for x in loss for frozen in (False, True)]


def nothing(tp: int) -> list[Call]:
    losses = [*EVERY, *(with_terms(loss, TERMS["all"]) for loss in EACH)]
    return [Call(case=c, loss=loss) for c in (case(70, []), case(70, []).broken(torch.nan)) for loss in losses]


def huge_padding(tp: int) -> list[Call]:
    """Pairs of calls: without and with huge values in the padding."""
    calls = []
    for vocab in {2: [40], 4: [70]}[tp]:
        weight = case(vocab).weight
        weight[vocab:] = 1e4
        for loss in [*EACH, *(with_terms(loss, TERMS["all"]) for loss in EACH)]:
            calls += [Call(vocab=vocab, case=c, loss=loss) for c in (case(vocab), replace(case(vocab), weight=weight))]
    return calls


def far_apart(tp: int) -> list[Call]:
    """The largest scores on the rank with ids 32 to 63 are thousands above those on the other ranks."""
    weight = case(70).weight
    weight[32:64] *= 1e3
    losses = [with_terms(loss, more) for more in (TERMS["plain"], TERMS["flatter"]) for loss in EACH]
    return [Call(case=replace(case(70), weight=weight), loss=loss) for loss in losses]


def odd_labels(tp: int) -> list[Call]:
    """For every loss, the first call has `plain` labels."""
    c = case(70)
    cases = [c, *(replace(c, labels=torch.where(c.supervised, c.labels, label)) for label in ODD_LABELS)]
    return [Call(case=c, loss=loss) for loss in EACH for c in cases]


def bad_rows(tp: int) -> list[Call]:
    """For every loss, the first call has finite hidden states."""
    return [Call(case=c, loss=loss) for loss in EACH for c in (case(70), *(case(70).broken(bad) for bad in INFINITIES))]


def guesses(tp: int) -> list[Call]:
    """Every other label is the token with the largest score."""
    calls = []
    for vocab in VOCABULARIES[tp]:
        c = case(vocab)
        best = (c.hidden[:, 0] @ c.weight[:vocab].t()).argmax(-1)
        right = torch.arange(TOKENS) % 2 == 0
        calls += [Call(vocab=vocab, case=replace(c, labels=torch.where(right, best, c.labels)), loss=x) for x in EACH]
    return calls


TOPICS: list[Calls] = [plain, more_terms, main_grads, frozen, capped]
TOPICS += [nothing, huge_padding, far_apart, odd_labels, bad_rows, guesses]


# --- on the ranks ------------------------------------------------------------------------------------------


def on_each(tp: int, sequence_parallel: bool) -> bytes:
    """The outcomes of the calls of every topic, with this rank's part of both gradients.

    Pickled: otherwise each tensor would become a file in shared memory.
    """
    join()
    place = process_groups.start(tensor_parallel(tp, sequence_parallel), device.start("cpu"), seed=1, timeout_s=600)
    try:
        outcomes = {topic.__name__: [outcome(place, sequence_parallel, call) for call in topic(tp)] for topic in TOPICS}
        return pickle.dumps(outcomes)
    finally:
        process_groups.stop()


def outcome(place: process_groups.ProcessGroups, sequence_parallel: bool, call: Call) -> Outcome:
    hidden, weight = inputs(place, sequence_parallel, call.case)
    targets = call.case.targets()
    if call.frozen:
        weight.requires_grad_(False)
    elif call.into_main_grad:
        weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    shard = VocabShard.of(weight, call.vocab, place.tp, sequence_parallel=sequence_parallel, softcap=call.case.softcap)
    total, rows = lm_loss(hidden, shard, targets, call.loss)
    with torch.no_grad():
        evaluated = lm_loss(hidden, shard, targets, call.loss)[0]
    assert torch.equal(evaluated, total.detach())  # losses with and without gradients are equal
    (total * call.upstream).backward()
    assert hidden.grad is not None and (weight.grad is None) == call.frozen
    return Outcome(
        loss=total.detach(),
        hidden=hidden.grad,
        weight=weight_gradient(weight, call),
        rows=tuple(None if column is None else column.detach() for column in rows),
    )


def weight_gradient(weight: Tensor, call: Call) -> Tensor:
    """The gradient of the weight; zeros if the weight is frozen."""
    if call.frozen:
        assert not hasattr(weight, "grad_added_to_main_grad")
        return torch.zeros_like(weight)
    gradient: Tensor | None = weight.main_grad if call.into_main_grad else weight.grad  # type: ignore[attr-defined]
    assert gradient is not None
    return gradient


def inputs(place: process_groups.ProcessGroups, sequence_parallel: bool, c: Case) -> tuple[Tensor, Tensor]:
    """The hidden states and the weight of this rank."""
    mine, size = place.tp_rank, place.tp.size()
    hidden = c.hidden.chunk(size)[mine] if sequence_parallel else c.hidden
    return hidden.clone().requires_grad_(), c.weight.chunk(size)[mine].clone().requires_grad_()


# --- put together ------------------------------------------------------------------------------------------


def whole(outcomes: Sequence[Outcome], sequence_parallel: bool) -> Outcome:
    """Joins the outcomes of the tensor-parallel ranks into one; checks that values which must agree on all ranks do."""
    first = outcomes[0]
    for o in outcomes:
        same(replace(o, hidden=first.hidden, weight=first.weight), first)
    if not sequence_parallel:
        assert all(torch.equal(o.hidden, first.hidden) for o in outcomes)
    hidden = torch.cat([o.hidden for o in outcomes]) if sequence_parallel else first.hidden
    return replace(first, hidden=hidden, weight=torch.cat([o.weight for o in outcomes]))


Found = Callable[[Calls], list[tuple[Call, Outcome]]]


@pytest.fixture(scope="module", params=[(2, False), (4, True)], ids=["2", "4 sp"])
def found(request: pytest.FixtureRequest, ranks: Ranks) -> Found:
    """The calls of a topic with their outcomes on a layout.  The ranks of a layout compute all topics at once."""
    tp, sequence_parallel = request.param
    of_ranks = [pickle.loads(outcomes) for outcomes in ranks(tp).run(on_each, tp, sequence_parallel)]

    def of(topic: Calls) -> list[tuple[Call, Outcome]]:
        of_topic = zip(*(outcomes[topic.__name__] for outcomes in of_ranks), strict=True)
        together = [whole(outcomes, sequence_parallel) for outcomes in of_topic]
        return list(zip(topic(tp), together, strict=True))

    return of


@pytest.mark.parametrize(
    "topic",
    [plain, more_terms, main_grads, frozen, capped, huge_padding, bad_rows],
    ids=lambda topic: topic.__name__,
)
def test_a_split_vocabulary_gives_what_the_definition_says(found: Found, topic: Calls) -> None:
    for call, outcome in found(topic):
        call.check(outcome)


def test_a_frozen_weight_leaves_the_bits_of_the_hidden_gradient(found: Found) -> None:
    outcomes = [outcome for _, outcome in found(frozen)]
    for trained, other in zip(outcomes[::2], outcomes[1::2], strict=True):
        same(other, replace(trained, weight=other.weight))


def test_no_supervised_token_is_exactly_zero_and_no_rank_waits(found: Found) -> None:
    for _, outcome in found(nothing):
        assert float(outcome.loss) == 0.0
        assert outcome.hidden.shape == (TOKENS, 1, WIDTH) and not outcome.hidden.any()
        assert outcome.weight.shape == (ROWS, WIDTH) and not outcome.weight.any()


def test_padding_of_the_vocabulary_changes_nothing(found: Found) -> None:
    outcomes = [outcome for _, outcome in found(huge_padding)]
    for small, huge in zip(outcomes[::2], outcomes[1::2], strict=True):
        same(small, huge)


def test_scores_far_apart_do_not_overflow(found: Found) -> None:
    """On ranks with small scores, exp of the difference is 0, never NaN.  The entropies are nearly 0."""
    for call, outcome in found(far_apart):
        call.check(replace(outcome, rows=outcome.rows[:2]))


@pytest.mark.parametrize("topic, variants", [(odd_labels, len(ODD_LABELS)), (bad_rows, len(INFINITIES))])
def test_what_is_not_supervised_does_not_matter(found: Found, topic: Calls, variants: int) -> None:
    outcomes = [outcome for _, outcome in found(topic)]
    for i in range(0, len(outcomes), 1 + variants):
        for other in outcomes[i + 1 : i + 1 + variants]:
            same(other, outcomes[i])


def test_guesses_are_told_over_the_whole_vocabulary(found: Found) -> None:
    for call, outcome in found(guesses):
        call.check(outcome)
        right = outcome.rows[3]
        assert right is not None and 0 < right.sum() < len(right)
        assert right[call.case.targets().rows % 2 == 0].all()
