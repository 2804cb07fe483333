"""Sends the tokens of short documents to the ranks that compute these documents, and sends the outputs back.

Each direction is one all-to-all.  With cp 1, tokens of trees are put first, and nothing is sent.  The backward pass of
one direction is the other direction: gradients of inputs are sent like outputs, and gradients of outputs like inputs.
A message is a matrix of bytes.  Each row holds one token: the bytes of all its tensors, each in its own dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sft.mcore.device import send
from sft.parallel.fragments import Relayout

_Move = Callable[[Sequence[Tensor], Any], list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class TokenRelayout:
    """The arrays of `fragments.Relayout` for one microbatch, as tensors on the device.

    inverse: int64, the inverse of the permutation `order`
    """

    kept: Tensor
    send: Tensor
    num_sent: list[int]
    num_received: list[int]
    order: Tensor
    inverse: Tensor

    @staticmethod
    def of(relayout: Relayout, device: torch.device) -> "TokenRelayout":
        def sent(numbers: np.ndarray) -> Tensor:
            return send(torch.from_numpy(numbers), device)

        return TokenRelayout(
            kept=sent(relayout.kept),
            send=sent(relayout.send),
            num_sent=relayout.num_sent,
            num_received=relayout.num_received,
            order=sent(relayout.order),
            inverse=sent(np.argsort(relayout.order)),
        )

    def to_computed(self, tensors: Sequence[Tensor], cp_group: Any) -> list[Tensor]:
        """Turn tensors [t, ...] of local tokens into tensors of the tokens that this rank computes.

        The tokens that are not sent come first, then the tokens of this rank's short documents.
        """
        rows = [x.index_select(0, self.send) for x in tensors]
        arrived = _all_to_all(rows, self.num_sent, self.num_received, cp_group)
        return [
            torch.cat((x.index_select(0, self.kept), y.index_select(0, self.order)))
            for x, y in zip(tensors, arrived, strict=True)
        ]

    def to_local(self, tensors: Sequence[Tensor], cp_group: Any) -> list[Tensor]:
        """The inverse of `to_computed`."""
        num_kept = len(self.kept)
        rows = [x[num_kept:].index_select(0, self.inverse) for x in tensors]
        arrived = _all_to_all(rows, self.num_received, self.num_sent, cp_group)
        local = []
        for x, y in zip(tensors, arrived, strict=True):
            tokens = x.new_empty((num_kept + len(y), *x.shape[1:]))
            local.append(tokens.index_copy_(0, self.kept, x[:num_kept]).index_copy_(0, self.send, y))
        return local


def to_computed(relayout: TokenRelayout, cp_group: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The method `TokenRelayout.to_computed`, with gradients."""
    moved: tuple[Tensor, ...] = _Moved.apply(relayout.to_computed, relayout.to_local, cp_group, *tensors)
    return moved


def to_local(relayout: TokenRelayout, cp_group: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The method `TokenRelayout.to_local`, with gradients."""
    moved: tuple[Tensor, ...] = _Moved.apply(relayout.to_local, relayout.to_computed, cp_group, *tensors)
    return moved


class _Moved(torch.autograd.Function):
    """Calls `move` on the tensors.  Backward calls `back` on their gradients."""

    @staticmethod
    def forward(ctx: Any, move: _Move, back: _Move, cp_group: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back, ctx.cp_group = back, cp_group
        return tuple(move(tensors, cp_group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.back(grads, ctx.cp_group)


def _all_to_all(rows: Sequence[Tensor], num_sent: list[int], num_received: list[int], cp_group: Any) -> list[Tensor]:
    """Send rows: tensors [sum(num_sent), ...], ordered by receiver -> tensors [sum(num_received), ...], by sender."""
    if len(num_sent) == 1:
        return list(rows)
    message = torch.cat([x.flatten(1).view(torch.uint8) for x in rows], dim=1)
    received = message.new_empty((sum(num_received), message.shape[1]))
    dist.all_to_all_single(received, message, num_received, num_sent, group=cp_group)
    widths = [x.itemsize * x.shape[1:].numel() for x in rows]
    parts = zip(rows, received.split(widths, dim=1), strict=True)
    return [part.contiguous().view(x.dtype).unflatten(1, x.shape[1:]) for x, part in parts]
