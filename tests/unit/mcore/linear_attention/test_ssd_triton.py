"""Mamba-2 by FLA's kernels, against a loop over tokens in float64, by Triton's interpreter on a CPU.

`make test` skips this file, because fla-core needs Triton; `make test-triton` installs both.  The interpreter computes
one variant of each kernel, and multiplies the bits of bf16 numbers as integers, so the narrow dtype here is fp16.
"""

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.fixtures import triton_interpreter

if not triton_interpreter.without_a_gpu():
    pytest.skip("on a GPU, tests/gpu runs the compiled kernels", allow_module_level=True)
pytest.importorskip("fla", reason="make test-triton installs it")

from sft.layers.mixers.mamba import MambaBytes, MambaSizes  # noqa: E402
from sft.mcore.linear_attention import fla_functions, ssd_fla  # noqa: E402
from sft.mcore.linear_attention.recurrence import Fragments  # noqa: E402
from sft.mcore.linear_attention.ssd import SsdInputs  # noqa: E402
from sft.mcore.linear_attention.ssd_fla import FlaSsdKernel  # noqa: E402
from sft.mcore.linear_attention.ssd_kernel import TorchSsdKernel  # noqa: E402
from sft.parallel.taps import Taps  # noqa: E402
from tests.unit.fixtures.fla_variants import interpret, keep_one_variant  # noqa: E402
from tests.unit.fixtures.live import Live  # noqa: E402

GROUPS, HEADS = 1, 2
CPU = torch.device("cpu")
TOLERANCE = 2e-6  # share of the norm: fp32 sums over chunks of 64 tokens
FP16_TOLERANCE = 2e-3  # share of the norm: products of fp16 numbers, rounded by 2^-12 each
EDGES, LINKED = [0, 70, 70, 135, 140, 160], range(3)  # linked fragments of 70, 0 and 65 tokens, and two documents


@pytest.fixture(scope="module")
def fla() -> Iterator[FlaSsdKernel]:
    with pytest.MonkeyPatch.context() as patch:
        assert fla_functions.problem(ssd_fla.FUNCTIONS) is None
        kernel = ssd_fla.made()
        keep_one_variant(patch)
        interpret(patch)
        import fla.modules.norm.layernorm_gated as norm

        patch.setattr(norm, "get_multiprocessor_count", lambda *x: 2)
        yield kernel


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distances(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [
        float((x.detach().double() - y.detach()).norm() / y.detach().norm())
        for x, y in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize(
    "state_dim, head_dim, dtype, tolerance",
    [
        (16, 16, torch.float32, TOLERANCE),
        (80, 24, torch.float32, TOLERANCE),
        (16, 16, torch.float16, FP16_TOLERANCE),
    ],
    ids=str,
)
def test_maps_outputs_and_gradients(
    fla: FlaSsdKernel, state_dim: int, head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Compared with plain torch in float64, which test_ssd.py compares with a loop over tokens."""
    of_groups, of_heads, t = (GROUPS, state_dim), (HEADS, head_dim), EDGES[-1]
    c, b, x = (random(t, *shape, seed=seed).to(dtype) for seed, shape in enumerate((of_groups, of_groups, of_heads)))
    g, dt = -torch.exp(random(t, HEADS, seed=3) - 2), torch.exp(random(t, HEADS, seed=4) - 1)
    narrow, wide = SsdInputs(c, b, x, g, dt), SsdInputs(*(y.double() for y in (c, b, x, g, dt)))
    states, last = (random(3, HEADS, state_dim, head_dim, seed=seed) for seed in (5, 6))
    grad, results = random(t, *of_heads, seed=7).to(dtype), []
    for kernel, inputs in ((fla, narrow), (TorchSsdKernel(), wide)):
        schedule = kernel.schedule(Fragments.of(EDGES, LINKED), HEADS, CPU)
        prepared, of = kernel.prepared(inputs, schedule), (lambda y: y) if inputs is narrow else Tensor.double
        a, offsets = kernel.transitions(prepared, schedule)
        out, saved = kernel.forward(prepared, schedule, of(states))
        gradients = kernel.backward(of(grad), prepared, schedule, of(states), saved, of(last))
        dstates = kernel.state_gradients(of(grad), prepared, schedule)
        results.append([a, offsets, out, dstates, *gradients])
    assert [y.dtype for y in results[0]] == [*[torch.float32] * 2, dtype, torch.float32, *(y.dtype for y in narrow)]
    assert results[0][0].shape == (3, HEADS, 1, 1)
    assert max(distances(*results)) < tolerance, distances(*results)


def test_the_norm_by_groups_is_that_of_plain_torch(fla: FlaSsdKernel) -> None:
    """The gate is a view of the projections, and groups have 12 numbers, which is no power of 2."""
    x, z, weight = random(9, 2, 12), random(9, 50), random(2, 12)
    leaves, results = [tensor.requires_grad_() for tensor in (x, z, weight)], []
    for kernel in (fla, TorchSsdKernel()):
        gate = z[:, 3:27].unflatten(1, (2, 12))
        out, scale = kernel.grouped_norm(x, gate, weight, 1e-6)
        gradients = torch.autograd.grad(out, leaves, random(9, 2, 12, seed=1))
        results.append([out, *gradients, kernel.grouped(x, gate, weight, scale, 1e-6)])
    assert max(distances(*results)) < TOLERANCE, distances(*results)


def test_the_convolution_has_a_bias(fla: FlaSsdKernel) -> None:
    taps = Taps.of(np.array([0, 4, 24, 160]), 4, 1, 0)
    leaves = [tensor.requires_grad_() for tensor in (random(160, 16), random(16, 4), random(16))]
    results = []
    for kernel in (fla, TorchSsdKernel()):
        out = kernel.convolution(*leaves[:2], kernel.convolution_plan(taps, CPU), None, leaves[2])
        results.append([out, *torch.autograd.grad(out, leaves, random(160, 16, seed=1))])
    assert max(distances(*results)) < TOLERANCE, distances(*results)


def test_the_memory_of_a_backward_pass(fla: FlaSsdKernel) -> None:
    """512 tokens, 1 group and 2 heads of 16, states of 64, in fp16, beside the tensors of the equation and the
    gradients of the inputs."""
    t, sizes = 512, MambaSizes(heads=HEADS, groups=GROUPS, head_dim=16, state_dim=64)
    shapes, generator = ((GROUPS, 64), (GROUPS, 64), (HEADS, 16)), torch.Generator().manual_seed(0)
    narrow = (torch.randn(t, *shape, generator=generator).half() for shape in shapes)
    inputs = SsdInputs(*narrow, -torch.rand(t, HEADS), torch.rand(t, HEADS))
    schedule = fla.schedule(Fragments.of([0, t]), HEADS, CPU)
    gc.freeze()
    with Live(*inputs) as live:
        fla.backward(inputs.x, fla.prepared(inputs, schedule), schedule, None, inputs.x, None)
    gc.unfreeze()
    model: Any = None
    expected = MambaBytes(model=model, heads=sizes, tokens=t, block_numbers=0).fla_work
    assert 1.0 <= live.most / (t * expected) < 1.1, (live.most / t, expected)
