"""The gated delta rule of flash-linear-attention on a GPU, in bf16, against plain torch in fp32."""

import pytest
import torch
from torch import Tensor

from sft.mcore.linear_attention.delta_rule import Fragments, Inputs
from sft.mcore.linear_attention.fla_kernel import FlaKernel, operator, wrong_triton
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel

pytest.importorskip("fla", reason="fla-core is not installed here")
if reason := wrong_triton():
    pytest.skip(reason, allow_module_level=True)

KEY_HEADS, VALUE_HEADS, WIDTH = 2, 6, 128
FORWARD_TOLERANCE, BACKWARD_TOLERANCE = 1e-2, 2e-2  # of the norm; FLA multiplies in bf16
FRAGMENTS = {"one": [0, 4096], "many": [0, 1, 64, 65, 320, 320, 1344, 2000, 2001, 4096]}


def inputs() -> tuple[Inputs, Tensor]:
    """bf16 inputs of 4,096 tokens with fp32 decays, and a gradient of the outputs."""
    torch.manual_seed(5)
    shapes = [(heads, WIDTH) for heads in (KEY_HEADS, KEY_HEADS, VALUE_HEADS, VALUE_HEADS)]
    q, k, v, grad = (torch.randn(4096, *shape, device="cuda").bfloat16() for shape in shapes)
    g = -torch.exp(torch.randn(4096, VALUE_HEADS, device="cuda") - 3)
    return Inputs(q, k, v, g, torch.rand(4096, VALUE_HEADS, device="cuda").bfloat16()), grad


def distances(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((x.float() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)]


@pytest.mark.parametrize("mix", FRAGMENTS)
def test_fla_computes_what_plain_torch_does(mix: str) -> None:
    """Outputs, maps and all gradients, with states that come from and go to other fragments."""
    narrow, grad = inputs()
    boundaries = FRAGMENTS[mix]
    fragments = Fragments.of(boundaries, range(0, len(boundaries) - 1, 2))
    states, last = (torch.randn(len(fragments.linked), VALUE_HEADS, WIDTH, WIDTH, device="cuda") for _ in "ab")
    results = []
    for kernel, x, dout in (
        (FlaKernel(operator()), narrow, grad),
        (TorchDeltaKernel(), Inputs(*(x.float() for x in narrow)), grad.float()),
    ):
        schedule = kernel.schedule(fragments, VALUE_HEADS, torch.device("cuda"))
        out, saved = kernel.forward(x, schedule, states)
        gradients = kernel.backward(dout, x, schedule, states, saved, last)
        of_states = *kernel.transitions(x, schedule), kernel.state_gradients(dout, x, schedule)
        results.append([out, *of_states, *gradients])
    found = distances(*results)
    assert max(found[:3]) < FORWARD_TOLERANCE and max(found[3:]) < BACKWARD_TOLERANCE, found


def test_another_document_changes_nothing() -> None:
    """Bitwise, once FLA has chosen its variants."""
    narrow, grad = inputs()
    inside = slice(320, 1344)
    other = Inputs(*(x.clone() for x in narrow))
    for x in other[:3]:
        x[inside] = torch.randn_like(x[inside])
    kernel, results = FlaKernel(operator()), []
    schedule = kernel.schedule(Fragments.of(FRAGMENTS["many"]), VALUE_HEADS, torch.device("cuda"))
    for x in (narrow, narrow, other):
        out, saved = kernel.forward(x, schedule, None)
        results.append([out, *kernel.backward(grad, x, schedule, None, saved, None)])
    for a, b in zip(*results[1:]):
        assert torch.equal(a[:320], b[:320]) and torch.equal(a[1344:], b[1344:])
