"""The bytes that the plain operators around the delta rule read and write are those of the estimate.

torch's dispatcher shows each operator with its tensors.  The count shares no formula with sft/layers.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sft.layers.mixers.delta import PLAIN_CONVOLUTION, PLAIN_NORM
from sft.mcore.linear_attention.gated_norm import _GatedNorm
from sft.mcore.linear_attention.short_convolution import ConvolutionPlan, short_convolution
from sft.parallel.taps import Taps

TOKENS, CHANNELS, HEADS, WIDTH, NUM_TAPS = 4096, 64, 4, 32, 4
# The weights, the edges of documents and one number for each head are counted as well, which the equations leave out.
TOLERANCE = 0.02
WITHOUT_BYTES = ("view", "_unsafe_view", "slice", "select", "t", "detach", "alias", "unsqueeze", "empty", "empty_like")
AT_EDGES = ("index_select", "index_copy_", "index_add_")  # they touch a few rows of their tensors only


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)


class Moved(TorchDispatchMode):
    """Adds up the bytes of the tensors that operators read and write."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func._overloadpacket.__name__
        if name not in WITHOUT_BYTES and name not in AT_EDGES:
            read = args[1:] if name == "copy_" else args
            self.num_bytes += sum(x.numel() * x.element_size() for x in (*tensors(read), *tensors(out)))
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
