"""The loss head with a frozen output weight: the hidden gradient is the same, with one matrix product less, and without
memory for a gradient of the weight.

A weight that LoRA freezes requires no gradient, and DistributedDataParallel gives it no `main_grad`.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sft.config import LossConfig
from sft.mcore.loss import VocabShard, lm_loss
from tests.unit.loss_cases import (
    SUPERVISED,
    TERMS,
    TOKENS,
    Case,
    caps,
    case,
    each,
    every,
    poisoned_memory,
    shard_of,
    with_terms,
)
from tools.bench.counter import Counter

Tensors = tuple[Tensor, ...]
Compute = Callable[[Tensor, VocabShard], tuple[Tensor, Tensors]]  # (hidden, shard) -> loss, statistics of the rows


def loss_of(c: Case, loss: LossConfig, upstream: float = 1.0) -> Compute:
    def compute(hidden: Tensor, shard: VocabShard) -> tuple[Tensor, Tensors]:
        total, rows = lm_loss(hidden, shard, c.targets(), loss)
        return total * upstream, tuple(column for column in rows if column is not None)

    return compute


def results(c: Case, compute: Compute, group: dist.ProcessGroup, weight: Tensor) -> Tensors:
    """The gradient of the hidden states, the loss and the statistics."""
    hidden = c.hidden.clone().requires_grad_()
    total, rows = compute(hidden, shard_of(weight, group, softcap=c.softcap))
    total.backward()
    assert hidden.grad is not None
    return hidden.grad, total.detach(), *rows


def frozen_results(c: Case, compute: Compute, group: dist.ProcessGroup) -> Tensors:
    weight = c.weight.clone()
    found = results(c, compute, group, weight)
    assert weight.grad is None and not weight.requires_grad
    assert torch.equal(weight, c.weight)
    assert not hasattr(weight, "main_grad") and not hasattr(weight, "grad_added_to_main_grad")
    return found


def same(found: Tensors, wanted: Tensors) -> None:
    """Asserts that both are equal, bit for bit."""
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


# --- the gradient of the hidden states ---------------------------------------------------------------------


@caps
@pytest.mark.parametrize("supervised", [SUPERVISED, list(range(TOKENS)), [], [0]], ids=["some", "all", "none", "one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@every
def test_the_hidden_gradient_has_the_bits_of_one_with_a_trained_weight(
    loss: LossConfig, dtype: torch.dtype, supervised: list[int], softcap: float | None, group: dist.ProcessGroup
) -> None:
    """test_loss.py compares results for a trained weight with the definition."""
    c, loss = case(supervised, softcap=softcap).to(dtype), with_terms(loss, TERMS["all"])
    for compute in (loss_of(c, loss), loss_of(c, loss, 1 / 3)):
        trained = results(c, compute, group, c.weight.clone().requires_grad_())
        same(frozen_results(c, compute, group), trained)
    in_buffer = c.weight.clone().requires_grad_()  # the form in which DistributedDataParallel leaves the weight
    in_buffer.main_grad = torch.zeros(c.weight.shape)  # type: ignore[attr-defined]
    same(frozen_results(c, loss_of(c, loss), group), results(c, loss_of(c, loss), group, in_buffer))


@each
def test_a_frozen_weight_s_buffer_is_left_alone(loss: LossConfig, group: dist.ProcessGroup) -> None:
    """The buffer belongs to a weight that was trained before."""
    c, weight = case(), case().weight
    weight.main_grad = torch.zeros(c.weight.shape)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    results(c, loss_of(c, loss, -3.0), group, weight)
    assert weight.grad is None and not weight.main_grad.any()  # type: ignore[attr-defined]
    assert weight.grad_added_to_main_grad is False  # type: ignore[attr-defined]


@each
def test_nothing_is_computed_if_neither_requires_a_gradient(loss: LossConfig, group: dist.ProcessGroup) -> None:
    c, loss = case(), with_terms(loss, TERMS["all"])
    total, columns = lm_loss(c.hidden, shard_of(c.weight, group), c.targets(), loss)
    assert not any(x.requires_grad for x in (total, *columns) if x is not None)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@each
def test_hidden_states_of_unsupervised_tokens_may_hold_anything(
    loss: LossConfig, bad: float, group: dist.ProcessGroup
) -> None:
    found, wanted = (frozen_results(c, loss_of(c, loss), group) for c in (case().broken(bad), case()))
    same(found, wanted)


@each
def test_nothing_is_read_before_it_is_written(loss: LossConfig, group: dist.ProcessGroup) -> None:
    with poisoned_memory() as poison:
        for supervised in (SUPERVISED, []):
            found, c = [], case(supervised)
            for poisoned in (False, True):
                poison(poisoned)
                found.append(frozen_results(c, loss_of(c, loss), group))
            same(*found)


# --- matrix products and allocated memory ------------------------------------------------------------------

PRODUCT = 2 * 8 * 12 * 32  # operations of one matrix product: n = 8 of 23 tokens, h = 12, V = 32 rows
OF_ALL = 2 * 23 * 12 * 32


def flops(c: Case, compute: Compute, group: dist.ProcessGroup) -> int:
    with FlopCounterMode(display=False) as counter:
        frozen_results(c, compute, group)
    total: int = counter.get_total_flops()
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every
def test_no_matrix_product_makes_the_weight_s_gradient(
    loss: LossConfig, dtype: torch.dtype, group: dist.ProcessGroup
) -> None:
    """Two products: scores and gradients of hidden states."""
    c = case().to(dtype)
    assert flops(c, loss_of(c, loss), group) == 2 * (PRODUCT if loss.impl == "fused" else OF_ALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each
def test_no_memory_is_allocated_for_the_weight_s_gradient(
    loss: LossConfig, dtype: torch.dtype, group: dist.ProcessGroup
) -> None:
    """4 tokens of width 256, and 512 rows: all scores and hidden states take 12 KiB in fp32, the weight 512 KiB."""
    generator = torch.Generator().manual_seed(3)
    c = Case(
        hidden=torch.randn(4, 1, 256, generator=generator),
        weight=torch.randn(512, 256, generator=generator) / 16,
        labels=torch.tensor([[3, 1, 4, 1]]),
        weights=torch.ones(1, 4),
    ).to(dtype)
    hidden, weight = c.hidden.clone().requires_grad_(), c.weight.clone()
    peaks = []
    for used in (weight.detach(), weight.requires_grad_()):
        with Counter() as counter:
            loss_of(c, loss)(hidden, shard_of(used, group, 512))[0].backward()
        peaks.append(counter.peak_bytes(beyond=(hidden, weight)))
        hidden.grad = None
    frozen, trained = peaks
    assert frozen < weight.nbytes / 4 and trained >= weight.nbytes
