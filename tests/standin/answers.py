"""Replaces functions of sft whose results only kernels could compute.

`python -m tests.standin.answers train ...` runs `sft train ...` with these replacements:

finite     the check for finite weights, which runs on the device, always returns true
objects    collectives of Python objects between all ranks use gloo, because NCCL would pass the objects through kernels
"""

from typing import Any

import torch.distributed as dist

_all_ranks: list[Any] = []  # the gloo group of all ranks


def give() -> None:
    """Installs the replacements in this process.  Call it before the process group is created."""
    from sft.mcore.checkpoint_io import engine_state, torch_dist_files

    torch_dist_files.are_finite = lambda tensors: True
    engine_state.is_finite = lambda engine: True
    start, broadcast, gather = dist.init_process_group, dist.broadcast_object_list, dist.all_gather_object

    def init_process_group(*given: Any, **how: Any) -> None:
        start(*given, **how)
        _all_ranks[:] = [dist.new_group(backend="gloo")]

    def broadcast_object_list(object_list: list[Any], src: Any = None, group: Any = None, **how: Any) -> None:
        broadcast(object_list, src, _of_gloo(group), **how)

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        gather(object_list, obj, _of_gloo(group))

    for mine in (init_process_group, broadcast_object_list, all_gather_object):
        setattr(dist, mine.__name__, mine)


def _of_gloo(group: Any) -> Any:
    """The gloo group if `group` contains all ranks; otherwise `group` itself."""
    is_all = group is None or dist.get_world_size(group) == dist.get_world_size()
    return _all_ranks[0] if is_all else group


if __name__ == "__main__":
    give()
    from sft.cli import run

    run()
