"""Tokens with several targets: the loss and its gradients are those of separate tokens with equal hidden states."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sft.batch import BranchTargets
from sft.config import LossConfig
from sft.mcore.loss import RowStatistics, Targets, VocabShard, lm_loss
from sft.mcore.loss.objective import GradientCoefficients
from sft.mcore.loss.softmax import correct_labels
from tests.ranks.alive import Alive
from tests.unit.loss_cases import (
    EXACT_TOLERANCE,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    PADDED,
    SUPERVISED,
    TOKENS,
    WIDTH,
    Case,
    caps,
    case,
    each,
    error,
    expected,
    inputs_of,
    microbatch,
    shard_of,
    terms,
    tolerance,
    with_terms,
)

# (token, label, weight): tokens 2, 7 and 22 of the case are supervised; chunks of 3 cut between token 7 and 11
FURTHER = [(2, 1, 0.5), (7, 0, 0.25), (7, 16, 1.5), (7, 3, 1.0), (22, 5, 0.75)]


def targets_of(c: Case) -> Targets:
    rows, labels, weights = (np.array(column) for column in zip(*FURTHER))
    counts = np.ones(len(rows), dtype=np.int32)
    further = BranchTargets(rows=rows, labels=labels, weights=weights.astype(np.float32), counts=counts)
    return Targets.of(replace(microbatch(c.labels, c.weights), further=further), torch.device("cpu"))


def as_separate_tokens(c: Case) -> Case:
    """The case with one more token for each further target."""
    rows, labels, weights = zip(*FURTHER)
    return replace(
        c,
        hidden=torch.cat((c.hidden, c.hidden[list(rows)])),
        labels=torch.cat((c.labels, torch.tensor([labels])), dim=1),
        weights=torch.cat((c.weights, torch.tensor([weights])), dim=1),
    )


def summed(gradient: Tensor) -> Tensor:
    """The gradient of the case's tokens, from that of separate tokens."""
    return gradient[:TOKENS].index_add(0, torch.tensor([row for row, _, _ in FURTHER]), gradient[TOKENS:])


@caps
@terms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@each
def test_several_targets_are_those_of_separate_tokens(
    loss: LossConfig, dtype: torch.dtype, more: dict[str, float], softcap: float | None, group: dist.ProcessGroup
) -> None:
    c = case(softcap=softcap).to(dtype)
    hidden, weight = inputs_of(c)
    total, rows = lm_loss(hidden, shard_of(weight, group, softcap=softcap), targets_of(c), with_terms(loss, more))
    total.backward()
    wanted, limit = expected(as_separate_tokens(c), **more), tolerance(loss, dtype)
    torch.testing.assert_close(total.detach(), wanted.loss, rtol=limit, atol=0.0)
    assert hidden.grad is not None and weight.grad is not None
    assert error(hidden.grad, summed(wanted.hidden)) <= limit
    assert error(weight.grad, wanted.weight) <= limit
    for found, theirs in zip(rows, wanted.rows, strict=True):  # first the targets of all tokens, then further ones
        if found is not None and theirs is not None:
            assert found.shape == (len(SUPERVISED) + len(FURTHER),)
            assert error(found, theirs) <= limit


def test_logits_are_computed_once(group: dist.ProcessGroup) -> None:
    c, loss = case(), LossConfig(impl="fused", chunk_size=3)
    hidden, weight = inputs_of(c)
    with FlopCounterMode(display=False) as products:
        lm_loss(hidden, shard_of(weight, group), targets_of(c), loss)[0].backward()
    assert products.get_total_flops() == 3 * 2 * len(SUPERVISED) * WIDTH * PADDED


@pytest.mark.parametrize("impl", ["chunked", "full"])
def test_all_logits_have_one_gradient(impl: Literal["chunked", "full"], group: dist.ProcessGroup) -> None:
    """Further targets take less memory than half of the logits, in chunks of one token."""
    peaks = []
    loss = LossConfig(impl=impl, chunk_size=1 if impl == "chunked" else None)
    for targets in (targets_of(case()), replace(targets_of(case()), further=None)):
        hidden, weight = inputs_of(case())
        with Alive() as alive:
            lm_loss(hidden, shard_of(weight, group), targets, loss)[0].backward()
        peaks.append(alive.peak)
    assert peaks[0] - peaks[1] < TOKENS * PADDED * 4 / 2


def test_the_tolerances_notice_one_target() -> None:
    """Without the smallest further target, the results would differ by far more than the tolerances."""
    whole = as_separate_tokens(case().to(torch.float64))
    fewer = replace(whole, weights=whole.weights.clone().index_fill_(1, torch.tensor([TOKENS + 1]), 0.0))
    a, b = expected(whole), expected(fewer)
    assert abs(float(a.loss - b.loss)) > 1e4 * max(LOSS_TOLERANCE, EXACT_TOLERANCE) * float(a.loss)
    assert error(b.weight, a.weight) > 1e3 * GRADIENT_TOLERANCE


@pytest.mark.parametrize("labels", [[16, 3], [3, 16], [23, 99], [99, 23]])
def test_a_label_of_another_shard_changes_no_score_of_this_one(labels: list[int], group: dist.ProcessGroup) -> None:
    """This shard has the ids 16 to 23; the other label of the token is clamped to the column of the own one."""
    shard = VocabShard(weight=torch.zeros(8, 4), first=16, num_real=8, group=group, sequence_parallel=False)
    own = labels.index(16 if 16 in labels else 23)
    logprob = torch.tensor([-1.0, -2.0])
    rows = RowStatistics(logprob, torch.zeros(2), None, torch.zeros(2))
    coefficients = GradientCoefficients(softmax=torch.ones(2), entropy=None, label=torch.tensor([-0.5, -0.25]))
    out = torch.full((1, 8), 7.0)
    correct_labels(torch.zeros(2, dtype=torch.int64), torch.tensor(labels), rows, coefficients, shard, out=out)
    column = labels[own] - 16
    expected = float(logprob[own].exp() + coefficients.label[own])
    assert out[0, column].item() == pytest.approx(expected, abs=1e-6)  # a sum with 7.0 rounds
    assert (torch.cat((out[0, :column], out[0, column + 1 :])) == 7.0).all()
