"""The documents of a microbatch, as routers need them: balancing losses are averages over whole documents."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class TokenDocuments:
    """The document of each token of this rank in a microbatch.

    numbers     int32 [t], -1 for padding
    count       documents of the whole pack, filler documents included
    cp_members  the ranks that share the pack; None: this rank has all of it
    """

    numbers: Tensor
    count: int
    cp_members: dist.ProcessGroup | None = None

    @property
    def is_real(self) -> Tensor:
        """bool [t], false for padding"""
        return self.numbers >= 0
