"""Rates of matrix products and of attention on this device, by the kernel that a run on it would use.

All ranks measure at the same time, because ranks of a machine share its memory and its power.  The slowest rank
determines the rate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from sft.calibration.clock import seconds
from sft.calibration.sizes import MeasuredSizes
from sft.layers.kernel_rates import BACKWARD, PLAIN
from sft.mcore.attention.flash_kernel import Demand, FlashKernel
from sft.mcore.attention.packed_attention import AttentionKernel, packed_attention
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.mcore.backends.kernels import FLASH, by_rate

Points = tuple[tuple[float, float], ...]  # (size, TFLOP/s)
COLUMNS = 3  # columns of a product / its inner size, about as in the first product of an MLP


@dataclass(frozen=True)
class Kernels:
    """Measures matrix products and attention in `dtype` on `device`.  All methods that measure are collective."""

    sizes: MeasuredSizes
    device: torch.device
    dtype: torch.dtype

    def products(self) -> Points:
        """TFLOP/s of a product with the two products of its backward pass, by the smallest of its three sizes."""
        points = []
        for size in self.sizes.products:
            rows = max(size, self.sizes.rows)
            inputs, weight = self._random(rows, size), self._random(COLUMNS * size, size)
            grad = self._random(rows, COLUMNS * size)

            def call(inputs: Tensor = inputs, weight: Tensor = weight, grad: Tensor = grad) -> None:
                torch.mm(inputs, weight.t())
                torch.mm(grad, weight)
                torch.mm(grad.t(), inputs)

            flops = 3 * 2 * rows * COLUMNS * size * size
            points.append((float(size), flops / seconds(call, self.device) / 1e12))
        return tuple(points)

    @cached_property
    def _attention_kernel(self) -> tuple[str, Callable[..., AttentionKernel]]:
        """The fastest kernel of the portable backend that runs here, and the function that makes it."""
        width = self.sizes.head_dim
        demand = Demand(self.device.type, self.dtype, width, width)
        for name in by_rate(demand):
            if FLASH[name].why_not(demand) is None:
                return name, partial(FlashKernel.of, operators=FLASH[name])
        return PLAIN, TorchKernel.of

    @property
    def attention_kernel(self) -> str:
        return self._attention_kernel[0]

    def attention(self) -> tuple[Points, Points]:
        """TFLOP/s of forward and of backward by `attention_kernel`, by the length of documents.

        The FLOPs are those of causal attention; backward counts 2.5 times the FLOPs of forward.

        One document of 2 tokens, 1 head of width 4: 2 * 4 * 2 ** 2 = 32 FLOPs forward, 80 backward
        """
        forward, backward = [], []
        heads, width, tokens = self.sizes.heads, self.sizes.head_dim, max(self.sizes.documents)
        _, make = self._attention_kernel
        for length in self.sizes.documents:
            boundaries = np.arange(0, tokens + 1, length, dtype=np.int32)
            kernel = make(boundaries, 1, 0, self.device)
            query, key, value = (self._random(tokens, heads, width).requires_grad_() for _ in range(3))
            grad = self._random(tokens, heads, width)

            def attend(q: Tensor = query, k: Tensor = key, v: Tensor = value, kernel: object = kernel) -> Tensor:
                return packed_attention(q, k, v, kernel, width**-0.5, None)  # type: ignore[arg-type]

            def both(grad: Tensor = grad, inputs: tuple[Tensor, ...] = (query, key, value)) -> None:
                torch.autograd.grad(attend(*inputs), inputs, grad)  # noqa: B023

            flops = 2.0 * heads * width * length**2 * (tokens // length)
            first = seconds(attend, self.device)
            second = max(seconds(both, self.device) - first, 0.1 * first)
            forward.append((float(length), flops / first / 1e12))
            backward.append((float(length), BACKWARD * flops / second / 1e12))
        return tuple(forward), tuple(backward)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)
