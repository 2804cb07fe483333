"""How a layer and its adapters are split over ranks, and the products with A that need communication."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

_copy: Callable[..., Tensor] = copy_to_tensor_model_parallel_region
_sum: Callable[..., Tensor] = reduce_from_tensor_model_parallel_region
_gather: Callable[..., Tensor] = gather_from_sequence_parallel_region  # backward sums over ranks and scatters tokens


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a layer is split over the ranks of `group`.

    by_columns         ranks hold columns of the weight (row parallel); False: rows (column parallel)
    sequence_parallel  between layers, ranks hold different tokens
    replica            rank among the ranks that hold the same part of the weight
    is_duplicated      every rank holds the whole weight and both factors, and computes their product for its tokens
    experts            numbers of this rank's experts; empty for a layer outside of experts
    """

    group: dist.ProcessGroup
    by_columns: bool
    sequence_parallel: bool
    replica: int
    experts: range = range(0)
    is_duplicated: bool = False

    @property
    def size(self) -> int:
        """Number of parts of the weight."""
        return 1 if self.is_duplicated else self.group.size()

    @property
    def part(self) -> int:
        """Number of this rank's part of the weight."""
        return 0 if self.is_duplicated else self.group.rank()

    def project(self, x: Tensor, a: Tensor) -> Tensor:
        """A x for the tokens of the layer's output, [t, 1, rank]; a: this rank's part of A"""
        inner = x @ a.t()
        if self.size == 1:
            return inner
        if self.by_columns:
            reduce = reduce_scatter_to_sequence_parallel_region if self.sequence_parallel else _sum
            return reduce(inner, group=self.group)
        return (_gather if self.sequence_parallel else _copy)(inner, group=self.group)

    def summing_gradients(self, factor: Tensor) -> Tensor:
        """`factor`, whose gradient backward sums over the group."""
        return factor if self.size == 1 else _copy(factor, group=self.group)
