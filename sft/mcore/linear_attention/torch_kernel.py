"""Computes the gated delta rule in plain torch, on any device and in any precision.

chunked_kernel.py goes from block to block, and chunks.py computes a block.  States and all products are float32, or
float64 for float64 values.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from sft.config.linear_attention import Activation
from sft.mcore.linear_attention.channel_chunks import ChannelChunks
from sft.mcore.linear_attention.chunked_kernel import ChunkedKernel
from sft.mcore.linear_attention.chunks import Chunks
from sft.mcore.linear_attention.delta_rule import Inputs
from sft.mcore.linear_attention.gated_norm import gated, gated_norm
from sft.mcore.linear_attention.recurrence import MATRICES
from sft.mcore.linear_attention.schedule import Block
from sft.mcore.wide import wide_dtype


class TorchDeltaKernel(ChunkedKernel[Inputs]):
    """Implements `delta_rule.DeltaKernel` in torch."""

    maps = MATRICES

    def products(self, inputs: Inputs, block: Block) -> Chunks | ChannelChunks:
        return ChannelChunks.of(inputs, block) if inputs.has_channel_decay else Chunks.of(inputs, block)

    def whole_maps(self, inputs: Inputs, count: int) -> tuple[Tensor, int, Callable[[Block, Tensor], object]]:
        """Run the rule on the values [0, v] from the states [1, 0]; then the last states are [A, B]."""
        size = inputs.k.shape[-1]
        identity = torch.eye(size, dtype=inputs.state_dtype, device=inputs.v.device)
        maps = pad(identity, (0, inputs.v.shape[-1])).repeat(count, inputs.v.shape[1], 1, 1)

        def advance(block: Block, state: Tensor) -> None:
            chunks = self.products(inputs._replace(q=inputs.k), block)  # the maps do not depend on queries
            replace(chunks, v=pad(chunks.v, (size, 0))).scan(state)

        return maps, size, advance

    def log_decay(self, a: Tensor, a_log: Tensor, dt_bias: Tensor, floor: float | None = None) -> Tensor:
        dtype = wide_dtype(a.dtype)
        shifted, rate = a.to(dtype) + dt_bias.to(dtype).view(a.shape[1:]), a_log.to(dtype).exp()
        rate = rate.view(-1, *[1] * (a.ndim - 2))
        if floor is not None:
            return floor * torch.sigmoid(rate * shifted)
        return -rate * torch.nn.functional.softplus(shifted)

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Activation = "silu"
    ) -> tuple[Tensor, Tensor]:
        return gated_norm(x, gate, weight, eps, activation)

    def gated(
        self, x: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, eps: float, activation: Activation = "silu"
    ) -> Tensor:
        return gated(x, gate, weight, scale, activation)
