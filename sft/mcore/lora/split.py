"""Describes how a layer and its adapters are split over ranks, and runs the collectives that adapters need."""

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
    """The split of a layer over the ranks of `group`, which is tp or etp.

    by_columns         True: ranks hold columns of the weight (row parallel); False: rows (column parallel)
    sequence_parallel  whether ranks hold different tokens between layers
    replica            the number of this rank among the ranks that hold the same part of the weight
    is_duplicated      True: every rank holds the whole weight and both factors, and computes the layer for its tokens
    experts            indices of this rank's experts; empty for a layer outside of experts
    """

    group: dist.ProcessGroup
    by_columns: bool
    sequence_parallel: bool
    replica: int
    experts: range = range(0)
    is_duplicated: bool = False

    @property
    def size(self) -> int:
        """The number of parts into which the weight is split."""
        return 1 if self.is_duplicated else self.group.size()

    @property
    def part(self) -> int:
        """The index of this rank's part of the weight."""
        return 0 if self.is_duplicated else self.group.rank()

    def for_outputs(self, inner: Tensor) -> Tensor:
        """Complete A x: from this rank's part of A and its tokens, to the whole A and the tokens of the output.

        inner: [..., rank], the product of this rank's part of A and its tokens
        """
        if self.size == 1:
            return inner
        if self.by_columns:
            reduce = reduce_scatter_to_sequence_parallel_region if self.sequence_parallel else _sum
            return reduce(inner, group=self.group)
        return (_gather if self.sequence_parallel else _copy)(inner, group=self.group)

    def summing_gradients(self, factor: Tensor) -> Tensor:
        """Return `factor`.  Backward sums its gradient over the group."""
        return factor if self.size == 1 else _copy(factor, group=self.group)
