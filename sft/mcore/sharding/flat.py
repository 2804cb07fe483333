"""A flat buffer of weights, of which each rank holds one shard, and the flat buffer of their gradients.

    weights of a unit    | q, k, v | gate, up     | down | padding |
    shards, 4 ranks      | rank 0    | rank 1   | rank 2    | rank 3 |

The weights of the model are views of the buffer of whole weights.  With parallel.shard = weights, its memory exists
only while the unit is used.  Freeing it shrinks the storage to 0 bytes, so the weights, and the views of them that
autograd saved, are valid again when the buffer is filled the next time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm, prod

import torch
import torch.distributed as dist
from torch import Tensor

from sft.mcore.sharding.ranks import ShardRanks
from sft.parallel.layout import SHARD_ALIGNMENT

# torch 2.13 renamed the function; the old name warns there.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class WeightSlice:
    """Elements `start` to `end - 1` of a flattened weight, which lie in this rank's shard from `offset` on."""

    param: torch.nn.Parameter
    start: int
    end: int
    offset: int


class FlatWeights:
    """Weights of one dtype that are sharded together.

    frees_weights  whether the whole weights are in memory only while they are used
    is_expert      whether the weights belong to experts
    shard          this rank's part of the weights: [size]
    shard_grad     its gradient, summed over microbatches: [size]; None: the weights are frozen
    grad_dtype     dtype of gradients and of their sums
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        ranks: ShardRanks,
        *,
        keeps_weights: bool,
        is_expert: bool,
        grad_dtype: torch.dtype,
    ) -> None:
        self.params, self.ranks, self.is_expert = list(params), ranks, is_expert
        self.is_trained = params[0].requires_grad
        self.starts, end = [], 0
        # The shards hold whole rows of a weight with more than 2 axes, such as [channels, 1, taps].
        multiple = lcm(SHARD_ALIGNMENT, *(prod(param.shape[1:]) for param in params if param.dim() > 2))
        for param in params:
            self.starts.append(end)
            end += -(-param.numel() // multiple) * multiple
        self.size = -(-end // (ranks.size * multiple)) * multiple
        like = params[0]
        self._weights = like.new_zeros(ranks.size * self.size)
        self.frees_weights = not keeps_weights and ranks.size > 1
        own = self._weights.narrow(0, ranks.rank * self.size, self.size)
        self.shard = torch.empty_like(own) if self.frees_weights else own
        with torch.no_grad():
            self.shard.fill_(torch.nan)  # until the weights are loaded or drawn
        self._grads: Tensor | None = None
        self.shard_grad: Tensor | None = None
        if self.is_trained:
            self._grads = torch.zeros_like(self._weights, dtype=grad_dtype)
            own_grad = self._grads.narrow(0, ranks.rank * self.size, self.size)
            self.shard_grad = torch.zeros_like(own_grad) if ranks.size > 1 else own_grad
        for param, start in zip(params, self.starts):
            param.data = self._weights.narrow(0, start, param.numel()).view(param.shape)
            if self._grads is not None:
                param.main_grad = self._grads.narrow(0, start, param.numel()).view(param.shape)  # type: ignore
        self.free_weights()
        self.free_gradients()

    @property
    def pieces(self) -> Iterator[WeightSlice]:
        """The parts of weights in this rank's shard."""
        first = self.ranks.rank * self.size
        for param, position in zip(self.params, self.starts):
            start = max(0, first - position)
            end = min(param.numel(), first + self.size - position)
            if start < end:
                yield WeightSlice(param, start, end, position + start - first)

    def gather(self) -> list[dist.Work]:
        """Start gathering the whole weights.  The caller waits for the returned work before it uses them."""
        if self.frees_weights:
            _resize(self._weights)
        if self.ranks.members is None:
            return []
        return [_all_gather(self._weights, self.shard, group=self.ranks.members, async_op=True)]

    def free_weights(self) -> None:
        if self.frees_weights:
            self._weights.untyped_storage().resize_(0)

    def open_gradients(self) -> None:
        """Fill the `main_grad` of each whole weight with zeros, after allocating their buffer."""
        if self._grads is not None and self.ranks.size > 1:
            _resize(self._grads)
            self._grads.zero_()

    def reduce(self) -> tuple[list[dist.Work], Tensor | None]:
        """Start summing the gradients over ranks.  Returns the running work, and the tensor that gets this rank's sum.

        The caller waits for the work, then passes the tensor to `add`.
        """
        if self._grads is None or self.shard_grad is None or self.ranks.members is None:
            return [], None
        summed = torch.empty_like(self.shard_grad)
        return [_reduce_scatter(summed, self._grads, group=self.ranks.members, async_op=True)], summed

    def add(self, summed: Tensor | None) -> None:
        if summed is not None:
            assert self.shard_grad is not None
            self.shard_grad.add_(summed)
            self.free_gradients()

    def free_gradients(self) -> None:
        if self._grads is not None and self.ranks.size > 1:
            self._grads.untyped_storage().resize_(0)


def _resize(flat: Tensor) -> None:
    storage = flat.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(flat.numel() * flat.element_size())
