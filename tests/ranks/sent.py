"""Counts the bytes that a rank sends by all-to-all."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Sent(TorchDispatchMode):
    """Counts bytes that leave this rank by all-to-all, and refuses all other collectives."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            assert func is torch.ops.c10d.alltoall_base_.default, func
            message, num_sent = args[1], args[4]
            self.num_bytes += message.nbytes // max(len(message), 1) * (len(message) - num_sent[dist.get_rank()])
        return func(*args, **(kwargs or {}))
