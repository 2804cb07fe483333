"""The gradient of the output weight, straight into `main_grad` of megatron-core's DistributedDataParallel."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sft.config import LossConfig
from sft.mcore.loss import lm_loss, token_statistics
from tests.unit.loss_cases import (
    EACH,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    SUPERVISED,
    TERMS,
    TOKENS,
    case,
    error,
    expected,
    inputs_of,
    poisoned_memory,
    run,
    shard_of,
    wide_case,
    with_terms,
    world_of_one,
)

FUSED, CHUNKED, FULL = EACH


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[dist.ProcessGroup]:
    with world_of_one() as tp:
        yield tp


@pytest.fixture
def poison() -> Iterator[Callable[[bool], None]]:
    with poisoned_memory() as poison:
        yield poison


def with_main_grad(weight: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A weight as megatron-core's DistributedDataParallel leaves it, its buffer not empty; and what is in there."""
    weight = weight.clone().requires_grad_()
    before = torch.randn(weight.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    weight.main_grad = before.clone()  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return weight, before


def main_grad(weight: Tensor) -> Tensor:
    found: Tensor = weight.main_grad  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("supervised", [SUPERVISED, list(range(TOKENS)), []], ids=["some", "all", "none"])
@pytest.mark.parametrize("more", [TERMS["plain"], TERMS["all"]], ids=["plain", "all"])
def test_the_gradient_is_added_to_main_grad(
    supervised: list[int], more: dict[str, float], group: dist.ProcessGroup
) -> None:
    c, wanted = case(supervised), expected(case(supervised), **more)
    hidden, (weight, before) = c.hidden.clone().requires_grad_(), with_main_grad(c.weight)
    objective = lm_loss(hidden, shard_of(weight, group), c.targets(), with_terms(FUSED, more))[0]
    torch.testing.assert_close(objective.detach(), wanted.loss, rtol=LOSS_TOLERANCE, atol=0.0)
    objective.backward()
    assert error(main_grad(weight), before + wanted.weight) <= GRADIENT_TOLERANCE
    assert weight.grad_added_to_main_grad is True  # type: ignore[attr-defined]
    assert weight.grad is not None and weight.grad.shape == weight.shape  # core waits for one; whatever is in there
    assert hidden.grad is not None and error(hidden.grad, wanted.hidden) <= GRADIENT_TOLERANCE
    if not supervised:
        assert torch.equal(main_grad(weight), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_with_another_use_gets_no_garbage(
    dtype: torch.dtype, poison: Callable[[bool], None], group: dist.ProcessGroup
) -> None:
    """core sets zero_out_wgrad on tied embeddings, and adds what autograd hands it to main_grad."""
    c = case().to(dtype)
    weight, _ = with_main_grad(c.weight)
    weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    poison(True)
    lm_loss(c.hidden, shard_of(weight, group), c.targets(), FUSED)[0].backward()
    assert weight.grad is not None and weight.grad.dtype == dtype
    assert not weight.grad.any()


def test_main_grad_sums_microbatches_in_fp32(group: dist.ProcessGroup) -> None:
    """20 microbatches in bf16: a sum of gradients rounded to bf16 each is farther from the definition."""
    microbatches = [replace(wide_case(seed), weight=wide_case(0).weight).to(torch.bfloat16) for seed in range(20)]
    wanted = torch.stack([expected(c, vocab=300).weight for c in microbatches]).sum(0)
    weight, _ = with_main_grad(microbatches[0].weight)
    main_grad(weight).zero_()
    rounded = torch.zeros(weight.shape)
    for c in microbatches:
        lm_loss(c.hidden, shard_of(weight, group, vocab=300), c.targets(), FUSED)[0].backward()
        rounded += run(c, FUSED, group, vocab=300).weight.float()
    assert main_grad(weight).dtype == torch.float32
    assert error(main_grad(weight), wanted) < error(rounded, wanted)


@pytest.mark.parametrize("upstream", [2.0, 0.5, 0.0, torch.nan])
def test_an_upstream_gradient_that_main_grad_cannot_know_is_refused(upstream: float, group: dist.ProcessGroup) -> None:
    c, (weight, _) = case(), with_main_grad(case().weight)
    objective = lm_loss(c.hidden, shard_of(weight, group), c.targets(), FUSED)[0]
    with pytest.raises(RuntimeError, match="upstream gradient of 1"):
        (objective * upstream).backward()


def test_main_grad_of_bf16_is_left_to_autograd(group: dist.ProcessGroup) -> None:
    c = case().to(torch.bfloat16)
    weight, before = with_main_grad(c.weight, torch.bfloat16)
    lm_loss(c.hidden, shard_of(weight, group), c.targets(), FUSED)[0].backward()
    assert torch.equal(main_grad(weight), before)
    assert weight.grad_added_to_main_grad is False  # type: ignore[attr-defined]
    assert weight.grad is not None and torch.equal(weight.grad, run(c, FUSED, group).weight)


@pytest.mark.parametrize("impl", [CHUNKED, FULL], ids=lambda c: c.impl)
def test_with_logits_autograd_has_the_gradient_of_the_weight(impl: LossConfig, group: dist.ProcessGroup) -> None:
    c, (weight, before) = case(), with_main_grad(case().weight)
    lm_loss(c.hidden, shard_of(weight, group), c.targets(), impl)[0].backward()
    assert torch.equal(main_grad(weight), before)
    assert weight.grad is not None and error(weight.grad, expected(c).weight) <= GRADIENT_TOLERANCE


def test_without_gradients_main_grad_stays_as_it_is(group: dist.ProcessGroup) -> None:
    c, (weight, before) = case(), with_main_grad(case().weight)
    hidden = c.hidden.clone().requires_grad_()
    with torch.no_grad():
        lm_loss(hidden, shard_of(weight, group), c.targets(), FUSED)
        token_statistics(hidden, shard_of(weight, group), c.targets(), FUSED)
    assert torch.equal(main_grad(weight), before)
    assert weight.grad_added_to_main_grad is False  # type: ignore[attr-defined]


def test_statistics_add_to_main_grad_in_backward(group: dist.ProcessGroup) -> None:
    """They learn the upstream gradients before they compute their own, so that any will do."""
    c, (weight, before) = case(), with_main_grad(case().weight)
    hidden = c.hidden.clone().requires_grad_()
    upstream = torch.randn(3, len(SUPERVISED), generator=torch.Generator().manual_seed(4))
    loss = with_terms(FUSED, {"entropy_coef": 1.0})
    rows = token_statistics(hidden, shard_of(weight, group), c.targets(), loss)
    assert torch.equal(main_grad(weight), before)
    sum((times * column).sum() for times, column in zip(upstream, rows)).backward()  # type: ignore
    wanted = expected(c, list(upstream))
    assert error(main_grad(weight), before + wanted.weight) <= GRADIENT_TOLERANCE
    assert weight.grad_added_to_main_grad is True  # type: ignore[attr-defined]
    assert hidden.grad is not None and error(hidden.grad, wanted.hidden) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("buffered", [False, True], ids=["autograd", "main_grad"])
def test_fused_goes_backward_once(buffered: bool, group: dist.ProcessGroup) -> None:
    c, (hidden, weight) = case(), inputs_of(case())
    if buffered:
        weight, _ = with_main_grad(c.weight)
    objective = lm_loss(hidden, shard_of(weight, group), c.targets(), FUSED)[0]
    objective.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        objective.backward()
