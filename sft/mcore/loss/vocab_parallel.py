"""Splits the vocabulary over tensor-parallel ranks, and runs the collectives of the loss head."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """The part of the output projection on this rank."""

    weight: Tensor  # [rows, h], a slice of the padded vocabulary
    first: int  # the vocabulary id of row 0
    num_real: int  # number of rows of real tokens, which come first; the other rows pad the vocabulary
    group: dist.ProcessGroup  # the tp ranks
    sequence_parallel: bool
    softcap: float | None = None  # a score s is replaced by softcap * tanh(s / softcap); None: it is not

    @staticmethod
    def of(
        weight: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup,
        *,
        sequence_parallel: bool,
        softcap: float | None = None,
    ) -> "VocabShard":
        rows = weight.shape[0]
        first = group.rank() * rows
        return VocabShard(
            weight=weight,
            first=first,
            num_real=min(max(vocab_size - first, 0), rows),
            group=group,
            sequence_parallel=sequence_parallel,
            softcap=softcap,
        )

    @property
    def main_grad(self) -> Tensor | None:
        """The buffer that sums the weight's gradient, if it has the dtype `accumulation_dtype`; otherwise None."""
        buffer: Tensor | None = getattr(self.weight, "main_grad", None)
        return buffer if buffer is not None and buffer.dtype == accumulation_dtype(self.weight.dtype) else None

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Scores [t, rows of this shard] of all t tokens, with autograd and without the soft cap.

        A frozen weight gets no gradient.  Zeros replace the hidden states of tokens that are not in `rows`, because
        such a hidden state may be NaN.  The gradient of the weight would multiply it by 0, and NaN * 0 is NaN.
        """
        if self.sequence_parallel:
            whole = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=self.group)
        else:
            whole = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=self.group)
        whole = whole.flatten(0, 1)
        if rows.numel() < whole.shape[0]:
            read = torch.zeros(whole.shape[0], 1, dtype=torch.bool, device=whole.device).index_fill(0, rows, True)
            whole = torch.where(read, whole, 0.0)
        return torch.nn.functional.linear(whole, self.weight)

    def gather(self, hidden: Tensor) -> Tensor:
        """Hidden states [t, 1, h], or [t / tp, 1, h] under sequence parallelism -> [t, h], without gradient."""
        local = hidden.detach().flatten(0, 1)
        if not self.sequence_parallel:
            return local
        whole = local.new_empty((local.shape[0] * self.group.size(), local.shape[1]))
        dist.all_gather_into_tensor(whole, local.contiguous(), group=self.group)
        return whole

    def all_reduce(self, partial: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce `partial` over tp, in place."""
        if self.group.size() > 1:
            dist.all_reduce(partial, op=op, group=self.group)

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """The sum of `partial` [t, h] over tp, split by tokens: this rank's slice, [t / tp, h]."""
        local = partial.new_empty((partial.shape[0] // self.group.size(), partial.shape[1]))
        dist.reduce_scatter_tensor(local, partial, group=self.group)
        return local

    def all_gather(self, local: Tensor) -> Tensor:
        """The tensors `local` [k, n] of all tp ranks, [tp, k, n]."""
        gathered = local.new_empty((self.group.size() * local.shape[0], local.shape[1]))
        dist.all_gather_into_tensor(gathered, local, group=self.group)
        return gathered.view(self.group.size(), *local.shape)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
