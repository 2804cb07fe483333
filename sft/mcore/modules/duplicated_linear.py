"""Implements a linear layer that every tensor-parallel rank holds whole, because its output is narrow."""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from sft.mcore.modules.stored import OwnWeights


class DuplicatedLinear(OwnWeights):
    """A linear layer without bias, whole on every rank.

    With sequence parallelism, a rank computes only its tokens.  The attribute `sequence_parallel` of the weight then
    makes core sum the weight's gradient over the tp ranks.
    """

    def __init__(self, config: TransformerConfig, num_columns: int, num_rows: int, tp_group: Any) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.weight = torch.nn.Parameter(torch.full((num_rows, num_columns), torch.nan, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[t, 1, columns] -> [t, 1, rows], and None as bias, because core's linear layers return a bias, too."""
        return torch.nn.functional.linear(x, self.weight), None
