"""The bytes and FLOPs of linear attention in plain torch, and of the operators around it, are those of the estimate.

torch's dispatcher shows each operator with its tensors.  The count shares no formula with sft/layers.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sft.config.linear_attention import LinearAttentionConfig
from sft.config.mamba import MambaConfig
from sft.layers.mixers import mamba
from sft.layers.mixers.delta import PLAIN_NORM
from sft.layers.mixers.delta_work import PLAIN_BACKWARD, PLAIN_MAPS, PLAIN_STATE_GRADIENTS, plain_forward
from sft.layers.mixers.recurrent import PLAIN_CONVOLUTION
from sft.mcore.linear_attention import ssd
from sft.mcore.linear_attention.delta_rule import Inputs
from sft.mcore.linear_attention.gated_norm import _GatedNorm
from sft.mcore.linear_attention.grouped_norm import grouped_norm, skip
from sft.mcore.linear_attention.recurrence import Fragments
from sft.mcore.linear_attention.short_convolution import ConvolutionPlan, short_convolution
from sft.mcore.linear_attention.ssd_kernel import TorchSsdKernel
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from sft.parallel.taps import Taps

TOKENS, CHANNELS, HEADS, WIDTH, NUM_TAPS = 4096, 64, 4, 32, 4
# The weights, the edges of documents and one number for each head are counted as well, which the equations leave out.
TOLERANCE = 0.02
WITHOUT_BYTES = ("view", "_unsafe_view", "slice", "select", "t", "detach", "alias", "unsqueeze", "empty", "empty_like")
WITHOUT_BYTES += ("transpose", "permute", "expand", "split", "split_with_sizes", "squeeze", "as_strided", "new_empty")
PRODUCTS = {"mm": 0, "bmm": 0, "baddbmm_": 1}  # and the index of the first factor
AT_EDGES = ("index_select", "index_copy_", "index_add_")  # they touch a few rows of their tensors only


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)


class Moved(TorchDispatchMode):
    """Adds up the bytes of the tensors that operators read and write, and the FLOPs of their products."""

    num_bytes = flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func._overloadpacket.__name__
        if name not in WITHOUT_BYTES and name not in AT_EDGES:
            read = args[1:] if name == "copy_" else args
            self.num_bytes += sum(x.numel() * x.element_size() for x in (*tensors(read), *tensors(out)))
        if name in PRODUCTS:
            left, right = args[PRODUCTS[name] : PRODUCTS[name] + 2]
            self.flops += 2 * left.numel() * right.shape[-1]
        if name == "linalg_solve_triangular":
            self.flops += args[0].numel() * args[1].shape[-1]
        return out


def moved(call: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> tuple[int, int]:
    """Bytes of forward and of backward."""
    with Moved() as forward:
        out = call()
    grad = torch.ones_like(out)
    with Moved() as backward:
        torch.autograd.grad(out, inputs, grad)
    return forward.num_bytes, backward.num_bytes


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def test_the_convolution_in_plain_torch() -> None:
    x, weight = random(TOKENS, CHANNELS), random(CHANNELS, NUM_TAPS)
    plan = ConvolutionPlan.of(Taps.of(np.array([0, TOKENS]), NUM_TAPS, 1, 0), torch.device("cpu"))
    found = moved(lambda: short_convolution(x, weight, plan, None), (x, weight))
    assert PLAIN_CONVOLUTION == (68, 206)
    assert [num_bytes / x.numel() for num_bytes in found] == pytest.approx(PLAIN_CONVOLUTION, rel=TOLERANCE)


def test_the_gated_norm_in_plain_torch() -> None:
    x, gate, weight = random(TOKENS, HEADS, WIDTH), random(TOKENS, HEADS, WIDTH), random(WIDTH)
    found = moved(lambda: _GatedNorm.apply(x, gate, weight, 1e-6)[0], (x, gate, weight))
    assert PLAIN_NORM == (72, 158)
    assert [num_bytes / x.numel() for num_bytes in found] == pytest.approx(PLAIN_NORM, rel=TOLERANCE)


# The equations have one multiple of forward for FLOPs and bytes, and for all widths of heads.
PASS_TOLERANCE, BYTES_TOLERANCE = 0.1, 0.04
DELTA_CASES = [(2, 4, 128, 128), (4, 4, 128, 128), (1, 3, 64, 64)]  # key heads, value heads, K, V


@pytest.mark.parametrize("sizes", DELTA_CASES, ids=str)
def test_the_delta_rule_in_plain_torch(sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two linked fragments of 1,024 tokens.  Rows of tokens are gathered and written, so operators at edges count."""
    monkeypatch.setattr(sys.modules[__name__], "AT_EDGES", ())
    (key_heads, value_heads, keys, values), kernel = sizes, TorchDeltaKernel()
    qk, v, beta = (key_heads, keys), (value_heads, values), (value_heads,)
    inputs = Inputs(*(torch.randn(2048, *shape).bfloat16() for shape in (qk, qk, v)), *(torch.rand(2048, *beta),) * 2)
    inputs = inputs._replace(g=-inputs.g)
    schedule = kernel.schedule(Fragments.of([0, 1024, 2048], linked=[0, 1]), value_heads, torch.device("cpu"))
    states, grad = torch.zeros(2, value_heads, keys, values), torch.randn(2048, *v).bfloat16()
    _, saved = kernel.forward(inputs, schedule, states)
    passes: dict[str, Callable[[], Any]] = {
        "forward": lambda: kernel.forward(inputs, schedule, states),
        "maps": lambda: kernel.transitions(inputs, schedule),
        "state gradients": lambda: kernel.state_gradients(grad, inputs, schedule),
        "backward": lambda: kernel.backward(grad, inputs, schedule, states, saved, states),
    }
    found = {}
    for name, run in passes.items():
        with Moved() as count:
            run()
        found[name] = count.flops / 2048, count.num_bytes / 2048
    linear = LinearAttentionConfig(
        layers=[1],
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=keys,
        value_head_dim=values,
    )
    flops, num_bytes = plain_forward(linear)
    if sizes == DELTA_CASES[0]:  # 6 x 128 x 128 + 4 x 64 x 128 + 64 x 64 + 128 for a value head; 4 x 64 x 128 for a key
        assert flops == 4 * 135_296 + 2 * 32_768
    assert found["forward"] == (flops, pytest.approx(num_bytes, rel=BYTES_TOLERANCE))
    assert (PLAIN_MAPS, PLAIN_STATE_GRADIENTS, PLAIN_BACKWARD) == (1.15, 1.0, 2.7)
    expected = {"maps": PLAIN_MAPS, "state gradients": PLAIN_STATE_GRADIENTS, "backward": PLAIN_BACKWARD}
    for name, multiple in expected.items():
        if keys == 128:
            ratios = [one / base for one, base in zip(found[name], found["forward"])]
            assert ratios == pytest.approx([multiple] * 2, rel=PASS_TOLERANCE), name


def test_what_surrounds_mamba_in_plain_torch() -> None:
    """The norm by groups, the skip, the bias of the convolution, and time steps of 8 heads."""
    x, y, gate, weight = *(random(TOKENS, HEADS, WIDTH) for _ in "xyg"), random(HEADS, WIDTH)
    factors, raw, of_heads = random(HEADS), random(TOKENS, 8), (random(8), random(8))
    plan = ConvolutionPlan.of(Taps.of(np.array([0, TOKENS]), NUM_TAPS, 1, 0), torch.device("cpu"))
    channels, taps, bias = random(TOKENS, CHANNELS), random(CHANNELS, NUM_TAPS), random(CHANNELS)
    found = [
        moved(lambda: grouped_norm(x, gate, weight, 1e-6)[0], (x, gate, weight)),
        moved(lambda: skip(y, x, factors), (y, x, factors)),
        moved(lambda: short_convolution(channels, taps, plan, None, bias), (channels, taps, bias)),
        moved(lambda: sum(ssd.time_steps(raw, *of_heads, low=0.0, high=None)), (raw, *of_heads)),  # type: ignore
    ]
    assert (mamba.PLAIN_NORM, mamba.SKIP, mamba.TIME_STEP) == ((99, 189), (6, 32), (58, 118))
    of_convolution = tuple(a + b for a, b in zip(PLAIN_CONVOLUTION, mamba.PLAIN_BIAS))
    sizes = [*[x.numel()] * 2, channels.numel(), raw.numel()]
    for numbers, size, expected in zip(found, sizes, (mamba.PLAIN_NORM, mamba.SKIP, of_convolution, mamba.TIME_STEP)):
        assert [num_bytes / size for num_bytes in numbers] == pytest.approx(expected, rel=TOLERANCE)


MAMBA_CASES = [(1, 4, 128, 64), (2, 8, 128, 64), (1, 4, 64, 128)]  # groups, heads, N, P


@pytest.mark.parametrize("sizes", MAMBA_CASES, ids=str)
def test_mamba_in_plain_torch(sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two linked fragments of 512 tokens.  FLOPs of maps and of gradients of states are 0.37 times those of forward."""
    monkeypatch.setattr(sys.modules[__name__], "AT_EDGES", ())
    (groups, heads, n, p), kernel, t = sizes, TorchSsdKernel(), 1024
    tensors_ = (torch.randn(t, *shape).bfloat16() for shape in ((groups, n), (groups, n), (heads, p)))
    inputs = ssd.SsdInputs(*tensors_, -torch.rand(t, heads), torch.rand(t, heads))
    schedule = kernel.schedule(Fragments.of([0, t // 2, t], linked=[0, 1]), heads, torch.device("cpu"))
    states, grad = torch.zeros(2, heads, n, p), torch.randn(t, heads, p).bfloat16()
    _, saved = kernel.forward(inputs, schedule, states)
    passes: list[Callable[[], Any]] = [
        lambda: kernel.forward(inputs, schedule, states),
        lambda: kernel.backward(grad, inputs, schedule, states, saved, states),
        lambda: kernel.transitions(inputs, schedule),
        lambda: kernel.state_gradients(grad, inputs, schedule),
    ]
    found = []
    for run in passes:
        with Moved() as count:
            run()
        found.append((count.flops / t, count.num_bytes / t))
    flops, num_bytes = mamba.plain_forward(
        MambaConfig(layers=[1], num_heads=heads, num_groups=groups, state_dim=n, head_dim=p)
    )
    if sizes == MAMBA_CASES[0]:  # 4 x 128 x 64 + 2 x 64 x 64 + 2 x 64 for a head; 2 x 64 x 128 for a group
        assert flops == 4 * 41_088 + 16_384
    assert found[0] == (flops, pytest.approx(num_bytes, rel=BYTES_TOLERANCE))
    assert mamba.PLAIN_WORK == (2.4, 0.62, 0.63)
    if p == 64:
        ratios = [of_pass[1] / found[0][1] for of_pass in found[1:]]
        assert ratios == pytest.approx([2.4, 0.62, 0.63], rel=PASS_TOLERANCE)
