"""The position of one process in the layout: its ranks, its device, and a group for small messages.

It does not need megatron-core, so the data pipeline and everything that surrounds the training loop know their
position without importing the model.  sft/mcore/process_groups.py makes it.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Position:
    """The ranks of this process along each dimension of the layout, and its device."""

    device: torch.device
    rank: int  # in the world; those below in their groups
    dp_rank: int
    cp_rank: int
    tp_rank: int
    pp_rank: int
    ep_rank: int = 0
    control: dist.ProcessGroup  # gloo, of all ranks: its messages never wait for a GPU
    saving: dist.ProcessGroup  # the same again, for the thread that saves while the main thread trains
