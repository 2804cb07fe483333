"""The position of one process in the layout: its ranks, its device, and a group for small messages.

sft/mcore/process_groups.py creates positions.  This module does not import megatron-core, so the data pipeline and
sft/run can use positions without importing the model.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Position:
    """The ranks of this process along each dimension of the layout, and its device."""

    device: torch.device
    rank: int  # global rank; the following ranks are ranks in their groups
    dp_rank: int
    cp_rank: int
    tp_rank: int
    pp_rank: int
    ep_rank: int = 0
    control: dist.ProcessGroup  # gloo group of all ranks; its messages never wait for a GPU
    saving: dist.ProcessGroup  # a second gloo group of all ranks, for the thread that saves during training
