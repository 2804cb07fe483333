"""The definition of the loss in float64, cases for comparisons with it, and tolerances."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sft.batch import Microbatch, TeacherTargets
from sft.config import LossConfig
from sft.mcore import process_groups
from sft.mcore.loss import RowStatistics, Targets, VocabShard, lm_loss
from sft.parallel.layout import Layout

TOKENS, WIDTH, VOCAB, PADDED = 23, 12, 17, 32  # 23 is prime: no chunk size divides it
# fp32 sums over 12 elements per score and up to 32 tokens, compared with float64; one rounding is 6e-8.
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-6  # relative to the gradient's norm
# The same sums in float64, where one rounding is 1e-16; but megatron-core's cross-entropy always computes in fp32.
EXACT_TOLERANCE = 1e-12
SUPERVISED = [2, 3, 7, 11, 12, 13, 19, 22]  # 8 of 23
FUSED = [LossConfig(impl="fused", chunk_size=c) for c in (1, 3, 8, 9, 4096, None)]
CHUNKED = [LossConfig(impl="chunked", chunk_size=c) for c in (1, 4, 22, 23, None)]
FULL = LossConfig(impl="full")
EVERY = [*FUSED, *CHUNKED, FULL]
# one config of each implementation
EACH = [LossConfig(impl="fused", chunk_size=3), LossConfig(impl="chunked", chunk_size=5), FULL]
# All terms that `LossConfig` can add to the loss of a token; each coefficient is large enough to change the result.
TERMS = {
    "plain": {},
    "z": {"z_loss_coef": 0.05},
    "flatter": {"entropy_coef": 0.3},
    "sharper": {"entropy_coef": -0.2},
    "all": {"z_loss_coef": 0.05, "entropy_coef": 0.3, "entropy": True},
}
SOFTCAP = 1.5  # scores have a standard deviation of 3.5: most are near the limit, and some are far below it


def name(loss: LossConfig) -> str:
    return "full" if loss.impl == "full" else f"{loss.impl} {loss.chunk_size}"


def tensor_parallel(tp: int, sequence_parallel: bool = False) -> Layout:
    """A layout of `tp` ranks."""
    ones = dict.fromkeys(("cp", "pp", "dp", "virtual_stages", "num_microbatches", "doc_multiple", "pack_multiple"), 1)
    return Layout(world_size=tp, tp=tp, sequence_parallel=sequence_parallel, global_batch_size=1, **ones)


@contextmanager
def world_of_one() -> Iterator[dist.ProcessGroup]:
    """The tensor-parallel group of one process; megatron-core's cross-entropy looks the group up globally."""
    layout = tensor_parallel(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        # the loss draws no random numbers
        patch.setattr(process_groups, "model_parallel_cuda_manual_seed", lambda seed: None)
        place = process_groups.start(layout, torch.device("cpu"), seed=1, timeout_s=600)
    try:
        yield place.tp
    finally:
        process_groups.stop()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of the loss head."""

    hidden: Tensor  # [t, 1, h]
    weight: Tensor  # [PADDED, h]
    labels: Tensor  # [1, t]
    weights: Tensor  # float32 [1, t], above 0 where supervised
    softcap: float | None = None  # limit of the scores
    teacher: TeacherTargets | None = None
    factors: Tensor | None = None  # float32 [t], of the divergence from the teacher

    @property
    def supervised(self) -> Tensor:
        return self.weights[0] > 0

    def to(self, dtype: torch.dtype) -> "Case":
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype))

    def broken(self, bad: float) -> "Case":
        """The case with `bad` in every unsupervised hidden state."""
        return replace(self, hidden=torch.where(self.supervised[:, None, None], self.hidden, bad))

    def targets(self) -> Targets:
        whole = replace(microbatch(self.labels, self.weights), teacher=self.teacher)
        return Targets.of(whole, torch.device("cpu"), self.factors)


def microbatch(labels: Tensor, weights: Tensor) -> Microbatch:
    """A microbatch with the only fields that the loss reads: labels and weights."""
    nothing, size = torch.zeros_like(labels), labels.numel()
    return Microbatch(
        cp_size=1,
        tokens=nothing,
        labels=labels,
        position_ids=nothing,
        loss_weights=weights,
        second_labels=nothing,
        second_mask=torch.zeros_like(nothing, dtype=torch.bool),
        documents=torch.zeros_like(nothing, dtype=torch.int32),
        cu_seqlens=torch.tensor([0, size], dtype=torch.int32),
        max_seqlen=size,
        lengths=np.array([size], dtype=np.int32),
        supervised=np.array([int((weights > 0).sum())], dtype=np.int32),
        sources=np.zeros(1, dtype=np.int32),
        num_documents=1,
        num_real_tokens=size,
        num_aligned_tokens=size,
        num_tokens=int((weights > 0).sum()),
        sample_ids=(0,),
    )


def case(
    supervised: list[int] | None = None, tokens: int = TOKENS, seed: int = 5, softcap: float | None = None
) -> Case:
    """A case of random numbers with weights between 0.1 and 1.1."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(1, tokens)
    mask[0, SUPERVISED if supervised is None else supervised] = 1.0
    return Case(
        hidden=torch.randn(tokens, 1, WIDTH, generator=generator),
        weight=torch.randn(PADDED, WIDTH, generator=generator),
        labels=torch.randint(0, VOCAB, (1, tokens), generator=generator),
        weights=mask * (0.1 + torch.rand(1, tokens, generator=generator)),
        softcap=softcap,
    )


def wide_case(seed: int) -> Case:
    """A case of 40 tokens of width 64 over 300 of 384 rows: it has more roundings than the small case."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(1, 40, generator=generator) < 0.6
    return Case(
        hidden=torch.randn(40, 1, 64, generator=generator),
        weight=torch.randn(384, 64, generator=generator) / 4,
        labels=torch.randint(0, 300, (1, 40), generator=generator),
        weights=mask * (0.1 + torch.rand(1, 40, generator=generator)),
    )


def inputs_of(c: Case) -> tuple[Tensor, Tensor]:
    return c.hidden.clone().requires_grad_(), c.weight.clone().requires_grad_()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    loss: Tensor
    hidden: Tensor  # gradient
    weight: Tensor  # gradient
    rows: tuple[Tensor | None, ...] = ()  # the columns of `RowStatistics`


def shard_of(weight: Tensor, group: dist.ProcessGroup, vocab: int = VOCAB, softcap: float | None = None) -> VocabShard:
    return VocabShard.of(weight, vocab, group, sequence_parallel=False, softcap=softcap)


def terms_of(c: Case, loss: LossConfig, group: dist.ProcessGroup, vocab: int = VOCAB) -> tuple[Tensor, RowStatistics]:
    """The terms and statistics of inputs that need no gradient."""
    return lm_loss(c.hidden, shard_of(c.weight, group, vocab, c.softcap), c.targets(), loss)


def run(c: Case, loss: LossConfig, group: dist.ProcessGroup, upstream: float = 1.0, vocab: int = VOCAB) -> Outcome:
    hidden, weight = inputs_of(c)
    total, rows = lm_loss(hidden, shard_of(weight, group, vocab, c.softcap), c.targets(), loss)
    (total * upstream).backward()
    assert total.dtype == torch.float64
    assert total.shape == ()
    wide = torch.float64 if c.hidden.dtype == torch.float64 and loss.impl != "full" else torch.float32
    for column in rows:
        assert column is None or (column.shape == (len(c.targets()),) and not column.requires_grad)
        assert column is None or column.dtype == wide or loss.impl == "full"
    return _outcome(c, hidden, weight, total, rows)


@contextmanager
def poisoned_memory() -> Iterator[Callable[[bool], None]]:
    """A function: after `poison(True)`, new memory that nobody has written to contains NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(before)


def _outcome(c: Case, hidden: Tensor, weight: Tensor, total: Tensor, rows: RowStatistics) -> Outcome:
    assert hidden.grad is not None and weight.grad is not None
    assert (hidden.grad.dtype, weight.grad.dtype) == (c.hidden.dtype, c.weight.dtype)
    found = tuple(None if column is None else column.detach() for column in rows)
    return Outcome(loss=total.detach(), hidden=hidden.grad, weight=weight.grad, rows=found)


def expected(
    c: Case,
    upstream: float = 1.0,
    vocab: int = VOCAB,
    z_loss_coef: float = 0.0,
    entropy_coef: float = 0.0,
    entropy: bool = False,
) -> Outcome:
    """The definition, in float64, over the real vocabulary; unsupervised rows are not read."""
    supervised = c.supervised
    inputs, labels = c.hidden[:, 0][supervised].double().requires_grad_(), c.labels[0][supervised]
    real = c.weight[:vocab].double().requires_grad_()
    scores = inputs @ real.t()
    if c.softcap is not None:
        scores = c.softcap * torch.tanh(scores / c.softcap)
    logprobs = torch.log_softmax(scores, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    guessed = (scores.argmax(-1) == labels).double()
    rows = RowStatistics(logprobs[torch.arange(len(labels)), labels], scores.logsumexp(-1), entropy, guessed)
    per_token = -rows.logprob + z_loss_coef * scores.logsumexp(-1) ** 2 - entropy_coef * entropy
    objective: Tensor = (c.weights[0][supervised].double() * per_token).sum()
    (objective * upstream).backward()
    hidden, weight = torch.zeros(c.hidden.shape).double(), torch.zeros(c.weight.shape).double()
    hidden[supervised, 0], weight[:vocab] = inputs.grad, real.grad
    return Outcome(loss=objective.detach(), hidden=hidden, weight=weight, rows=tuple(rows.map(Tensor.detach)))


def error(found: Tensor, wanted: Tensor) -> float:
    """The distance relative to the norm; if `wanted` is zero, asserts that `found` is zero."""
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    distance, norm = float((found.double() - wanted.double()).norm()), float(wanted.double().norm())
    return distance / norm if norm else distance


def check(
    found: Outcome,
    wanted: Outcome,
    loss_tolerance: float = LOSS_TOLERANCE,
    gradient_tolerance: float = GRADIENT_TOLERANCE,
) -> None:
    """Compares the loss, both gradients and the statistics of the rows that both outcomes have."""
    torch.testing.assert_close(found.loss, wanted.loss, rtol=loss_tolerance, atol=0.0)
    assert error(found.hidden, wanted.hidden) <= gradient_tolerance
    assert error(found.weight, wanted.weight) <= gradient_tolerance
    for mine, theirs in zip(found.rows, wanted.rows):
        if mine is not None and theirs is not None:
            assert error(mine, theirs) <= loss_tolerance


def same(a: Outcome, b: Outcome) -> None:
    """Asserts that both outcomes are equal, bit for bit."""
    for x, y in zip((a.loss, a.hidden, a.weight, *a.rows), (b.loss, b.hidden, b.weight, *b.rows), strict=True):
        assert (x is None) == (y is None)
        assert x is None or y is None or torch.equal(x, y)


def tolerance(loss: LossConfig, dtype: torch.dtype) -> float:
    """The tolerance of the loss.  `full` in float64 has that of fp32, because megatron-core's cross-entropy computes in
    fp32."""
    return EXACT_TOLERANCE if dtype == torch.float64 and loss.impl != "full" else LOSS_TOLERANCE


def with_terms(loss: LossConfig, more: dict[str, float]) -> LossConfig:
    return loss.model_copy(update=more)


terms = pytest.mark.parametrize("more", TERMS.values(), ids=TERMS)
every = pytest.mark.parametrize("loss", EVERY, ids=name)
each = pytest.mark.parametrize("loss", EACH, ids=lambda loss: loss.impl)
caps = pytest.mark.parametrize("softcap", [None, SOFTCAP], ids=["", "softcap"])
