"""The chunked delta rule with a decay for each channel has the outputs, states and gradients of the recurrence."""

import inspect
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

from sft.mcore.linear_attention.channel_chunks import Decays
from sft.mcore.linear_attention.delta_rule import Inputs
from sft.mcore.linear_attention.recurrence import Fragments
from sft.mcore.linear_attention.recurrent_attention import recurrent_attention
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from tests.unit.fixtures.recurrence import OneProcess

HEADS, K, V = 3, 8, 5
LENGTHS = [1, 63, 64, 0, 65, 130, 2, 330]  # lengths of fragments; a chunk has 64 tokens, a part of it 16
FLOAT64_TOLERANCE = 1e-11
FP32_TOLERANCE = 1e-5  # compared with transformers in fp32, which rounds in another order
STATE_TOLERANCE = 1e-6  # relative to the norm, in fp32: 16 roundings
KERNEL = TorchDeltaKernel()
CPU = torch.device("cpu")


def random(shape: Sequence[int], seed: int = 9) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_inputs(tokens: int, strength: float, dtype: torch.dtype = torch.float64) -> Inputs:
    """Decays of a channel are about exp(-exp(strength)) per token, and differ by a factor of e^1.5."""
    q, k, g = (random((tokens, HEADS, K), seed) for seed in range(3))
    v, beta = random((tokens, HEADS, V), 3), random((tokens, HEADS), 4).sigmoid()
    return Inputs(*(x.to(dtype).requires_grad_() for x in (q, k, v, -torch.exp(1.5 * g + strength), beta)))


def recurrence(
    inputs: Inputs, boundaries: Sequence[int], states: Sequence[Tensor | None]
) -> tuple[Tensor, list[Tensor]]:
    """Token by token: outputs, and the last state of every fragment.  states: initial states; None: zero"""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (inputs.q, inputs.k))
    outputs, last = [], []
    for start, stop, state in zip(boundaries, boundaries[1:], states):
        s = k.new_zeros(HEADS, K, V) if state is None else state
        for t in range(start, stop):
            s = inputs.g[t].exp()[..., None] * s
            error = inputs.v[t] - torch.einsum("hk,hkv->hv", k[t], s)
            s = s + torch.einsum("hk,hv->hkv", k[t], inputs.beta[t][:, None] * error)
            outputs.append(torch.einsum("hk,hkv->hv", q[t], s) / K**0.5)
        last.append(s)
    return torch.stack(outputs), last


def check(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for x, reference in zip(found, expected, strict=True):
        assert x.dtype == reference.dtype and x.shape == reference.shape
        torch.testing.assert_close(x, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("strength", [-6.0, -2.0, 2.0], ids=["weak", "usual", "strong"])
def test_outputs_maps_and_all_gradients(strength: float) -> None:
    """Strong decays of a chunk add up to more than 700, so that exp(s) and exp(-s) alone would leave float64."""
    boundaries, linked = np.cumsum([0, *LENGTHS]).tolist(), [0, 2, 3, 5, 7]
    leaves = random_inputs(boundaries[-1], strength)
    if strength > 0:
        assert -leaves.g[:64].sum(0).min() > 700
    inputs, made = Inputs(*(x.detach() for x in leaves)), KERNEL.schedule(Fragments.of(boundaries, linked), HEADS, CPU)
    states = random((len(linked), HEADS, K, V)).requires_grad_()
    first = dict(zip(linked, states))
    expected, last = recurrence(leaves, boundaries, [first.get(i) for i in range(len(LENGTHS))])
    a, b = KERNEL.transitions(inputs, made)
    check(list(a @ states + b), [last[i] for i in linked], FLOAT64_TOLERANCE)
    out, saved = KERNEL.forward(inputs, made, states.detach())
    check([out], [expected], FLOAT64_TOLERANCE)
    dout, dlast = random(out.shape, 7), random(states.shape, 8)
    (of_states,) = torch.autograd.grad(expected, states, dout, retain_graph=True)
    check([KERNEL.state_gradients(dout, inputs, made)], [of_states], FLOAT64_TOLERANCE)
    found = KERNEL.backward(dout, inputs, made, states.detach(), saved, dlast)
    results = (expected, *(last[i] for i in linked))
    check(list(found), list(torch.autograd.grad(results, leaves, (dout, *dlast))), FLOAT64_TOLERANCE)


def test_equal_decays_of_all_channels_are_the_decay_of_a_head() -> None:
    inputs = random_inputs(200, -2.0)
    of_head = inputs._replace(g=inputs.g[..., 0].detach().requires_grad_())
    of_channels = inputs._replace(g=of_head.g[..., None].expand(-1, -1, K).detach().requires_grad_())
    results = []
    for x in (of_head, of_channels):
        out = recurrent_attention(x, KERNEL.schedule(Fragments.of([0, 70, 200]), HEADS, CPU), KERNEL)
        results.append([out, *torch.autograd.grad(out, x, random(out.shape))])
    results[1][4] = results[1][4].sum(-1)
    check(results[1], results[0], FLOAT64_TOLERANCE)


@pytest.mark.parametrize("tokens", [1, 65, 300])
def test_outputs_and_gradients_are_those_of_transformers(tokens: int) -> None:
    inputs = random_inputs(tokens, -2.0, torch.float32)
    found = recurrent_attention(inputs, KERNEL.schedule(Fragments.of([0, tokens]), HEADS, CPU), KERNEL)
    in_torch = inspect.unwrap(chunk_kimi_delta_attention)
    expected = in_torch(*(x[None] for x in inputs), use_qk_l2norm_in_kernel=True)[0][0]
    grad = random(found.shape).float()
    gradients = (torch.autograd.grad(out, inputs, grad) for out in (found, expected))
    check([found, *next(gradients)], [expected, *next(gradients)], FP32_TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [4096, pytest.param(65_536, marks=pytest.mark.grid)])
def test_states_stay_exact(tokens: int) -> None:
    """In fp32, composed from the maps of eight fragments, as with cp 4.  Decays are weak, so that states are long."""
    count = 8
    inputs = random_inputs(tokens, -8.0, torch.float32)
    exact = Inputs(*(x.double() for x in inputs))
    expected, (state,) = recurrence(exact, [0, tokens], [None])
    made = KERNEL.schedule(Fragments.of(range(0, tokens + 1, tokens // count), range(count)), HEADS, CPU)
    a, b = KERNEL.transitions(inputs, made)
    states = OneProcess([range(count)]).initial_states(a, b)
    out, _ = KERNEL.forward(inputs, made, states)
    for x, reference in ((a[-1] @ states[-1] + b[-1], state), (out.transpose(0, 1), expected.transpose(0, 1))):
        distance = (x - reference).flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1)
        assert distance.max() < STATE_TOLERANCE, distance


def test_pairs_are_sums_over_channels() -> None:
    """Against the sum itself, for every pair of tokens of a chunk; and their gradients."""
    x, y, sums = (random((2, HEADS, 64, K), seed).requires_grad_() for seed in range(3))
    sums = -sums.detach().exp().cumsum(2)
    decay = (sums[:, :, :, None] - sums[:, :, None]).masked_fill(
        torch.ones(64, 64).triu(1).bool()[..., None], -torch.inf
    )
    expected = (x[:, :, :, None] * y[:, :, None] * decay.exp()).sum(-1)
    decays, grad = Decays(sums, torch.float64), random(expected.shape)
    check([decays.pairs(x.detach(), y.detach())], [expected.detach()], FLOAT64_TOLERANCE)
    check(
        decays.pair_gradients(grad, x.detach(), y.detach()),
        torch.autograd.grad(expected, (x, y), grad),
        FLOAT64_TOLERANCE,
    )
