"""The loss head in one process: fused and full against log_softmax over the real vocabulary, in float64.

The process group is a gloo world of one.  Nothing here needs the redirection of `mcore/device.py`, which
lasts as long as the process and is kept out of this one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sft.config import LossConfig
from sft.layout import Layout
from sft.mcore import groups
from sft.mcore.loss import VocabShard, full_token_loss, lm_loss

# fp32 sums over 12 numbers per score and up to 32 tokens, against float64; a rounding is 6e-8.
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-6  # of the gradient's norm
# bf16 keeps 8 bits: scores of about 3 are off by up to 8e-3, a mean over tokens less.
BF16_LOSS_TOLERANCE = 1e-2
BF16_GRADIENT_TOLERANCE = 2e-2  # of the gradient's norm

TOKENS, WIDTH, VOCAB, PADDED = 23, 12, 17, 32
SUPERVISED = [2, 3, 7, 11, 12, 13, 19, 22]  # 8 of 23

FUSED = [LossConfig(impl="fused", chunk_size=c) for c in (1, 3, 4, 8, 9, 4096, None)]
EVERY = [*FUSED, LossConfig(impl="full")]
every = pytest.mark.parametrize(
    "loss", EVERY, ids=lambda c: f"{c.impl} {c.chunk_size}" if c.impl == "fused" else "full"
)
fused = pytest.mark.parametrize("loss", FUSED, ids=lambda c: f"fused {c.chunk_size}")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[dist.ProcessGroup]:
    """The tensor-parallel group of a world of one; core's own cross-entropy looks it up globally."""
    layout = Layout(
        world_size=1,
        tp=1,
        cp=1,
        pp=1,
        dp=1,
        virtual_stages=1,
        sequence_parallel=False,
        global_batch_size=1,
        num_microbatches=1,
        doc_multiple=1,
        pack_multiple=1,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        patch.setattr(groups, "model_parallel_cuda_manual_seed", lambda seed: None)  # the loss draws nothing
        place = groups.start(layout, torch.device("cpu"), seed=1, timeout_s=60)
    yield place.tp
    groups.stop()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of the loss head."""

    hidden: Tensor  # [t, 1, h]
    weight: Tensor  # [PADDED, h]
    labels: Tensor  # [1, t]
    mask: Tensor  # [1, t]


def case(supervised: list[int] | None = None, tokens: int = TOKENS) -> Case:
    generator = torch.Generator().manual_seed(5)
    mask = torch.zeros(1, tokens, dtype=torch.bool)
    mask[0, SUPERVISED if supervised is None else supervised] = True
    return Case(
        hidden=torch.randn(tokens, 1, WIDTH, generator=generator),
        weight=torch.randn(PADDED, WIDTH, generator=generator),
        labels=torch.randint(0, VOCAB, (1, tokens), generator=generator),
        mask=mask,
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    loss: Tensor
    hidden: Tensor  # gradient
    weight: Tensor  # gradient


def run(c: Case, loss: LossConfig, group: dist.ProcessGroup, upstream: float = 1.0, vocab: int = VOCAB) -> Outcome:
    hidden, weight = c.hidden.clone().requires_grad_(), c.weight.clone().requires_grad_()
    shard = VocabShard.of(weight, vocab, group, sequence_parallel=False)
    total = lm_loss(hidden, shard, c.labels, c.mask, loss)
    (total * upstream).backward()
    assert total.dtype == torch.float64
    assert total.shape == ()
    assert hidden.grad is not None and weight.grad is not None
    assert (hidden.grad.dtype, weight.grad.dtype) == (c.hidden.dtype, c.weight.dtype)
    return Outcome(loss=total.detach(), hidden=hidden.grad, weight=weight.grad)


def expected(c: Case, upstream: float = 1.0, vocab: int = VOCAB) -> Outcome:
    """The definition, in float64, over the real vocabulary; unsupervised rows are not even looked at."""
    rows, labels = c.hidden[:, 0][c.mask[0]].double().requires_grad_(), c.labels[c.mask]
    real = c.weight[:vocab].double().requires_grad_()
    loss = -torch.log_softmax(rows @ real.t(), dim=-1)[torch.arange(len(labels)), labels].sum()
    (loss * upstream).backward()
    hidden, weight = torch.zeros(c.hidden.shape).double(), torch.zeros(c.weight.shape).double()
    hidden[c.mask[0], 0], weight[:vocab] = rows.grad, real.grad
    return Outcome(loss=loss.detach(), hidden=hidden, weight=weight)


def check(found: Outcome, wanted: Outcome) -> None:
    torch.testing.assert_close(found.loss, wanted.loss, rtol=LOSS_TOLERANCE, atol=0.0)
    for mine, theirs in ((found.hidden, wanted.hidden), (found.weight, wanted.weight)):
        assert mine.shape == theirs.shape
        assert mine.isfinite().all()
        assert (mine - theirs).norm() <= GRADIENT_TOLERANCE * theirs.norm()


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
        mask=torch.tensor([[True, False, True]]),
    )
    found = run(c, loss, group, vocab=2)
    assert float(found.loss) == pytest.approx(0.3132617 + 2.1269280, abs=1e-6)
    hidden = [[-0.2689414, 0.2689414], [0.0, 0.0], [-0.8807971, 0.8807971]]
    weight = [[-0.2689414, -1.7615942], [0.2689414, 1.7615942], [0.0, 0.0]]
    torch.testing.assert_close(found.hidden[:, 0], torch.tensor(hidden), rtol=0.0, atol=1e-6)
    torch.testing.assert_close(found.weight, torch.tensor(weight), rtol=0.0, atol=1e-6)


@every
@pytest.mark.parametrize("supervised", [SUPERVISED, [0], [22], list(range(23))], ids=["some", "first", "last", "all"])
def test_loss_and_gradients_are_those_of_the_definition(
    loss: LossConfig, supervised: list[int], group: dist.ProcessGroup
) -> None:
    c = case(supervised)
    found, wanted = run(c, loss, group), expected(c)
    check(found, wanted)
    unsupervised = ~c.mask[0]
    assert not found.hidden[unsupervised].any()  # exactly 0
    assert not found.weight[VOCAB:].any()


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
        mask=torch.tensor([[True, True]]),
    )
    found = run(c, loss, group, vocab=2)
    assert float(found.loss) == 1000.0  # the first token is hopeless, the second certain
    assert found.hidden.flatten().tolist() == [1.0, 0.0]
    assert found.weight.flatten().tolist() == [1000.0, -1000.0]


@every
def test_hidden_states_in_bf16(loss: LossConfig, group: dist.ProcessGroup) -> None:
    c = case()
    narrow = replace(c, hidden=c.hidden.bfloat16(), weight=c.weight.bfloat16())
    found, wanted = run(narrow, loss, group), expected(narrow)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=BF16_LOSS_TOLERANCE, atol=0.0)
    for mine, theirs in ((found.hidden, wanted.hidden), (found.weight, wanted.weight)):
        assert (mine.double() - theirs).norm() < BF16_GRADIENT_TOLERANCE * theirs.norm()


def test_fused_and_full_sum_what_full_token_loss_lists(group: dist.ProcessGroup) -> None:
    c = case()
    per_token = full_token_loss(c.hidden, VocabShard.of(c.weight, VOCAB, group, sequence_parallel=False), c.labels[0])
    assert per_token.shape == (TOKENS,)
    assert per_token.dtype == torch.float32
    torch.testing.assert_close(per_token[SUPERVISED].double().sum(), expected(c).loss, rtol=LOSS_TOLERANCE, atol=0.0)


# --- what must not matter ----------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("size", [1e4, -1e4, 1e30])
def test_padding_of_the_vocabulary_changes_nothing(loss: LossConfig, size: float, group: dist.ProcessGroup) -> None:
    c = case()
    weight = c.weight.clone()
    weight[VOCAB:] = size
    huge = run(replace(c, weight=weight), loss, group)
    plain = run(c, loss, group)
    assert torch.equal(huge.loss, plain.loss)
    assert torch.equal(huge.hidden, plain.hidden)
    assert torch.equal(huge.weight, plain.weight)
    check(huge, expected(c))


@fused
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_fused_never_looks_at_unsupervised_rows(loss: LossConfig, bad: float, group: dist.ProcessGroup) -> None:
    c = case()
    hidden = torch.where(c.mask[0][:, None, None], c.hidden, bad)
    found = run(replace(c, hidden=hidden), loss, group)
    check(found, expected(c))
    assert torch.equal(found.weight, run(c, loss, group).weight)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_full_loss_does_not_look_at_unsupervised_rows(bad: float, group: dist.ProcessGroup) -> None:
    c = case()
    hidden = torch.where(c.mask[0][:, None, None], c.hidden, bad)
    shard = VocabShard.of(c.weight, VOCAB, group, sequence_parallel=False)
    found = lm_loss(hidden, shard, c.labels, c.mask, LossConfig(impl="full"))
    torch.testing.assert_close(found, expected(c).loss, rtol=LOSS_TOLERANCE, atol=0.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_full_gradients_do_not_look_at_unsupervised_rows(bad: float, group: dist.ProcessGroup) -> None:
    c = case()
    hidden = torch.where(c.mask[0][:, None, None], c.hidden, bad)
    check(run(replace(c, hidden=hidden), LossConfig(impl="full"), group), expected(c))


@every
@pytest.mark.parametrize("label", [-100, -1, VOCAB, PADDED - 1, PADDED, 10**9])
def test_labels_of_unsupervised_tokens_do_not_matter(loss: LossConfig, label: int, group: dist.ProcessGroup) -> None:
    c = case()
    found = run(replace(c, labels=torch.where(c.mask, c.labels, label)), loss, group)
    plain = run(c, loss, group)
    assert torch.equal(found.loss, plain.loss)
    assert torch.equal(found.hidden, plain.hidden)
    assert torch.equal(found.weight, plain.weight)


@every
def test_no_supervised_token_is_exactly_zero(loss: LossConfig, group: dist.ProcessGroup) -> None:
    found = run(case([]), loss, group)
    assert float(found.loss) == 0.0
    assert found.hidden.shape == (TOKENS, 1, WIDTH) and not found.hidden.any()
    assert found.weight.shape == (PADDED, WIDTH) and not found.weight.any()


@fused
def test_chunks_do_not_change_a_token(loss: LossConfig, group: dist.ProcessGroup) -> None:
    whole, cut = run(case(), LossConfig(chunk_size=None), group), run(case(), loss, group)
    torch.testing.assert_close(cut.loss, whole.loss, rtol=LOSS_TOLERANCE, atol=0.0)
    assert (cut.hidden - whole.hidden).norm() <= GRADIENT_TOLERANCE * whole.hidden.norm()


def test_inputs_are_left_alone(group: dist.ProcessGroup) -> None:
    for loss in EVERY:
        c, copy = case(), case()
        run(c, loss, group)
        for name, value in vars(copy).items():
            assert torch.equal(getattr(c, name), value), name


# --- what is computed --------------------------------------------------------------------------------------


def flops(c: Case, loss: LossConfig, group: dist.ProcessGroup, *, train: bool) -> tuple[int, float]:
    """Floating-point operations in matrix products, forward and backward, and the loss."""
    hidden, weight = c.hidden.clone().requires_grad_(), c.weight.clone().requires_grad_()
    shard = VocabShard.of(weight, VOCAB, group, sequence_parallel=False)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(train):
        total = lm_loss(hidden, shard, c.labels, c.mask, loss)
        if train:
            total.backward()
    assert total.requires_grad == train
    return counter.get_total_flops(), float(total.detach())


@fused
def test_three_products_to_train_and_one_to_evaluate(loss: LossConfig, group: dist.ProcessGroup) -> None:
    """Scores, gradients of hidden states and of the weight: 2 n h V each, n supervised tokens only."""
    one = 2 * 8 * 12 * 32  # n = 8 of 23 tokens, h = 12, V = 32 rows
    train, train_loss = flops(case(), loss, group, train=True)
    evaluation, evaluation_loss = flops(case(), loss, group, train=False)
    assert (train, evaluation) == (3 * one, one)
    assert evaluation_loss == train_loss


@fused
def test_nothing_is_computed_for_nothing(loss: LossConfig, group: dist.ProcessGroup) -> None:
    assert flops(case([]), loss, group, train=True) == (0, 0.0)
    assert flops(case([]), loss, group, train=False) == (0, 0.0)


def test_full_projects_every_token(group: dist.ProcessGroup) -> None:
    """What fused saves: all 23 tokens, supervised or not."""
    one = 2 * 23 * 12 * 32
    full = LossConfig(impl="full")
    assert flops(case(), full, group, train=True)[0] == 3 * one
    assert flops(case(), full, group, train=False)[0] == one


# --- the slice of the vocabulary ---------------------------------------------------------------------------


class _Rank:
    """What VocabShard.of asks of a process group."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank


@pytest.mark.parametrize(
    "rank, vocab, first, num_real",
    [(0, 70, 0, 32), (1, 70, 32, 32), (2, 70, 64, 6), (3, 70, 96, 0), (3, 128, 96, 32)],
)
def test_which_rows_of_a_slice_are_tokens(rank: int, vocab: int, first: int, num_real: int) -> None:
    """70 tokens in 128 rows over 4 ranks: 32, 32, 6 and none."""
    weight = torch.zeros(32, 4)
    shard = VocabShard.of(weight, vocab, _Rank(rank), sequence_parallel=False)  # type: ignore[arg-type]
    assert (shard.first, shard.num_real) == (first, num_real)
    assert shard.weight is weight
