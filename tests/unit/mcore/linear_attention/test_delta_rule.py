"""The chunked gated delta rule has the outputs and gradients of the recurrence, and of transformers."""

import inspect
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from sft.mcore.linear_attention import schedule
from sft.mcore.linear_attention.delta_rule import Inputs
from sft.mcore.linear_attention.recurrence import Fragments
from sft.mcore.linear_attention.recurrent_attention import recurrent_attention
from sft.mcore.linear_attention.schedule import ChunkSchedule
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from tests.unit.fixtures.recurrence import VALUE_HEADS, K, OneProcess, V, random_inputs, recurrence

LENGTHS = [1, 63, 64, 0, 65, 130, 2, 330]  # lengths of fragments; a chunk has 64 tokens
FLOAT64_TOLERANCE = 1e-11
FP32_TOLERANCE = 1e-5  # compared with transformers in fp32, which rounds in another order
STATE_TOLERANCE = 1e-6  # relative to the norm, in fp32: 16 roundings
BF16_ROUNDING = 2**-8  # relative: half of the distance between neighbouring numbers
KERNEL = TorchDeltaKernel()


def scheduled(boundaries: Iterable[int], linked: Iterable[int] = ()) -> ChunkSchedule:
    return KERNEL.schedule(Fragments.of([*boundaries], [*linked]), VALUE_HEADS, torch.device("cpu"))


@pytest.fixture(params=["one block", "small blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also runs with blocks so small that a fragment has several blocks, and a group has few fragments."""
    if request.param == "small blocks":
        monkeypatch.setattr(schedule, "INTERVAL", 2)
        monkeypatch.setattr(schedule, "BLOCK_CHUNKS", 24)
    yield


def boundaries_of(lengths: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


def random(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)


def gradients(out: Tensor, inputs: Inputs) -> list[Tensor]:
    """The gradients of a random function of the outputs."""
    return list(torch.autograd.grad(out, inputs, random(out.shape, out.dtype)))


def check(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for x, reference in zip(found, expected, strict=True):
        assert x.dtype == reference.dtype and x.shape == reference.shape
        torch.testing.assert_close(x, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("correlated", [False, True])
def test_outputs_and_gradients_are_those_of_the_recurrence(correlated: bool) -> None:
    boundaries = boundaries_of(LENGTHS)
    inputs = random_inputs(boundaries[-1], correlated=correlated)
    found = recurrent_attention(inputs, scheduled(boundaries), KERNEL)
    expected, _ = recurrence(inputs, boundaries, [None] * len(LENGTHS))
    check([found, *gradients(found, inputs)], [expected, *gradients(expected, inputs)], FLOAT64_TOLERANCE)


@pytest.mark.usefixtures("blocks")
def test_states_pass_between_the_fragments_of_a_document() -> None:
    """Documents a and c are whole; b is cut into four fragments, which lie in another order than in the document."""
    lengths, order = [70, 65, 165, 65, 65, 30], [1, 3, 4, 2]
    boundaries = boundaries_of(lengths)
    inputs = random_inputs(boundaries[-1])
    made = scheduled(boundaries, linked=sorted(order))
    found = recurrent_attention(inputs, made, KERNEL, OneProcess([[sorted(order).index(i) for i in order]]))
    sequence = torch.cat([torch.arange(boundaries[i], boundaries[i + 1]) for i in [0, *order, 5]])
    out, _ = recurrence(Inputs(*(x[sequence] for x in inputs)), [0, 70, 430, 460], [None] * 3)
    expected = torch.zeros_like(out).index_copy(0, sequence, out)
    check([found, *gradients(found, inputs)], [expected, *gradients(expected, inputs)], FLOAT64_TOLERANCE)


@pytest.mark.usefixtures("blocks")
def test_maps_and_gradients_of_states() -> None:
    boundaries, linked = boundaries_of(LENGTHS), [0, 2, 3, 5, 7]
    made, leaves = scheduled(boundaries, linked), random_inputs(boundaries[-1])
    inputs = Inputs(*(x.detach() for x in leaves))
    states = random((len(linked), VALUE_HEADS, K, V)).requires_grad_()
    first: list[Tensor | None] = [None] * len(LENGTHS)
    for i, state in zip(linked, states):
        first[i] = state
    expected, last = recurrence(leaves, boundaries, first)
    a, b = KERNEL.transitions(inputs, made)
    check(list(a @ states + b), [last[i] for i in linked], FLOAT64_TOLERANCE)
    out, saved = KERNEL.forward(inputs, made, states.detach())
    check([out], [expected], FLOAT64_TOLERANCE)
    dout, dlast = random(out.shape), random(states.shape)
    (of_states,) = torch.autograd.grad(expected, states, dout, retain_graph=True)
    check([KERNEL.state_gradients(dout, inputs, made)], [of_states], FLOAT64_TOLERANCE)
    found = KERNEL.backward(dout, inputs, made, states.detach(), saved, dlast)
    results = (expected, *(last[i] for i in linked))
    check(list(found), list(torch.autograd.grad(results, leaves, (dout, *dlast))), FLOAT64_TOLERANCE)


@pytest.mark.parametrize("tokens", [1, 64, 65, 300, 2048])
def test_outputs_and_gradients_are_those_of_transformers(tokens: int) -> None:
    inputs = random_inputs(tokens, torch.float32)
    found = recurrent_attention(inputs, scheduled([0, tokens]), KERNEL)
    batch = [x[None] for x in inputs]
    in_torch = inspect.unwrap(torch_chunk_gated_delta_rule)  # transformers calls FLA instead if it is installed
    expected = in_torch(*batch, use_qk_l2norm_in_kernel=True)[0][0]
    check([found, *gradients(found, inputs)], [expected, *gradients(expected, inputs)], FP32_TOLERANCE)


@torch.no_grad()
def test_states_stay_exact_over_16k_tokens() -> None:
    """Random keys and, in key head 1, keys that are nearly equal; each with decays of about e^-0.001, e^-0.1 and e^-10
    per token.  fp32 sums of strong decays over a chunk would lack digits.  Tested in one fragment, and composed from
    the maps of eight fragments, as with cp 4."""
    inputs, other = (random_inputs(16_384, torch.float32, correlated=correlated) for correlated in (False, True))
    inputs.k[:, 1] = other.k[:, 1]
    inputs.g[:, 1::4] *= 100
    exact = Inputs(*(x.double() for x in inputs))
    expected, (state,) = recurrence(exact, [0, 16_384], [None])
    for count in (1, 8):
        made = scheduled(range(0, 16_385, 16_384 // count), linked=range(count))
        a, b = KERNEL.transitions(inputs, made)
        states = OneProcess([range(count)]).initial_states(a, b)
        out, _ = KERNEL.forward(inputs, made, states)
        for x, reference in ((a[-1] @ states[-1] + b[-1], state), (out.transpose(0, 1), expected.transpose(0, 1))):
            distance = (x - reference).flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1)
            assert distance.max() < STATE_TOLERANCE, (count, distance)


def test_bf16_is_rounded_at_the_end_alone() -> None:
    narrow = random_inputs(200, torch.bfloat16)
    narrow = Inputs(*(x.detach().requires_grad_() for x in (*narrow[:3], narrow.g.float())), narrow.beta)
    wide = Inputs(*(x.detach().float().requires_grad_() for x in narrow))
    found, expected = (recurrent_attention(x, scheduled([0, 70, 200]), KERNEL) for x in (narrow, wide))
    assert found.dtype == torch.bfloat16 and expected.dtype == torch.float32
    of_narrow = torch.autograd.grad(found, narrow, random(found.shape, found.dtype))
    of_wide = torch.autograd.grad(expected, wide, random(found.shape, found.dtype).float())
    for x, reference in ((found, expected), *zip(of_narrow, of_wide)):
        torch.testing.assert_close(x.float(), reference, rtol=BF16_ROUNDING, atol=1e-6)
    assert [x.dtype for x in of_narrow] == [x.dtype for x in narrow]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("value", [None, float("nan")], ids=["other tokens", "nan"])
def test_a_document_changes_no_other_one(value: float | None) -> None:
    """Outputs and gradients are bitwise equal.  The replaced document ends inside a chunk, other documents end with
    one."""
    boundaries = boundaries_of([64, 130, 128, 1, 200])
    inputs, other = (random_inputs(boundaries[-1], torch.float32, seed=seed) for seed in (0, 1))
    inside = torch.zeros(boundaries[-1], dtype=torch.bool)
    inside[boundaries[1] : boundaries[2]] = True
    changed = Inputs(*(torch.where(inside.reshape(-1, *[1] * (x.ndim - 1)), y, x) for x, y in zip(inputs, other)))
    if value is not None:
        changed = Inputs(*(x.masked_fill(inside.reshape(-1, *[1] * (x.ndim - 1)), value) for x in inputs))
    changed = Inputs(*(x.detach().requires_grad_() for x in changed))
    results = []
    for x in (inputs, changed):
        out = recurrent_attention(x, scheduled(boundaries), KERNEL)
        results.append([out, *gradients(out, x)])
    for x, y in zip(*results):
        assert torch.equal(x[~inside], y[~inside]) and not torch.equal(x[inside], y[inside])


def test_padding_after_a_document_changes_nothing() -> None:
    """Bitwise equal with 28 more tokens whose outputs get no gradient, and which end in the same chunk."""
    inputs = random_inputs(100 + 28 + 70, torch.float32)
    tokens = torch.tensor([*range(100), *range(128, 198)])
    without = Inputs(*(x[tokens].detach().requires_grad_() for x in inputs))
    grad = random((170, VALUE_HEADS, V), torch.float32)
    out = recurrent_attention(without, scheduled([0, 100, 170]), KERNEL)
    expected = [out, *torch.autograd.grad(out, without, grad)]
    padded = recurrent_attention(inputs, scheduled([0, 128, 198]), KERNEL)
    dpadded = torch.zeros_like(padded).index_copy(0, tokens, grad)
    found = [padded, *torch.autograd.grad(padded, inputs, dpadded)]
    assert all(torch.equal(x[tokens], y) for x, y in zip(found, expected))
    assert all((x[100:128] == 0).all() for x in found[1:])


def test_backward_saves_the_inputs_and_few_states() -> None:
    """Fragments of 1, 8, 9 and 20 chunks: one additional state for every 8 chunks after the first."""
    boundaries = boundaries_of([3, 512, 513, 1280])
    inputs = random_inputs(boundaries[-1], torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        recurrent_attention(inputs, scheduled(boundaries), KERNEL)
    assert [x.shape for x in saved] == [*(x.shape for x in inputs), (0 + 0 + 1 + 2, VALUE_HEADS, K, V)]
    assert all(x.data_ptr() == y.data_ptr() for x, y in zip(saved, inputs))


def test_backward_can_run_once_more() -> None:
    inputs = random_inputs(700, torch.float32)
    out = recurrent_attention(inputs, scheduled([0, 700]), KERNEL)
    first, second = (torch.autograd.grad(out, inputs, random(out.shape, out.dtype), retain_graph=True) for _ in "ab")
    assert all(torch.equal(x, y) for x, y in zip(first, second))


def test_the_longest_fragments_come_first_and_linked_ones_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "INTERVAL", 2)
    monkeypatch.setattr(schedule, "BLOCK_CHUNKS", 8)
    fragments = Fragments.of(boundaries_of([64, 200, 0, 130, 10, 65]), linked=[1, 5])
    made = ChunkSchedule.of(fragments, heads=2, device=torch.device("cpu"))
    assert made.num_saved == 2
    linked, long, short = made.groups
    assert linked.linked is not None and linked.linked.tolist() == [0, 1] and linked.num_fragments == 2
    assert [block.steps for block in linked.blocks] == [(slice(0, 2), slice(2, 4)), (slice(0, 1), slice(1, 2))]
    assert [block.saved for block in linked.blocks] == [None, slice(0, 1)]
    assert linked.blocks[0].tokens[::64].tolist() == [64, 404, 128, 468]  # chunks of 200, 65, 200 and 65 tokens
    assert linked.blocks[0].tokens[-64:].tolist() == [468] * 64  # the second chunk of 65 tokens has one token
    assert linked.blocks[0].padding is not None and linked.blocks[0].padding.sum() == 63
    assert long.linked is None and long.num_fragments == 2 and short.num_fragments == 2
    assert [block.steps for block in long.blocks] == [(slice(0, 2), slice(2, 3)), (slice(0, 1),)]
    assert [block.steps for block in short.blocks] == [(slice(0, 1),)]  # the empty fragment has no chunk


def test_no_tokens() -> None:
    inputs = random_inputs(0)
    for boundaries in ([0], [0, 0]):
        out = recurrent_attention(inputs, scheduled(boundaries), KERNEL)
        assert out.shape == inputs.v.shape and [x.shape for x in gradients(out, inputs)] == [x.shape for x in inputs]
