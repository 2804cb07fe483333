"""Builds the process groups of a Layout.  Callers pass the groups as arguments, not as globals.

No other module uses megatron-core's `parallel_state`.  Some of core's code still reads its globals, so `start`
initialises them from the same Layout.
"""

import datetime
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from sft.errors import ConfigError
from sft.files import open_files
from sft.parallel import rendezvous
from sft.parallel.alignment import ETP_NEEDS_NCCL
from sft.parallel.collectives import all_gather_objects
from sft.parallel.cp_group import CpGroup
from sft.parallel.layout import Layout
from sft.parallel.position import Position


@dataclass(frozen=True, kw_only=True)
class ProcessGroups(Position):
    """The position of this rank in the layout, and its process groups."""

    collection: ProcessGroupCollection  # passed to megatron-core's constructors

    timeout_s: int = 600  # timeout of collectives
    smaller_cp: Mapping[int, dist.ProcessGroup] = field(default_factory=dict)  # this rank's groups for dynamic CP

    def cp_group(self, cp_size: int) -> CpGroup:
        """The ranks that share a pack of this CP size with this rank."""
        cp, rank = self.collection.cp, self.cp_rank % cp_size
        if cp_size == 1:
            return CpGroup(1, rank, None)
        return CpGroup(cp_size, rank, cp if cp_size == cp.size() else self.smaller_cp[cp_size])

    @property
    def tp(self) -> dist.ProcessGroup:
        return self.collection.tp

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.collection.pp.size() - 1

    @property
    def reports(self) -> bool:
        """Whether this rank reports the loss of its (dp, cp) position: tp rank 0 of the last stage does."""
        return self.is_last_stage and self.tp_rank == 0


def check_etp(layout: Layout, device: torch.device) -> None:
    """Raise ConfigError if the device cannot split experts over etp.

    Recipes are checked for this earlier, but run.device = auto is resolved only when a run starts.
    """
    if device.type == "cpu" and layout.etp > 1:
        raise ConfigError(f"parallel.etp = {layout.etp} {ETP_NEEDS_NCCL}")


@rendezvous.meeting()
def start(
    layout: Layout, device: torch.device, *, seed: int, timeout_s: int, store: dist.Store | None = None
) -> ProcessGroups:
    """Join the process group that torchrun describes in the environment, and build every group of `layout`.

    A process that was started without torchrun is a world of size 1.  A process that joins a second time needs a new
    `store`, because torchrun's store still holds the addresses of the first time.

    timeout_s: timeout of collectives

    Raises ConfigError, PeerError or StorageError if ranks do not meet.
    """
    check_etp(layout, device)
    open_files.allow_most()
    if not dist.is_initialized():
        rendezvous.join("nccl" if device.type == "cuda" else "gloo", timeout_s=timeout_s, store=store)
    assert dist.get_world_size() == layout.world_size, (dist.get_world_size(), layout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.virtual_stages if layout.virtual_stages > 1 else None,
        context_parallel_size=layout.cp,
        **_two_levels(layout),
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,  # unused; every gloo group takes a file descriptor per rank
        distributed_timeout_minutes=max(1, timeout_s // 60),
    )
    model_parallel_cuda_manual_seed(seed)
    control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
    return ProcessGroups(
        collection=ProcessGroupCollection.use_mpu_process_groups(),
        smaller_cp=_smaller_cp(layout, timeout_s, control) if layout.cp_sizes else {},
        device=device,
        rank=dist.get_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        control=control,
        saving=dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s)),
        timeout_s=timeout_s,
    )


def _smaller_cp(layout: Layout, timeout_s: int, control: dist.ProcessGroup) -> dict[int, dist.ProcessGroup]:
    """This rank's groups for dynamic CP that have more than one rank and fewer than cp ranks, by size.  Collective.

    Only the ranks of a group take part in its creation.  A rank creates its groups from the smallest to the largest.
    """
    ranks = dist.get_process_group_ranks(parallel_state.get_context_parallel_group())
    rank = parallel_state.get_context_parallel_rank()
    members = {size: ranks[rank // size * size :][:size] for size in layout.cp_sizes[1:-1]}
    check_order(all_gather_objects(lambda: list(members.values()), control))
    timeout = datetime.timedelta(seconds=timeout_s)
    return {
        size: dist.new_group(own, timeout=timeout, use_local_synchronization=True, group_desc=f"dynamic CP {size}")
        for size, own in members.items()
    }


def check_order(groups: Sequence[Sequence[Sequence[int]]]) -> None:
    """Raise RuntimeError if two ranks would create their common groups in different orders, and so wait for ever.

    groups: for each rank, the members of each group that the rank creates, in the order of creation
    """
    for rank, made in enumerate(groups):
        for other in {member for members in made for member in members}:
            orders = [[g for g in groups[r] if {rank, other} <= {*g}] for r in (rank, other)]
            if orders[0] != orders[1]:
                raise RuntimeError(f"ranks {rank} and {other} make groups in different orders: {orders}")


def _two_levels(layout: Layout) -> dict[str, Any]:
    """The argument that makes core build the groups of cp_comm a2a+p2p.

    {} for other values of cp_comm, if the backend cannot be Transformer Engine, or if einops is not installed.
    The argument gives the sizes of the all-to-all groups and of the rings.  With cp 4 and cp_a2a 2, the cp ranks
    [0, 1] and [2, 3] exchange heads by all-to-all, and [0, 2] and [1, 3] are rings.
    """
    # Core needs einops to build these groups, but does not depend on it.  Transformer Engine depends on einops.
    if layout.cp_a2a is None or importlib.util.find_spec("einops") is None:
        return {}
    return {"hierarchical_context_parallel_sizes": [layout.cp_a2a, layout.cp // layout.cp_a2a]}


@contextmanager
def left_at_end(world_size: int) -> Iterator[None]:
    """A context at whose end this process leaves its groups, so that it may make others.

    After an error, only a process without other ranks leaves, because another rank may wait in a collective.
    """
    try:
        yield
    except BaseException:
        if world_size == 1 and dist.is_initialized():
            stop()
        raise
    stop()


def stop() -> None:
    """Leave all process groups, and end the threads that gloo keeps for each."""
    parallel_state.destroy_model_parallel()
    parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = None  # core does not reset this one
    dist.destroy_process_group()
