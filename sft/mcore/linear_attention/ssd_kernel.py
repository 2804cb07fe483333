"""Computes Mamba-2 in plain torch, on any device and in any precision.

chunked_kernel.py goes from block to block, and ssd_chunks.py computes a block.  States and all products are float32, or
float64 for float64 inputs.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import pad

from sft.mcore.linear_attention.chunked_kernel import ChunkedKernel
from sft.mcore.linear_attention.grouped_norm import grouped, grouped_norm
from sft.mcore.linear_attention.recurrence import NUMBERS
from sft.mcore.linear_attention.schedule import Block, ChunkSchedule
from sft.mcore.linear_attention.ssd import SsdInputs
from sft.mcore.linear_attention.ssd_chunks import SsdChunks


class TorchSsdKernel(ChunkedKernel[SsdInputs]):
    """Implements `ssd.SsdKernel` in torch."""

    maps = NUMBERS

    def products(self, inputs: SsdInputs, block: Block) -> SsdChunks:
        return SsdChunks.of(inputs, block)

    def whole_maps(self, inputs: SsdInputs, count: int) -> tuple[Tensor, int, Callable[[Block, Tensor], object]]:
        """Run the recurrence on the values [0, V] from the states [1, 0]; then the last states are [A, B].

        All rows of the column A have the same number.
        """
        maps = pad(inputs.zero_states(count), (1, 0))
        maps[..., 0] = 1

        def advance(block: Block, state: Tensor) -> None:
            chunks = SsdChunks.of(inputs._replace(c=inputs.b), block)  # the maps do not depend on C
            chunks.scan(state, pad(chunks.values, (1, 0)))

        return maps, 1, advance

    def transitions(self, inputs: SsdInputs, schedule: ChunkSchedule) -> tuple[Tensor, Tensor]:
        a, b = super().transitions(inputs, schedule)
        return a[:, :, :1].contiguous(), b

    def grouped_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return grouped_norm(x, gate, weight, eps)

    def grouped(self, x: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
        return grouped(x, gate, weight, scale)
