"""FLA's kernels, as this trainer calls them, against the recurrence in float64, by Triton's interpreter on a CPU.

`make test` skips this file, because fla-core needs Triton; `make test-triton` installs both.  The interpreter computes
one variant of each kernel.  A GPU compiles them, and chooses between variants: tests/gpu/test_fla.py.  The interpreter
multiplies the bits of bf16 numbers as integers, so the narrow dtype here is fp16.
"""

import gc
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.unit.fixtures import triton_interpreter

if not triton_interpreter.without_a_gpu():
    pytest.skip("on a GPU, tests/gpu/test_fla.py runs the compiled kernels", allow_module_level=True)
pytest.importorskip("fla", reason="make test-triton installs it")

from sft.layers.mixers.delta import DeltaBytes, HeadSizes  # noqa: E402
from sft.mcore.linear_attention import fla_functions  # noqa: E402
from sft.mcore.linear_attention.delta_rule import Inputs  # noqa: E402
from sft.mcore.linear_attention.documents import LinearDocuments, linear_attention  # noqa: E402
from sft.mcore.linear_attention.fla_kernel import FlaKernel  # noqa: E402
from sft.mcore.linear_attention.recurrence import Fragments  # noqa: E402
from sft.mcore.linear_attention.recurrent_attention import recurrent_attention  # noqa: E402
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel  # noqa: E402
from sft.parallel.branches import Branches  # noqa: E402
from sft.parallel.cp_group import CpGroup  # noqa: E402
from sft.parallel.taps import Taps  # noqa: E402
from tests.builders import parsed  # noqa: E402
from tests.unit.fixtures.fla_variants import interpret, keep_one_variant  # noqa: E402
from tests.unit.fixtures.live import Live  # noqa: E402
from tests.unit.fixtures.recurrence import OneProcess, recurrence  # noqa: E402

KEY_HEADS, VALUE_HEADS = 1, 2
TOLERANCE = 2e-6  # share of the norm: fp32 sums over chunks of 64 tokens; measured at most 9e-7
FP16_TOLERANCE = 2e-3  # share of the norm: products of fp16 numbers, rounded by 2^-12 each; measured at most 7e-4
# Two documents of two fragments each, then whole documents.  The first document is fragments 0 and 2
LENGTHS, ORDER = [70, 65, 5, 1, 20, 1, 64], [[0, 2], [1, 3]]
TOKENS, CHANNELS = 70, 16
TREE = Branches.of([-1, 0, 0], [0, 3, 3])  # of the convolution's documents


@pytest.fixture(scope="module")
def fla() -> Iterator[FlaKernel]:
    """FLA by the interpreter: one variant of each kernel, and no question for a GPU's compute capability."""
    with pytest.MonkeyPatch.context() as patch:
        assert fla_functions.problem() is None
        keep_one_variant(patch)
        interpret(patch)
        patch.setattr(sys.modules["fla.ops.cp.chunk_fwd"], "_check_cp_device", lambda device: None)
        yield FlaKernel(fla_functions.functions())


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distances(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [
        float((x.detach().double() - y.detach()).norm() / y.detach().norm())
        for x, y in zip(found, expected, strict=True)
    ]


def rule_inputs(
    key_dim: int, value_dim: int, dtype: torch.dtype, t: int = sum(LENGTHS), *, by_channel: bool = False
) -> Inputs:
    """by_channel: with a decay for each channel, and a key head for each value head"""
    of_keys, of_values = (VALUE_HEADS if by_channel else KEY_HEADS, key_dim), (VALUE_HEADS, value_dim)
    of_decays = of_keys if by_channel else (VALUE_HEADS,)
    q, k, v = (random(t, *shape, seed=seed).to(dtype) for seed, shape in enumerate((of_keys, of_keys, of_values)))
    g, beta = -torch.exp(random(t, *of_decays, seed=3) - 2), random(t, VALUE_HEADS, seed=4).sigmoid().to(dtype)
    return Inputs(*(x.requires_grad_() for x in (q, k, v, g, beta)))


def by_fla(fla: FlaKernel, inputs: Inputs, grad: Tensor) -> list[Tensor]:
    fragments = Fragments.of(np.cumsum([0, *LENGTHS]), range(4))
    schedule = fla.schedule(fragments, VALUE_HEADS, torch.device("cpu"))
    out = recurrent_attention(inputs, schedule, fla, OneProcess(ORDER))
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def by_recurrence(inputs: Inputs, grad: Tensor) -> list[Tensor]:
    """Of whole documents, in float64."""
    wide = Inputs(*(x.detach().double().requires_grad_() for x in inputs))
    edges = np.cumsum([0, *LENGTHS])
    order = [i for document in ORDER for i in document] + [4, 5, 6]
    sequence = torch.cat([torch.arange(edges[i], edges[i + 1]) for i in order])
    documents = np.cumsum([0, 75, 66, *LENGTHS[4:]]).tolist()
    out, _ = recurrence(Inputs(*(x[sequence] for x in wide)), documents, [None] * 5)
    out = torch.zeros_like(out).index_copy(0, sequence, out)
    return [out, *torch.autograd.grad(out, wide, grad.to(out.dtype))]


@pytest.mark.parametrize(
    "key_dim, value_dim, dtype, tolerance, by_channel",
    [
        (16, 16, torch.float32, TOLERANCE, False),
        (80, 24, torch.float32, TOLERANCE, False),
        (16, 16, torch.float16, FP16_TOLERANCE, False),
        (16, 16, torch.float16, FP16_TOLERANCE, True),
    ],
    ids=str,
)
def test_outputs_and_gradients(
    fla: FlaKernel, key_dim: int, value_dim: int, dtype: torch.dtype, tolerance: float, by_channel: bool
) -> None:
    """States of cut documents pass between fragments; other documents lie beside them."""
    inputs = rule_inputs(key_dim, value_dim, dtype, by_channel=by_channel)
    grad = random(sum(LENGTHS), VALUE_HEADS, value_dim, seed=5).to(dtype)
    results = by_fla(fla, inputs, grad)
    assert [x.dtype for x in results] == [dtype, *(x.dtype for x in inputs)]
    found = distances(results, by_recurrence(inputs, grad))
    assert max(found) < tolerance, found


@pytest.mark.parametrize("by_channel", [False, True], ids=["decays of heads", "decays of channels"])
def test_maps_and_gradients_of_states(fla: FlaKernel, by_channel: bool) -> None:
    """Of linked fragments of 70, 0 and 65 tokens."""
    inputs = Inputs(*(x[:140].detach() for x in rule_inputs(16, 16, torch.float32, by_channel=by_channel)))
    wide = Inputs(*(x.double().requires_grad_() for x in inputs))
    edges, grad = [0, 70, 70, 135, 140], random(140, VALUE_HEADS, 16)
    schedule = fla.schedule(Fragments.of(edges, range(3)), VALUE_HEADS, torch.device("cpu"))
    states, last = (random(3, VALUE_HEADS, 16, 16, seed=seed) for seed in (6, 7))
    prepared = fla.prepared(inputs, schedule)
    a, b = fla.transitions(prepared, schedule)
    out, saved = fla.forward(prepared, schedule, states)
    found = [a @ states + b, out, fla.state_gradients(grad, prepared, schedule)]
    found += fla.backward(grad, prepared, schedule, states, saved, last)
    first = states.double().requires_grad_()
    expected, ends = recurrence(wide, edges, [*first, None])
    results = (expected, torch.stack(ends[:3]))
    (dfirst,) = torch.autograd.grad(expected, first, grad.double(), retain_graph=True)
    reference = [results[1], expected, dfirst, *torch.autograd.grad(results, wide, (grad.double(), last.double()))]
    assert max(distances(found, reference)) < TOLERANCE


def test_branches_start_from_the_state_at_their_fork(fla: FlaKernel) -> None:
    """A document of 70 tokens has branches of 30 and 5 tokens after 37, and one of 66 after its end."""
    cu_seqlens, branches = np.cumsum([0, 5, 70, 30, 5, 66]), Branches.of([-1, -1, 1, 1, 1], [0, 0, 37, 37, 70])
    inputs, grad = rule_inputs(16, 16, torch.float32, 176), random(176, VALUE_HEADS, 16, seed=5)
    sizes: Any = {"heads": VALUE_HEADS, "num_taps": 4, "max_short": 0, "branches": branches}
    made = LinearDocuments.of(cu_seqlens, CpGroup(1, 0, None), torch.device("cpu"), fla, **sizes)
    out = linear_attention(inputs, made, lambda rule, inputs: rule(*inputs))
    wide = Inputs(*(x.detach().double().requires_grad_() for x in inputs))
    texts = [(5, [*range(5)]), (70, [*range(5, 75)])]
    texts += [(n, [*range(5, 5 + fork), *range(first, first + n)]) for first, n, fork in ((75, 30, 37), (105, 5, 37))]
    texts += [(66, [*range(5, 75), *range(110, 176)])]
    parts = [recurrence(Inputs(*(x[rows] for x in wide)), [0, len(rows)], [None])[0][-n:] for n, rows in texts]
    expected = torch.cat(parts)
    gradients = torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, wide, grad.double())
    assert max(distances([out, *gradients[0]], [expected, *gradients[1]])) < TOLERANCE


@pytest.mark.parametrize(
    "cp_size, cp_rank, branches",
    [(1, 0, None), (2, 0, None), (2, 1, None), (1, 0, TREE), (2, 1, TREE)],
    ids=["cp 1", "cp 2", "cp 2, rank 1", "cp 1, tree", "cp 2, rank 1, tree"],
)
def test_the_convolution_is_that_of_plain_torch(
    fla: FlaKernel, monkeypatch: pytest.MonkeyPatch, cp_size: int, cp_rank: int, branches: Branches | None
) -> None:
    """On a view, as of the projections, with chunks of 1 to 68 tokens.  On rank 1 of 2, two chunks of a document are
    neighbours.  Every all-to-all receives the same random numbers."""
    monkeypatch.setattr(dist, "all_to_all_single", lambda received, *x, **y: received.copy_(random(*received.shape)))
    taps = Taps.of(np.array([0, 4, 24, 160]), 4, cp_size, cp_rank, branches)
    wide, weight = random(int(taps.boundaries[-1]), 24).requires_grad_(), random(CHANNELS, 4).requires_grad_()
    results = []
    for kernel in (fla, TorchDeltaKernel()):
        plan = kernel.convolution_plan(taps, torch.device("cpu"))
        out = kernel.convolution(wide[:, 3:19], weight, plan, None)
        results.append([out, *torch.autograd.grad(out, (wide, weight), random(*out.shape, seed=1))])
    assert max(distances(*results)) < TOLERANCE


def test_the_gated_norm_and_the_decay_are_those_of_plain_torch(fla: FlaKernel) -> None:
    x, z, weight = random(TOKENS, 2, 16), random(TOKENS, 50), random(16)
    a, a_log, dt_bias = 8 * random(TOKENS, 4), random(4), random(4)  # softplus of up to 30
    leaves = [tensor.requires_grad_() for tensor in (x, z, weight, a, a_log, dt_bias)]
    results = []
    for kernel in (fla, TorchDeltaKernel()):
        gate = z[:, 3:35].unflatten(1, (2, 16))
        out, scale = kernel.gated_norm(x, gate, weight, 1e-6)
        decay = kernel.log_decay(a, a_log, dt_bias)
        gradients = torch.autograd.grad((out, decay), leaves, (random(*out.shape, seed=1), random(TOKENS, 4, seed=2)))
        results.append([out, scale, decay, *gradients, kernel.gated(x, gate, weight, scale, 1e-6)])
    assert max(distances(*results)) < TOLERANCE


@pytest.mark.parametrize("floor", [None, -5.0])
def test_decays_of_channels_and_the_sigmoid_gate_are_those_of_plain_torch(fla: FlaKernel, floor: float | None) -> None:
    x, gate, weight = random(TOKENS, 2, 16), random(TOKENS, 2, 16, seed=1), random(16)
    a, a_log, dt_bias = 8 * random(TOKENS, 2, 16, seed=2), random(2), random(32)
    leaves = [tensor.requires_grad_() for tensor in (x, gate, weight, a, a_log, dt_bias)]
    results = []
    for kernel in (fla, TorchDeltaKernel()):
        out, scale = kernel.gated_norm(x, gate, weight, 1e-6, "sigmoid")
        decay = kernel.log_decay(a, a_log, dt_bias, floor)
        grads = random(*out.shape, seed=1), random(*decay.shape, seed=2)
        gradients = torch.autograd.grad((out, decay), leaves, grads)
        results.append([out, scale, decay, *gradients, kernel.gated(x, gate, weight, scale, 1e-6, "sigmoid")])
    assert max(distances(*results)) < TOLERANCE


def test_the_memory_of_a_backward_pass(fla: FlaKernel) -> None:
    """512 tokens, 1 key head and 2 value heads of 32, in fp16.  Besides the tensors of the equation, there are six fp32
    numbers for each token: two norms, and sums of decays and their gradients for each value head."""
    inputs = Inputs(*(x.detach() for x in rule_inputs(32, 32, torch.float16, 512)))
    schedule = fla.schedule(Fragments.of([0, 512]), VALUE_HEADS, torch.device("cpu"))
    gc.freeze()
    with Live(*inputs) as live:
        prepared = fla.prepared(inputs, schedule)
        fla.backward(inputs.v, prepared, schedule, None, inputs.v, None)
    gc.unfreeze()
    heads = HeadSizes(key_heads=KEY_HEADS, value_heads=VALUE_HEADS, key_dim=32, value_dim=32)
    expected = DeltaBytes(model=parsed().config.model, heads=heads, tokens=512, block_numbers=0).fla_work
    assert live.most / 512 == pytest.approx(expected + 6 * 4, abs=1)  # and boundaries


@pytest.mark.parametrize("value_dim", [16, 128])
def test_the_memory_of_a_backward_pass_with_decays_of_channels(fla: FlaKernel, value_dim: int) -> None:
    """A chunk of 64 tokens and 2 heads with keys of 16.  With values of 16, the last kernel needs most, and there are
    five more fp32 numbers for each head: two norms, and three of beta's gradient.  With values of 128, the kernel
    before it needs most, with one number of beta's gradient."""
    inputs = Inputs(*(x.detach() for x in rule_inputs(16, value_dim, torch.float16, 64, by_channel=True)))
    schedule = fla.schedule(Fragments.of([0, 64]), VALUE_HEADS, torch.device("cpu"))
    gc.freeze()
    with Live(*inputs) as live:
        prepared = fla.prepared(inputs, schedule)
        fla.backward(inputs.v, prepared, schedule, None, inputs.v, None)
    gc.unfreeze()
    heads = HeadSizes(key_heads=2, value_heads=2, key_dim=16, value_dim=value_dim, decays=16)
    expected = DeltaBytes(model=parsed().config.model, heads=heads, tokens=64, block_numbers=0).fla_work
    numbers = 5 if value_dim == 16 else 3
    assert live.most / 64 == pytest.approx(expected + 2 * 4 * numbers, abs=1)  # and boundaries
