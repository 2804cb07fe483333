"""Mamba-2 by flash-linear-attention on a GPU, in bf16, against plain torch in fp32.

One variant of each kernel is compiled.  With the environment variable ALL_VARIANTS, Triton compiles all and takes the
fastest, as in a run; this takes minutes.
"""

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sft.mcore.linear_attention import fla_functions, fla_kernel, ssd_fla
from sft.mcore.linear_attention.recurrence import Fragments
from sft.mcore.linear_attention.ssd import SsdInputs
from sft.mcore.linear_attention.ssd_fla import FlaSsdKernel
from sft.mcore.linear_attention.ssd_kernel import TorchSsdKernel
from tests.gpu import runs
from tests.unit.fixtures.fla_variants import keep_one_variant

GROUPS, HEADS, N, P, TOKENS = 2, 16, 128, 64, 4096
TOLERANCE = 2e-2  # of the norm; FLA multiplies in bf16
# boundaries, number of linked fragments
FRAGMENTS = {"one": ([0, 4096], 1), "many": ([0, 1344, 2000, 2001, 2001, 2065, 2066, 2400, 4096], 4)}
DEVICE = torch.device(runs.DEVICE)


@pytest.fixture(scope="module")
def fla() -> Iterator[FlaSsdKernel]:
    if reason := fla_functions.problem(ssd_fla.FUNCTIONS) or fla_kernel.old_gpu() or fla_kernel.wrong_triton():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        kernel = ssd_fla.made()
        if "ALL_VARIANTS" not in os.environ:
            keep_one_variant(patch)
        yield kernel


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def shares(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(found, expected, strict=True)]


@pytest.mark.parametrize("mix", FRAGMENTS)
def test_fla_computes_what_plain_torch_does(fla: FlaSsdKernel, mix: str) -> None:
    """Outputs, maps and all gradients, with states that come from and go to other fragments.  No pass waits for the
    GPU once everything is compiled."""
    torch.manual_seed(5)
    c, b, x, grad = (random(TOKENS, *shape).bfloat16() for shape in ((GROUPS, N), (GROUPS, N), (HEADS, P), (HEADS, P)))
    g, dt = -torch.exp(random(TOKENS, HEADS) - 3), torch.exp(random(TOKENS, HEADS) - 2)
    g[:, ::2] *= 0.01
    boundaries, num_linked = FRAGMENTS[mix]
    states, last = (random(num_linked, HEADS, N, P) for _ in "ab")
    results = []
    for kernel, wide, mode in ((fla, False, "default"), (fla, False, "error"), (TorchSsdKernel(), True, "default")):
        inputs = SsdInputs(*(y.float() if wide else y for y in (c, b, x, g, dt)))
        schedule = kernel.schedule(Fragments.of(boundaries, range(num_linked)), HEADS, DEVICE)
        torch.cuda.set_sync_debug_mode(mode)
        try:
            prepared, dout = kernel.prepared(inputs, schedule), grad.to(inputs.x.dtype)
            out, saved = kernel.forward(prepared, schedule, states)
            gradients = kernel.backward(dout, prepared, schedule, states, saved, last)
            of_states = *kernel.transitions(prepared, schedule), kernel.state_gradients(dout, prepared, schedule)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([out, *of_states, *gradients])
    found = shares(*results[1:])
    print("shares of the norm:", *(f"{share:.1e}" for share in found))
    assert max(found) < TOLERANCE, found


def test_the_norm_by_groups(fla: FlaSsdKernel) -> None:
    projected = random(TOKENS, 3 * HEADS * P).bfloat16()
    x, weight, grad = random(TOKENS, HEADS * P).bfloat16(), random(GROUPS, HEADS * P // GROUPS).bfloat16(), None
    results = []
    for kernel, dtype in ((fla, torch.bfloat16), (TorchSsdKernel(), torch.float32)):
        leaves = [y.detach().to(dtype).requires_grad_() for y in (x, projected, weight)]
        gate = leaves[1][:, HEADS * P : 2 * HEADS * P].unflatten(1, (GROUPS, -1))
        out, _ = kernel.grouped_norm(leaves[0].unflatten(1, (GROUPS, -1)), gate, leaves[2], 1e-5)
        grad = torch.randn_like(out) if grad is None else grad
        results.append([out, *torch.autograd.grad(out, leaves, grad.to(dtype))])
    assert max(shares(*results)) < TOLERANCE, shares(*results)
