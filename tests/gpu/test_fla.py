"""The kernels of flash-linear-attention on a GPU, in bf16, against plain torch in fp32."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sft.mcore.linear_attention import fla_functions, fla_kernel
from sft.mcore.linear_attention.delta_rule import Fragments, Inputs, Kernel
from sft.mcore.linear_attention.gated_delta import gated_delta_rule
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from sft.parallel.taps import Taps
from tests.unit.fixtures.recurrence import OneProcess

KEY_HEADS, VALUE_HEADS, WIDTH, TAPS = 2, 6, 128, 4
FORWARD_TOLERANCE, BACKWARD_TOLERANCE = 1e-2, 2e-2  # of the norm; FLA multiplies in bf16
FRAGMENTS = {"one": [0, 2048], "many": [0, 1, 64, 65, 320, 320, 1344, 1600, 1601, 2048]}


@pytest.fixture(scope="module")
def fla() -> Kernel:
    if reason := fla_functions.problem() or fla_kernel.old_gpu() or fla_kernel.wrong_triton():
        pytest.skip(reason)
    return fla_kernel.FlaKernel(fla_functions.functions())


def inputs() -> tuple[Inputs, Tensor]:
    """bf16 inputs of 2,048 tokens with fp32 decays, and a gradient of the outputs."""
    torch.manual_seed(5)
    shapes = [(heads, WIDTH) for heads in (KEY_HEADS, KEY_HEADS, VALUE_HEADS, VALUE_HEADS)]
    q, k, v, grad = (torch.randn(2048, *shape, device="cuda").bfloat16() for shape in shapes)
    g = -torch.exp(torch.randn(2048, VALUE_HEADS, device="cuda") - 3)
    return Inputs(q, k, v, g, torch.rand(2048, VALUE_HEADS, device="cuda").bfloat16()), grad


def in_fp32(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().float().requires_grad_() for x in tensors]


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], num_outputs: int) -> None:
    """Of the norm.  The first `num_outputs` tensors are outputs, the others gradients."""
    errors = [float((x.float() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)]
    assert max(errors[:num_outputs]) < FORWARD_TOLERANCE and max(errors[num_outputs:]) < BACKWARD_TOLERANCE, errors


@pytest.mark.parametrize("mix", FRAGMENTS)
def test_fla_computes_what_plain_torch_does(fla: Kernel, mix: str) -> None:
    """Outputs, maps and all gradients, with states that come from and go to other fragments."""
    narrow, grad = inputs()
    boundaries = FRAGMENTS[mix]
    fragments = Fragments.of(boundaries, range(len(boundaries) // 2))
    states, last = (torch.randn(len(fragments.linked), VALUE_HEADS, WIDTH, WIDTH, device="cuda") for _ in "ab")
    results = []
    for kernel, x, dout in (
        (fla, narrow, grad),
        (TorchDeltaKernel(), Inputs(*(x.float() for x in narrow)), grad.float()),
    ):
        schedule = kernel.schedule(fragments, VALUE_HEADS, grad.device)
        prepared = kernel.prepared(x, schedule)
        out, saved = kernel.forward(prepared, schedule, states)
        gradients = kernel.backward(dout, prepared, schedule, states, saved, last)
        of_states = *kernel.transitions(prepared, schedule), kernel.state_gradients(dout, prepared, schedule)
        results.append([out, *of_states, *gradients])
    assert_close(*results, num_outputs=3)


@pytest.mark.parametrize("cp", [2, 8])
def test_fragments_of_a_cp_group_are_the_document(fla: Kernel, cp: int) -> None:
    """Forward and backward of a document of 3,072 tokens that 2 x cp fragments share, one after the other in this
    process, and of a short one, beside both documents as a whole in plain torch."""
    narrow, grad = inputs()
    shared = Fragments.of([*range(0, 3072, 1536 // cp), 3072, TOKENS], range(2 * cp))
    results = []
    for kernel, dtype, fragments, passing in (
        (fla, torch.bfloat16, shared, OneProcess([range(2 * cp)])),
        (TorchDeltaKernel(), torch.float32, Fragments.of([0, 3072, TOKENS]), None),
    ):
        leaves = [x.detach().to(torch.promote_types(x.dtype, dtype)).requires_grad_() for x in narrow]
        schedule = kernel.schedule(fragments, VALUE_HEADS, DEVICE)
        link: Any = passing
        out = gated_delta_rule(Inputs(*leaves), schedule, kernel, link)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))])
    check(*results, num_forward=1)


def test_another_document_changes_nothing(fla: Kernel) -> None:
    """Bitwise, once FLA has chosen its variants."""
    narrow, grad = inputs()
    inside = slice(320, 1344)
    other = Inputs(*(x.clone() for x in narrow))
    for x in other[:3]:
        x[inside] = torch.randn_like(x[inside])
    results = []
    schedule = fla.schedule(Fragments.of(edges), VALUE_HEADS, DEVICE)
    for x in (narrow, narrow, other):
        prepared = fla.prepared(x, schedule)
        out, saved = fla.forward(prepared, schedule, None)
        results.append([out, *fla.backward(grad, prepared, schedule, None, saved, None)])
    for a, b in zip(*results[1:]):
        assert torch.equal(a[:320], b[:320]) and torch.equal(a[1344:], b[1344:])


def of_a_layer(kernel: Kernel, part: str, device: torch.device) -> Callable[..., Tensor]:
    """A function of a part's tensors."""
    if part == "convolution":
        taps = Taps.of(torch.tensor([0, 320, 321, 1344, 2048]).int().numpy(), TAPS, 1, 0)
        plan = kernel.convolution_plan(taps, device)
        return lambda x, weight: kernel.convolution(x, weight, plan, None)
    if part == "decay":
        return kernel.log_decay
    return lambda x, gate, weight: kernel.gated_norm(x, gate, weight, 1e-6)[0]


@pytest.mark.parametrize("part", ["convolution", "decay", "gated norm"])
def test_what_surrounds_the_rule_is_that_of_plain_torch(fla: Kernel, part: str) -> None:
    torch.manual_seed(7)
    heads = (2048, VALUE_HEADS, WIDTH)
    shapes = {
        "convolution": [(2048, 2 * WIDTH), (2 * WIDTH, TAPS)],
        "decay": [(2048, VALUE_HEADS), (VALUE_HEADS,), (VALUE_HEADS,)],
        "gated norm": [heads, heads, (WIDTH,)],
    }[part]
    tensors = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    results, wide = [], in_fp32(tensors)
    grad = torch.randn_like(of_a_layer(TorchDeltaKernel(), part, wide[0].device)(*wide))
    for kernel, given in ((fla, tensors), (TorchDeltaKernel(), wide)):
        out = of_a_layer(kernel, part, grad.device)(*given)
        results.append([out.detach(), *torch.autograd.grad(out, given, grad.to(out.dtype))])
    assert_close(*results, num_outputs=1)


def test_a_pass_does_not_wait_for_the_gpu(fla: Kernel) -> None:
    """Forward and backward with maps and states, once everything is compiled."""
    narrow, grad = inputs()
    boundaries = FRAGMENTS["many"]
    num_linked = len(boundaries) // 2
    for mode in ("default", "error"):
        schedule = fla.schedule(Fragments.of(boundaries, range(num_linked)), VALUE_HEADS, grad.device)
        states = torch.randn(num_linked, VALUE_HEADS, WIDTH, WIDTH, device="cuda")
        torch.cuda.set_sync_debug_mode(mode)
        try:
            prepared = fla.prepared(narrow, schedule)
            fla.transitions(prepared, schedule)
            _, saved = fla.forward(prepared, schedule, states)
            fla.state_gradients(grad, prepared, schedule)
            fla.backward(grad, prepared, schedule, states, saved, states)
        finally:
            torch.cuda.set_sync_debug_mode("default")
