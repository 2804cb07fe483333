"""The chunked recurrence of Mamba-2 has the outputs, states and gradients of a loop over tokens in float64."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from sft.mcore.linear_attention import schedule, token_blocks
from sft.mcore.linear_attention.grouped_norm import grouped, grouped_norm, skip
from sft.mcore.linear_attention.recurrence import Fragments
from sft.mcore.linear_attention.recurrent_attention import recurrent_attention
from sft.mcore.linear_attention.schedule import ChunkSchedule
from sft.mcore.linear_attention.ssd import SsdInputs, time_steps
from sft.mcore.linear_attention.ssd_kernel import TorchSsdKernel
from tests.unit.fixtures.recurrence import ALL_ROWS

GROUPS, HEADS, N, P = 2, 6, 8, 5
LENGTHS = [1, 63, 64, 0, 65, 130, 2, 330]  # lengths of fragments; a chunk has 64 tokens
FLOAT64_TOLERANCE = 1e-11
STATE_TOLERANCE = 1e-6  # relative to the norm, in fp32: 16 roundings
BF16_ROUNDING = 2**-8  # relative: half of the distance between neighbouring numbers
KERNEL = TorchSsdKernel()


def random_inputs(tokens: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> SsdInputs:
    """Decays are about e^-0.1 per token, in every other head e^-0.001; time steps are about 0.1."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator, dtype=torch.float64)

    g = -torch.exp(1.5 * randn(HEADS) - 2)
    g[:, ::2] *= 0.01
    tensors = randn(GROUPS, N), randn(GROUPS, N), randn(HEADS, P), g, torch.exp(randn(HEADS) - 2)
    return SsdInputs(*(x.to(dtype).requires_grad_() for x in tensors))


def loop(
    inputs: SsdInputs, edges: Sequence[int], states: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and the last state of each fragment, token by token."""
    c, b = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in inputs[:2])
    outputs, last = [], []
    for number, (start, stop) in enumerate(zip(edges, edges[1:])):
        given = None if states is None else states[number]
        s = inputs.x.new_zeros(HEADS, N, P) if given is None else given
        for t in range(start, stop):
            written = torch.einsum("hn,hp->hnp", b[t], inputs.dt[t][:, None] * inputs.x[t])
            s = inputs.g[t].exp()[:, None, None] * s + written
            outputs.append(torch.einsum("hn,hnp->hp", c[t], s))
        last.append(s)
    return torch.stack(outputs), last


def scheduled(edges: Sequence[int], linked: Sequence[int] = ()) -> ChunkSchedule:
    return KERNEL.schedule(Fragments.of(edges, linked), HEADS, torch.device("cpu"))


def edges_of(lengths: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


def random(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)


def check(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = FLOAT64_TOLERANCE) -> None:
    for x, reference in zip(found, expected, strict=True):
        assert x.dtype == reference.dtype and x.shape == reference.shape
        torch.testing.assert_close(x, reference, rtol=tolerance, atol=tolerance)


class OneProcess:
    """`HeadwisePassing` for the fragments of one document, whose order is `order`."""

    read = ALL_ROWS

    def __init__(self, order: Sequence[int]) -> None:
        self.order = order

    def initial_states(self, a: Tensor, b: Tensor) -> Tensor:
        states = torch.zeros_like(b)
        for before, fragment in zip(self.order, self.order[1:]):
            states[fragment] = a[before] * states[before] + b[before]
        return states

    def final_gradients(self, a: Tensor, dstates: Tensor) -> Tensor:
        last = torch.zeros_like(dstates)
        for fragment, after in reversed([*zip(self.order, self.order[1:])]):
            last[fragment] = dstates[after] + a[after] * last[after]
        return last


@pytest.fixture(params=["one block", "small blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also runs with blocks so small that a fragment has several blocks, and a group has few fragments."""
    if request.param == "small blocks":
        monkeypatch.setattr(schedule, "INTERVAL", 2)
        monkeypatch.setattr(schedule, "BLOCK_CHUNKS", 24)


@pytest.mark.usefixtures("blocks")
def test_maps_outputs_and_gradients_are_those_of_the_loop() -> None:
    """Also the gradients of initial states, and those that come from last states."""
    edges, linked = edges_of(LENGTHS), [0, 2, 3, 5, 7]
    made, leaves = scheduled(edges, linked), random_inputs(sum(LENGTHS))
    inputs = SsdInputs(*(x.detach() for x in leaves))
    states = random((len(linked), HEADS, N, P)).requires_grad_()
    first: list[Tensor | None] = [None] * len(LENGTHS)
    for i, state in zip(linked, states):
        first[i] = state
    expected, last = loop(leaves, edges, first)
    a, b = KERNEL.transitions(inputs, made)
    assert a.shape == (len(linked), HEADS, 1, 1)
    check(list(a * states + b), [last[i] for i in linked])
    out, saved = KERNEL.forward(inputs, made, states.detach())
    check([out], [expected])
    dout, dlast = random(out.shape), random(states.shape)
    (of_states,) = torch.autograd.grad(expected, states, dout, retain_graph=True)
    check([KERNEL.state_gradients(dout, inputs, made)], [of_states])
    found = KERNEL.backward(dout, inputs, made, states.detach(), saved, dlast)
    results = (expected, *(last[i] for i in linked))
    check(list(found), list(torch.autograd.grad(results, leaves, (dout, *dlast))))


def test_states_pass_between_the_fragments_of_a_document() -> None:
    """Four fragments of one document lie in another order than in the document, between two whole documents."""
    lengths, order = [70, 65, 165, 65, 65, 30], [1, 3, 4, 2]
    edges = edges_of(lengths)
    inputs = random_inputs(edges[-1])
    passing = OneProcess([sorted(order).index(i) for i in order])
    found = recurrent_attention(inputs, scheduled(edges, sorted(order)), KERNEL, passing)  # type: ignore[arg-type]
    rows = torch.cat([torch.arange(edges[i], edges[i + 1]) for i in [0, *order, 5]])
    out, _ = loop(SsdInputs(*(x[rows] for x in inputs)), [0, 70, 430, 460])
    expected = torch.zeros_like(out).index_copy(0, rows, out)
    grad = random(out.shape)
    check([found, *torch.autograd.grad(found, inputs, grad)], [expected, *torch.autograd.grad(expected, inputs, grad)])


@torch.no_grad()
def test_states_stay_exact_over_64k_tokens() -> None:
    """Decays of about e^-10, e^-0.1 and e^-0.001 per token.  Tested in one fragment, and composed from the maps of
    eight fragments, as with cp 4.  The reference computes the last state in float64 as one sum over all tokens."""
    tokens = 65_536
    inputs = random_inputs(tokens, torch.float32)
    inputs.g[:, 1::4] *= 100
    exact = SsdInputs(*(x.double() for x in inputs))
    after = exact.g.flip(0).cumsum(0).flip(0) - exact.g  # sum of g over the tokens after each one
    b = exact.b.repeat_interleave(HEADS // GROUPS, dim=1)
    expected = torch.einsum("thn,thp->hnp", b, (after.exp() * exact.dt)[..., None] * exact.x)
    for count in (1, 8):
        made = scheduled(range(0, tokens + 1, tokens // count), range(count))
        a, offsets = KERNEL.transitions(inputs, made)
        states = OneProcess(range(count)).initial_states(a, offsets)
        state = a[-1] * states[-1] + offsets[-1]
        error = (state - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        assert error.max() < STATE_TOLERANCE, (count, error)


@pytest.mark.parametrize("value", [None, float("nan")], ids=["other tokens", "nan"])
def test_a_document_changes_no_other_one(value: float | None) -> None:
    """Outputs and gradients are bitwise equal.  The replaced document ends inside a chunk."""
    edges = edges_of([64, 130, 128, 1, 200])
    inputs, other = (random_inputs(edges[-1], torch.float32, seed=seed) for seed in (0, 1))
    inside = torch.zeros(edges[-1], dtype=torch.bool)
    inside[edges[1] : edges[2]] = True
    results = []
    for x in (inputs, other):
        mixed = (torch.where(inside.view(-1, *[1] * (y.ndim - 1)), z, y) for y, z in zip(inputs, x))
        if value is not None and x is other:
            mixed = (y.masked_fill(inside.view(-1, *[1] * (y.ndim - 1)), value) for y in inputs)
        leaves = SsdInputs(*(y.detach().requires_grad_() for y in mixed))
        out = recurrent_attention(leaves, scheduled(edges), KERNEL)
        results.append([out, *torch.autograd.grad(out, leaves, random(out.shape, out.dtype))])
    for x, y in zip(*results):
        assert torch.equal(x[~inside], y[~inside]) and not torch.equal(x[inside], y[inside])


def test_backward_saves_the_inputs_and_few_states() -> None:
    """Fragments of 1, 8, 9 and 20 chunks: one additional state for every 8 chunks after the first."""
    edges = edges_of([3, 512, 513, 1280])
    inputs, saved = random_inputs(edges[-1], torch.float32), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        recurrent_attention(inputs, scheduled(edges), KERNEL)
    assert [x.shape for x in saved] == [*(x.shape for x in inputs), (0 + 0 + 1 + 2, HEADS, N, P)]
    assert all(x.data_ptr() == y.data_ptr() for x, y in zip(saved, inputs))


def test_bf16_is_rounded_at_the_end_alone() -> None:
    narrow = random_inputs(200, torch.bfloat16)
    narrow = SsdInputs(*narrow[:3], *(x.detach().float().requires_grad_() for x in narrow[3:]))
    wide = SsdInputs(*(x.detach().float().requires_grad_() for x in narrow))
    results = []
    for x in (narrow, wide):
        out = recurrent_attention(x, scheduled([0, 70, 200]), KERNEL)
        grad = random(out.shape, torch.bfloat16).to(out.dtype)
        results.append([out, *torch.autograd.grad(out, x, grad)])
    for found, expected in zip(*results):
        torch.testing.assert_close(found.float(), expected, rtol=BF16_ROUNDING, atol=1e-6)
    assert [x.dtype for x in results[0][1:]] == [x.dtype for x in narrow]


def test_no_tokens() -> None:
    inputs = random_inputs(0)
    out = recurrent_attention(inputs, scheduled([0, 0]), KERNEL)
    assert out.shape == (0, HEADS, P)
    assert [x.shape for x in torch.autograd.grad(out, inputs, random(out.shape))] == [x.shape for x in inputs]


@pytest.mark.parametrize("low,high", [(0.0, None), (0.5, 1.2)])
def test_time_steps_and_their_gradients(low: float, high: float | None) -> None:
    """Both limits are reached by some time steps."""
    raw, bias, a_log = (random(shape).requires_grad_() for shape in ((40, 3), (3,), (3,)))
    found = time_steps(raw, bias, a_log, low=low, high=high)
    dt = torch.log1p(torch.exp(raw + bias)).clamp(low, high)
    assert high is None or {0.5, 1.2} <= {*dt.flatten().tolist()}
    expected = dt, -torch.exp(a_log) * dt
    grads = random((40, 3)), random((40, 3)).flip(0)
    of_found, of_expected = (torch.autograd.grad(x, (raw, bias, a_log), grads) for x in (found, expected))
    check([*found, *of_found], [*expected, *of_expected])
    narrow = time_steps(raw.bfloat16(), bias.bfloat16(), a_log.bfloat16(), low=low, high=high)
    assert [x.dtype for x in narrow] == [torch.float32] * 2


@pytest.mark.parametrize("tokens", [1, 1000], ids="{} tokens a block".format)
def test_the_norm_by_groups_and_the_skip(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """The reference multiplies the gate first, and normalises each of three groups of ten numbers."""
    monkeypatch.setitem(token_blocks.BLOCK_NUMBERS, "cpu", 2 * tokens * 3 * 10)
    y, x, gate = (random((5, 3, 10)).roll(i, 0).requires_grad_() for i in range(3))
    weight, d = random((3, 10)).requires_grad_(), random((3,)).requires_grad_()
    total = y + d[:, None] * x
    product = total * gate * torch.sigmoid(gate)
    expected = weight * product / (product.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    joined = skip(y, x, d)
    found, scale = grouped_norm(joined, gate, weight, 1e-3)
    grad, leaves = random((5, 3, 10)).flip(0), (y, x, d, gate, weight)
    of_found, of_expected = (torch.autograd.grad(out, leaves, grad) for out in (found, expected))
    check([found, *of_found], [expected, *of_expected])
    assert torch.equal(grouped(joined, gate, weight, scale), found)  # what backward recomputes
