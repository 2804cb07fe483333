"""Linear attention by flash-linear-attention on a GPU, in bf16, against plain torch in fp32.

One variant of each kernel is compiled.  With the environment variable ALL_VARIANTS, Triton compiles all and takes the
fastest, as in a run; this takes minutes.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sft.mcore.linear_attention import fla_functions, fla_kernel
from sft.mcore.linear_attention.delta_rule import DeltaKernel, Inputs
from sft.mcore.linear_attention.recurrence import Fragments
from sft.mcore.linear_attention.recurrent_attention import recurrent_attention
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from sft.parallel.taps import Taps
from tests.gpu import runs
from tests.unit.fixtures.fla_variants import keep_one_variant
from tests.unit.fixtures.recurrence import OneProcess

KEY_HEADS, VALUE_HEADS, WIDTH, TOKENS = 2, 6, 128, 4096
FORWARD_TOLERANCE, BACKWARD_TOLERANCE = 1e-2, 2e-2  # of the norm; FLA multiplies in bf16
# boundaries, number of linked fragments
FRAGMENTS = {"one": ([0, 4096], 1), "many": ([0, 1344, 2000, 2001, 2001, 2065, 2066, 2400, 4096], 4)}
DEVICE = torch.device(runs.DEVICE)


@pytest.fixture(scope="module")
def fla() -> Iterator[DeltaKernel]:
    if reason := fla_functions.problem() or fla_kernel.old_gpu() or fla_kernel.wrong_triton():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        if "ALL_VARIANTS" not in os.environ:
            keep_one_variant(patch)
        yield fla_kernel.FlaKernel(fla_functions.functions())


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def inputs() -> tuple[Inputs, Tensor]:
    """bf16 inputs of 4,096 tokens with fp32 decays, and a gradient of the outputs.

    Every other head decays so slowly that the map of 4,096 tokens is not zero in fp32.
    """
    torch.manual_seed(5)
    heads = KEY_HEADS, KEY_HEADS, VALUE_HEADS, VALUE_HEADS
    q, k, v, grad = (random(TOKENS, count, WIDTH).bfloat16() for count in heads)
    g = -torch.exp(random(TOKENS, VALUE_HEADS) - 3)
    g[:, ::2] *= 0.01
    return Inputs(q, k, v, g, torch.rand(TOKENS, VALUE_HEADS, device=DEVICE).bfloat16()), grad


def check(found: list[Tensor], expected: list[Tensor], num_forward: int) -> None:
    """The first `num_forward` tensors are results of forward, the others gradients or maps."""
    shares = [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(found, expected, strict=True)]
    print("shares of the norm:", *(f"{share:.1e}" for share in shares))
    assert max(shares[:num_forward]) < FORWARD_TOLERANCE and max(shares[num_forward:]) < BACKWARD_TOLERANCE, shares


@pytest.mark.parametrize("mix", FRAGMENTS)
def test_fla_computes_what_plain_torch_does(fla: DeltaKernel, mix: str) -> None:
    """Outputs, maps and all gradients, with states that come from and go to other fragments."""
    narrow, grad = inputs()
    boundaries, num_linked = FRAGMENTS[mix]
    fragments = Fragments.of(boundaries, range(num_linked))
    states, last = (random(num_linked, VALUE_HEADS, WIDTH, WIDTH) for _ in "ab")
    results = []
    for kernel, x, dout in (
        (fla, narrow, grad),
        (TorchDeltaKernel(), Inputs(*(x.float() for x in narrow)), grad.float()),
    ):
        schedule = kernel.schedule(fragments, VALUE_HEADS, DEVICE)
        prepared = kernel.prepared(x, schedule)
        out, saved = kernel.forward(prepared, schedule, states)
        gradients = kernel.backward(dout, prepared, schedule, states, saved, last)
        of_states = *kernel.transitions(prepared, schedule), kernel.state_gradients(dout, prepared, schedule)
        results.append([out, *of_states, *gradients])
    check(*results, num_forward=1)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_convolution_norm_and_decay(fla: DeltaKernel, monkeypatch: pytest.MonkeyPatch, cp_size: int) -> None:
    """On views of the projections.  With cp 2, every all-to-all receives the same random numbers."""
    halo = random(64, VALUE_HEADS * WIDTH).bfloat16()
    monkeypatch.setattr(
        torch.distributed, "all_to_all_single", lambda received, *x, **y: received.copy_(halo[: len(received)])
    )
    taps, width = Taps.of(np.array([0, 4, 24, 4000, TOKENS]), 4, cp_size, cp_size - 1), VALUE_HEADS * WIDTH
    projected, a = random(int(taps.boundaries[-1]), 3 * width).bfloat16(), random(TOKENS, VALUE_HEADS).bfloat16()
    weights = [random(width, 4), random(WIDTH), random(VALUE_HEADS), random(VALUE_HEADS)]
    results = []
    for kernel, dtype in ((fla, torch.bfloat16), (TorchDeltaKernel(), torch.float32)):
        leaves = [x.detach().bfloat16().to(dtype).requires_grad_() for x in (projected, a, *weights)]
        mixed = kernel.convolution(
            leaves[0][:, :width], leaves[2], kernel.convolution_plan(taps, DEVICE), torch.distributed.group
        )
        gate = leaves[0][:, width : 2 * width].unflatten(1, (-1, WIDTH))
        out, scale = kernel.gated_norm(leaves[0][:, 2 * width :].unflatten(1, (-1, WIDTH)), gate, leaves[3], 1e-6)
        outputs = mixed, out, kernel.log_decay(leaves[1], *leaves[4:])
        torch.manual_seed(3)
        gradients = torch.autograd.grad(outputs, leaves, [random(*x.shape).bfloat16().to(x.dtype) for x in outputs])
        results.append([*outputs, scale, *gradients])
    check(*results, num_forward=4)


@pytest.mark.parametrize("cp", [2, 8])
def test_fragments_of_a_cp_group_are_the_document(fla: DeltaKernel, cp: int) -> None:
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
        out = recurrent_attention(Inputs(*leaves), schedule, kernel, link)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))])
    check(*results, num_forward=1)


def test_another_document_changes_nothing(fla: DeltaKernel) -> None:
    """Bitwise, once FLA has chosen its variants."""
    narrow, grad = inputs()
    edges, _ = FRAGMENTS["many"]
    inside = slice(edges[1], edges[2])
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
        assert torch.equal(a[: edges[1]], b[: edges[1]]) and torch.equal(a[edges[2] :], b[edges[2] :])


def test_a_pass_does_not_wait_for_the_gpu(fla: DeltaKernel) -> None:
    """Forward and backward with maps and states, once everything is compiled."""
    narrow, grad = inputs()
    boundaries, num_linked = FRAGMENTS["many"]
    for mode in ("default", "error"):
        schedule = fla.schedule(Fragments.of(boundaries, range(num_linked)), VALUE_HEADS, DEVICE)
        states = random(num_linked, VALUE_HEADS, WIDTH, WIDTH)
        torch.cuda.set_sync_debug_mode(mode)
        try:
            prepared = fla.prepared(narrow, schedule)
            fla.transitions(prepared, schedule)
            _, saved = fla.forward(prepared, schedule, states)
            fla.state_gradients(grad, prepared, schedule)
            fla.backward(grad, prepared, schedule, states, saved, states)
        finally:
            torch.cuda.set_sync_debug_mode("default")
