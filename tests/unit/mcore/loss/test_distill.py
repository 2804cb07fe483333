"""The divergence from a teacher: value and gradients are those of plain loops in float64 over all scores."""

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sft.batch import BranchTargets, TeacherTargets
from sft.config import LossConfig
from sft.config.distill import DistillConfig
from sft.mcore.loss import RowStatistics, Targets, VocabShard, lm_loss
from tests.unit.loss_cases import (
    EACH,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    SOFTCAP,
    SUPERVISED,
    TOKENS,
    VOCAB,
    Case,
    case,
    error,
    inputs_of,
    microbatch,
    shard_of,
    with_terms,
)

DIRECTIONS: tuple[Literal["forward", "reverse", "jsd"], ...] = ("forward", "reverse", "jsd")
TAILS: tuple[Literal["bucket", "renormalise"], ...] = ("bucket", "renormalise")
TEMPERATURES = (0.5, 1.0, 2.0)
UNTAUGHT = [3, 12]  # supervised tokens without a teacher
SHORT = 13  # a supervised token whose list is shorter than k

each = pytest.mark.parametrize("loss", EACH, ids=lambda loss: loss.impl)
directions = pytest.mark.parametrize("direction", DIRECTIONS)
tails = pytest.mark.parametrize("tail", TAILS)
temperatures = pytest.mark.parametrize("temperature", TEMPERATURES, ids=str)


def taught(c: Case, k: int, vocab: int = VOCAB, seed: int = 11) -> Case:
    """The case with a teacher of random scores, whose lists have k ids; two tokens have none, and one a shorter list.

    Lists of k = vocab are whole for all tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = c.labels.shape[1]
    logprobs = (2 * torch.randn(tokens, vocab, generator=generator)).double().log_softmax(-1)
    top = logprobs.topk(k, dim=-1)
    values, ids = top.values.float(), top.indices.int()
    if k < vocab:
        ids[[token for token in UNTAUGHT if token < tokens]] = -1
        ids[min(SHORT, tokens - 1), max(1, k // 2) :] = -1
        values[ids < 0] = torch.nan  # is not read
    factors = 0.25 + torch.rand(tokens, generator=generator)
    return replace(c, teacher=TeacherTargets(ids=ids, logprobs=values), factors=factors)


def divergence(scores: Tensor, ids: list[int], logprobs: list[float], distill: DistillConfig) -> Tensor:
    """The divergence of one token, in float64, from all scores [vocab]; one loop over the outcomes."""
    student = scores.log_softmax(-1)
    mine, theirs = [student[i] for i in ids], [torch.tensor(x, dtype=torch.float64) for x in logprobs]
    others = [i for i in range(len(scores)) if i not in ids]
    if distill.tail == "bucket" and others:
        mine.append(student[others].logsumexp(-1))
        theirs.append(torch.tensor(max(1e-7, 1.0 - sum(map(math.exp, logprobs)))).double().log())
    log_q, log_p = ((torch.stack(x) / distill.temperature).log_softmax(-1) for x in (mine, theirs))
    total = torch.zeros((), dtype=torch.float64)
    for a, b in zip(log_p, log_q):
        p, q = a.exp(), b.exp()
        middle = ((p + q) / 2).log()
        if distill.direction == "forward":
            total = total + p * (a - b)
        elif distill.direction == "reverse":
            total = total + q * (b - a)
        else:
            total = total + 0.5 * p * (a - middle) + 0.5 * q * (b - middle)
    return total


class Wanted:
    """The definition of the whole objective in float64, token by token, and its gradients."""

    def __init__(self, c: Case, loss: LossConfig, vocab: int = VOCAB, weights: Tensor | None = None) -> None:
        assert c.teacher is not None and c.factors is not None
        hidden, weight = (c.hidden.double().requires_grad_(), c.weight.double().requires_grad_())
        totals = c.weights[0] if weights is None else weights  # what the divergence of each token counts
        objective = torch.zeros((), dtype=torch.float64)
        self.divergences, self.agrees = [], []
        size = 0.0  # of all terms: the entropy's has another sign, and the sum may be close to 0
        for t in c.supervised.nonzero().flatten().tolist():
            scores = weight[:vocab] @ hidden[t, 0]
            if c.softcap is not None:
                scores = c.softcap * torch.tanh(scores / c.softcap)
            logprobs, lse = scores.log_softmax(-1), scores.logsumexp(-1)
            of_label = -loss.distill.label_weight * logprobs[c.labels[0, t]] + loss.z_loss_coef * lse**2
            of_label = of_label + loss.entropy_coef * (logprobs.exp() * logprobs).sum()
            objective = objective + c.weights[0, t].double() * of_label
            size += abs(float(c.weights[0, t] * of_label.detach()))
            count = int((c.teacher.ids[t] >= 0).sum())
            value, agrees = torch.zeros((), dtype=torch.float64), 0.0
            if count:
                ids = c.teacher.ids[t, :count].tolist()
                value = divergence(scores, ids, c.teacher.logprobs[t, :count].tolist(), loss.distill)
                agrees = float(scores.argmax() == ids[0])
                objective = objective + totals[t].double() * c.factors[t].double() * value
            self.divergences.append(float(value.detach()))
            self.agrees.append(agrees)
        objective.backward()
        assert hidden.grad is not None and weight.grad is not None
        self.allowed = LOSS_TOLERANCE * (size + abs(float(objective.detach())))
        self.loss, self.hidden, self.weight = (objective.detach(), hidden.grad, weight.grad)

    def check(self, total: Tensor, hidden: Tensor, weight: Tensor, rows: RowStatistics) -> None:
        torch.testing.assert_close(total.detach(), self.loss, rtol=0.0, atol=self.allowed)
        assert hidden.grad is not None and weight.grad is not None
        assert error(hidden.grad, self.hidden) <= GRADIENT_TOLERANCE
        assert error(weight.grad, self.weight) <= GRADIENT_TOLERANCE
        assert rows.divergence is not None and rows.agrees is not None
        n = len(self.divergences)
        assert error(rows.divergence[:n], torch.tensor(self.divergences)) <= LOSS_TOLERANCE
        assert rows.agrees[:n].tolist() == self.agrees


def compare(c: Case, loss: LossConfig, group: dist.ProcessGroup, vocab: int = VOCAB) -> RowStatistics:
    """Checks loss, gradients and statistics against the definition."""
    hidden, weight = inputs_of(c)
    total, rows = lm_loss(hidden, shard_of(weight, group, vocab, c.softcap), c.targets(), loss)
    total.backward()
    Wanted(c, loss, vocab).check(total, hidden, weight, rows)
    assert not weight.grad[vocab:].any()  # type: ignore[index]
    return rows


def distilling(loss: LossConfig, **keys: object) -> LossConfig:
    return with_terms(loss, {"distill": DistillConfig(weight=1.0, **keys)})  # type: ignore[arg-type, dict-item]


# --- the definition ----------------------------------------------------------------------------------------


@each
def test_a_divergence_written_out(loss: LossConfig, group: dist.ProcessGroup) -> None:
    """Scores [ln 6, ln 3, 0], so q = [0.6, 0.3, 0.1]; the teacher has id 1 with 0.8: outcomes p = [0.8, 0.2] and
    q = [0.3, 0.7].  KL(p, q) = 0.8 ln(8/3) + 0.2 ln(2/7) = 0.5341107; at factor 2 and label weight 0, 1.0682215.

    Gradient 2 (q - p) of the outcomes: -1 for id 1, and +1 for the bucket, of which id 0 has 6/7 and id 2 has 1/7.
    """
    c = Case(
        hidden=torch.tensor([[[1.0]]]),
        weight=torch.tensor([[math.log(6.0)], [math.log(3.0)], [0.0]]),
        labels=torch.tensor([[0]]),
        weights=torch.ones(1, 1),
        teacher=TeacherTargets(ids=torch.tensor([[1]]).int(), logprobs=torch.tensor([[math.log(0.8)]])),
        factors=torch.tensor([2.0]),
    )
    hidden, weight = inputs_of(c)
    total, rows = lm_loss(hidden, shard_of(weight, group, 3), c.targets(), distilling(loss, label_weight=0.0))
    total.backward()
    assert float(total.detach()) == pytest.approx(1.0682215, abs=1e-6)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.flatten(), torch.tensor([6 / 7, -1.0, 1 / 7]), rtol=0.0, atol=1e-6)
    assert rows.agrees is not None and rows.agrees.tolist() == [0.0]


@each
@directions
@temperatures
@tails
def test_loss_and_gradients_are_those_of_the_definition(
    loss: LossConfig,
    direction: Literal["forward", "reverse", "jsd"],
    temperature: float,
    tail: Literal["bucket", "renormalise"],
    group: dist.ProcessGroup,
) -> None:
    compare(taught(case(), 4), distilling(loss, direction=direction, temperature=temperature, tail=tail), group)


@each
@pytest.mark.parametrize("softcap", [None, SOFTCAP], ids=["", "softcap"])
@pytest.mark.parametrize("k", [1, 4, 16])
def test_with_every_other_term(loss: LossConfig, k: int, softcap: float | None, group: dist.ProcessGroup) -> None:
    """Labels are in some lists and not in others; without label weight, only the other terms have a gradient."""
    c, terms = taught(case(softcap=softcap), k), {"z_loss_coef": 0.05, "entropy_coef": 0.3}
    for label_weight in (0.5, 0.0):
        compare(c, with_terms(distilling(loss, temperature=2.0, label_weight=label_weight), terms), group)


@each
@directions
@temperatures
@tails
def test_a_list_of_the_whole_vocabulary_is_the_whole_divergence(
    loss: LossConfig,
    direction: Literal["forward", "reverse", "jsd"],
    temperature: float,
    tail: Literal["bucket", "renormalise"],
    group: dist.ProcessGroup,
) -> None:
    """The divergence of softmax(scores / T) from the teacher's tempered distribution."""
    c = taught(case(), VOCAB)
    rows = compare(c, distilling(loss, direction=direction, temperature=temperature, tail=tail), group)
    assert c.teacher is not None and rows.divergence is not None
    scores = (c.hidden[:, 0].double() @ c.weight[:VOCAB].double().t())[SUPERVISED] / temperature
    theirs = torch.empty(TOKENS, VOCAB, dtype=torch.float64)
    theirs.scatter_(1, c.teacher.ids.long(), c.teacher.logprobs.double())
    p, q = (theirs[SUPERVISED] / temperature).softmax(-1), scores.softmax(-1)
    middle = (p + q) / 2

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    whole = {"forward": kl(p, q), "reverse": kl(q, p), "jsd": (kl(p, middle) + kl(q, middle)) / 2}[direction]
    assert error(rows.divergence, whole) <= LOSS_TOLERANCE


@each
@directions
@temperatures
def test_a_student_equal_to_the_teacher_has_no_divergence(
    loss: LossConfig, direction: Literal["forward", "reverse", "jsd"], temperature: float, group: dist.ProcessGroup
) -> None:
    """At every temperature, with the bucket too; so the gradient is 0."""
    c = case()
    logprobs = (c.hidden[:, 0].double() @ c.weight[:VOCAB].double().t()).log_softmax(-1)
    top = logprobs.topk(4, dim=-1)
    c = replace(c, teacher=TeacherTargets(ids=top.indices.int(), logprobs=top.values.float()), factors=torch.ones(23))
    hidden, weight = inputs_of(c)
    config = distilling(loss, direction=direction, temperature=temperature, label_weight=0.0)
    total, rows = lm_loss(hidden, shard_of(weight, group), c.targets(), config)
    total.backward()
    assert abs(float(total.detach())) <= 1e-5 and rows.agrees is not None and rows.agrees.all()
    assert weight.grad is not None and weight.grad.abs().max() <= 1e-4


# --- numbers at the edge -----------------------------------------------------------------------------------


@each
@directions
def test_a_small_bucket_keeps_its_digits(
    loss: LossConfig, direction: Literal["forward", "reverse", "jsd"], group: dist.ProcessGroup
) -> None:
    """The student gives the bucket about exp(-30): 1 minus the known probabilities would be 0 in fp32."""
    c = Case(
        hidden=torch.tensor([[[1.0]]]),
        weight=torch.tensor([[0.0], [-1.0], [-30.5], [-31.0]]),
        labels=torch.tensor([[0]]),
        weights=torch.ones(1, 1),
        teacher=TeacherTargets(
            ids=torch.tensor([[0, 1]]).int(), logprobs=torch.tensor([[math.log(0.5), math.log(0.25)]])
        ),
        factors=torch.ones(1),
    )
    compare(c, distilling(loss, direction=direction), group, vocab=4)


@each
@directions
@pytest.mark.parametrize("upstream", [0.0, -3.0])
def test_scores_far_apart_stay_finite(
    loss: LossConfig, direction: Literal["forward", "reverse", "jsd"], upstream: float, group: dist.ProcessGroup
) -> None:
    """A bucket of probability exp(-2000), which is 0 in every format."""
    c = Case(
        hidden=torch.tensor([[[1000.0]]]),
        weight=torch.tensor([[1.0], [0.0], [-1.0]]),
        labels=torch.tensor([[0]]),
        weights=torch.ones(1, 1),
        teacher=TeacherTargets(ids=torch.tensor([[0, 1]]).int(), logprobs=torch.tensor([[-1.0, -1.5]])),
        factors=torch.ones(1),
    )
    hidden, weight = inputs_of(c)
    total, _ = lm_loss(hidden, shard_of(weight, group, 3), c.targets(), distilling(loss, direction=direction))
    (total * upstream).backward()
    assert total.isfinite() and hidden.grad is not None and weight.grad is not None
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


# --- tokens without effect ---------------------------------------------------------------------------------


@each
def test_without_a_teacher_the_objective_is_that_of_the_labels(loss: LossConfig, group: dist.ProcessGroup) -> None:
    """A microbatch where no token has a teacher, and a teacher of factor 0."""
    config = distilling(loss, temperature=2.0)
    plain, c = case(), taught(case(), 4)
    assert c.teacher is not None
    none = replace(c, teacher=replace(c.teacher, ids=torch.full_like(c.teacher.ids, -1)))
    results = []
    for of in (plain, none, replace(c, factors=None)):
        hidden, weight = inputs_of(of)
        total, rows = lm_loss(hidden, shard_of(weight, group), of.targets(), config)
        total.backward()
        results.append((total.detach(), hidden.grad, weight.grad))
        if of is none:
            assert rows.divergence is not None and not rows.divergence.any()
            assert rows.agrees is not None and not rows.agrees.any()
    for total, of_hidden, of_weight in results[1:]:
        torch.testing.assert_close(total, results[0][0], rtol=LOSS_TOLERANCE, atol=0.0)
        assert of_hidden is not None and of_weight is not None
        assert error(of_hidden, results[0][1]) <= GRADIENT_TOLERANCE  # type: ignore[arg-type]
        assert error(of_weight, results[0][2]) <= GRADIENT_TOLERANCE  # type: ignore[arg-type]


def test_logits_come_back_bit_for_bit(group: dist.ProcessGroup) -> None:
    """Two backward passes through the same logits, which only `chunked` can compute."""
    c, config = taught(case(), 4), distilling(LossConfig(impl="chunked", chunk_size=5))
    hidden, weight = inputs_of(c)
    total, _ = lm_loss(hidden, shard_of(weight, group), c.targets(), config)
    total.backward(retain_graph=True)
    assert hidden.grad is not None
    first = hidden.grad.clone()
    hidden.grad = None
    total.backward()
    assert torch.equal(hidden.grad, first)


@each
def test_evaluation_and_a_frozen_weight_give_the_same(loss: LossConfig, group: dist.ProcessGroup) -> None:
    c, config = taught(case(), 4), distilling(loss)
    hidden, weight = inputs_of(c)
    total, _ = lm_loss(hidden, shard_of(weight, group), c.targets(), config)
    total.backward()
    with torch.no_grad():
        assert torch.equal(lm_loss(hidden, shard_of(weight, group), c.targets(), config)[0], total.detach())
    other = c.hidden.clone().requires_grad_()
    lm_loss(other, shard_of(c.weight, group), c.targets(), config)[0].backward()
    assert other.grad is not None and hidden.grad is not None
    assert torch.equal(other.grad, hidden.grad)


# --- trees and shards --------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("softcap", [None, SOFTCAP], ids=["", "softcap"])
def test_a_token_with_several_labels_counts_its_divergence_with_all_their_weights(
    loss: LossConfig, softcap: float | None, group: dist.ProcessGroup
) -> None:
    """Of the further labels of token 7, the teacher's list has one; those of token 12 have no teacher."""
    c = taught(case(softcap=softcap), 6)
    assert c.teacher is not None and c.factors is not None
    listed = int(c.teacher.ids[7][c.teacher.ids[7] != c.labels[0, 7]][2])
    missing = next(i for i in range(VOCAB) if i not in c.teacher.ids[7].tolist() and i != c.labels[0, 7])
    more = [(2, int(c.labels[0, 2] + 1) % VOCAB, 0.5), (7, listed, 0.25), (7, missing, 1.5), (12, 5, 0.75)]
    rows, labels, weights = (np.array(column) for column in zip(*more))
    table = BranchTargets(
        rows=rows, labels=labels, weights=weights.astype(np.float32), counts=np.ones(4, dtype=np.int32)
    )
    config = distilling(loss, temperature=2.0)
    hidden, weight = inputs_of(c)
    whole = replace(microbatch(c.labels, c.weights), further=table, teacher=c.teacher)
    targets = Targets.of(whole, torch.device("cpu"), c.factors)
    total, found = lm_loss(hidden, shard_of(weight, group, softcap=softcap), targets, config)
    total.backward()
    # the same tokens once more for each further label; a divergence counts with the sum of weights
    index = list(rows)
    separate = replace(
        c,
        hidden=torch.cat((c.hidden, c.hidden[index])),
        labels=torch.cat((c.labels, torch.tensor(labels)[None]), dim=1),
        weights=torch.cat((c.weights, torch.tensor(weights).float()[None]), dim=1),
        teacher=TeacherTargets(
            ids=torch.cat((c.teacher.ids, c.teacher.ids[index])),
            logprobs=torch.cat((c.teacher.logprobs, c.teacher.logprobs[index])),
        ),
        factors=torch.cat((c.factors, c.factors[index])),
    )
    wanted = Wanted(separate, config)
    wanted.hidden = wanted.hidden[:TOKENS].index_add(0, torch.tensor(rows), wanted.hidden[TOKENS:])
    wanted.check(total, hidden, weight, found)


@pytest.mark.parametrize("impl", ["fused", "chunked"])
def test_ids_of_another_shard_change_no_score_of_this_one(
    impl: Literal["fused", "chunked"], group: dist.ProcessGroup
) -> None:
    """This shard has the ids 8 to 15; lists of ids of other shards leave its gradient at 0 for a factor without
    labels, but for the bucket."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(shape, generator=generator) for shape in ((2, 1, 4), (8, 4)))
    shard = VocabShard(weight=weight, first=8, num_real=8, group=group, sequence_parallel=False)
    teacher = TeacherTargets(ids=torch.tensor([[3, 30], [8, 40]]).int(), logprobs=torch.tensor([[-0.5, -1.5]] * 2))
    whole = replace(microbatch(torch.tensor([[9, 9]]), torch.ones(1, 2)), teacher=teacher)
    config = distilling(LossConfig(impl=impl), tail="renormalise", label_weight=0.0)
    leaf = hidden.clone().requires_grad_()
    shard = replace(shard, weight=weight.clone().requires_grad_())
    lm_loss(leaf, shard, Targets.of(whole, torch.device("cpu"), torch.ones(2)), config)[0].backward()
    of_weight = shard.weight.grad
    assert of_weight is not None and of_weight[0].any()  # id 8
    assert not of_weight[1:].any()
