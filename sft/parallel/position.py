"""Where one process stands in the layout: its ranks, its device, and a group for small messages.

A value without megatron-core, so that the data pipeline and everything that surrounds the training loop can be told
where they are without importing the model.  `mcore/process_groups.py` makes it.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Position:
    """The ranks of this process along each dimension of the layout, and its device.

    rank          in the world
    dp_rank, ...  in its group along that dimension
    control       gloo group of all ranks: its messages never wait for a GPU
    saving        the same for the thread that saves: it sends while the main thread does
    """

    device: torch.device
    rank: int
    dp_rank: int
    cp_rank: int
    tp_rank: int
    pp_rank: int
    ep_rank: int = 0
    control: dist.ProcessGroup
    saving: dist.ProcessGroup
