"""The gated delta rule in chunks has the outputs and gradients of the recurrence and of transformers."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from sft.mcore.linear_attention.delta_rule import Fragments, Inputs
from sft.mcore.linear_attention.gated_delta import gated_delta_rule
from sft.mcore.linear_attention.torch_kernel import TorchKernel
from tests.unit.fixtures.recurrence import OneProcess, random_inputs, recurrence

LENGTHS = [1, 63, 64, 0, 65, 130, 2, 200]  # of fragments; a chunk has 64 tokens
FLOAT64_TOLERANCE = 1e-11
FP32_TOLERANCE = 1e-5  # to transformers' fp32, which rounds in another order
KERNEL = TorchKernel()


def boundaries_of(lengths: list[int]) -> list[int]:
    return [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]


def gradients(out: Tensor, inputs: Inputs) -> list[Tensor]:
    """Of a random function of the outputs."""
    generator = torch.Generator().manual_seed(9)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return list(torch.autograd.grad(out, inputs, grad))


def check(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for x, reference in zip(found, expected, strict=True):
        assert x.dtype == reference.dtype and x.shape == reference.shape
        torch.testing.assert_close(x, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("correlated", [False, True])
def test_outputs_and_gradients_are_those_of_the_recurrence(correlated: bool) -> None:
    boundaries = boundaries_of(LENGTHS)
    inputs = random_inputs(boundaries[-1], correlated=correlated)
    found = gated_delta_rule(inputs, Fragments.of(boundaries), KERNEL)
    expected, _ = recurrence(inputs, boundaries, [None] * len(LENGTHS))
    check([found, *gradients(found, inputs)], [expected, *gradients(expected, inputs)], FLOAT64_TOLERANCE)


def test_states_pass_between_the_fragments_of_a_document() -> None:
    """Document a is whole, b is cut as by cp 2: the fragments on this "rank" stand in any order."""
    lengths, order = [70, 65, 65, 65, 65, 30], [1, 3, 4, 2]  # of document b, by fragment
    boundaries = boundaries_of(lengths)
    inputs = random_inputs(boundaries[-1])
    fragments = Fragments.of(boundaries, linked=sorted(order))
    found = gated_delta_rule(inputs, fragments, KERNEL, OneProcess([[sorted(order).index(i) for i in order]]))
    pieces = [torch.arange(boundaries[i], boundaries[i + 1]) for i in [0, *order, 5]]
    sequence = torch.cat(pieces)
    out, _ = recurrence(Inputs(*(x[sequence] for x in inputs)), [0, 70, 330, 360], [None] * 3)
    expected = torch.zeros_like(out).index_copy(0, sequence, out)
    check([found, *gradients(found, inputs)], [expected, *gradients(expected, inputs)], FLOAT64_TOLERANCE)


def test_maps_and_gradients_of_states() -> None:
    boundaries, linked = boundaries_of(LENGTHS), [0, 2, 3, 5, 7]
    fragments = Fragments.of(boundaries, linked)
    inputs = random_inputs(boundaries[-1])
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(len(linked), *inputs.v.shape[1:2], 8, 5, generator=generator, dtype=torch.float64)
    first: list[Tensor | None] = [None] * len(LENGTHS)
    for i, state in zip(linked, states.requires_grad_()):
        first[i] = state
    expected, last = recurrence(inputs, boundaries, first)
    a, b = KERNEL.transitions(inputs, fragments)
    check(list(a @ states + b), [last[i] for i in linked], FLOAT64_TOLERANCE)
    out, saved = KERNEL.forward(inputs, fragments, states.detach())
    check([out], [expected], FLOAT64_TOLERANCE)
    dout, dlast = torch.randn_like(out), torch.randn_like(states)
    of_states = torch.autograd.grad(expected, states, dout, retain_graph=True)
    check([KERNEL.state_gradients(dout, inputs, fragments)], list(of_states), FLOAT64_TOLERANCE)
    found = KERNEL.backward(dout, inputs, fragments, states.detach(), saved, dlast)
    results = (expected, *(last[i] for i in linked))
    check(list(found), list(torch.autograd.grad(results, inputs, (dout, *dlast))), FLOAT64_TOLERANCE)


@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_outputs_and_gradients_are_those_of_transformers(tokens: int) -> None:
    inputs = random_inputs(tokens, torch.float32)
    found = gated_delta_rule(inputs, Fragments.of([0, tokens]), KERNEL)
    batch = [x[None] for x in inputs]
    expected = torch_chunk_gated_delta_rule(*batch, use_qk_l2norm_in_kernel=True)[0][0]
    check([found, *gradients(found, inputs)], [expected, *gradients(expected, inputs)], FP32_TOLERANCE)


def test_no_tokens() -> None:
    inputs = random_inputs(0)
    out = gated_delta_rule(inputs, Fragments.of([0, 0]), KERNEL)
    assert out.shape == inputs.v.shape and [x.shape for x in gradients(out, inputs)] == [x.shape for x in inputs]
