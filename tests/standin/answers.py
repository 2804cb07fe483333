"""Replaces functions of sft and megatron-core whose results only kernels could compute.

`python -m tests.standin.answers train ...` runs `sft train ...` with these replacements:

populate   page-locked memory gets no pages before they are used, as the other memory of the stand-in
finite     the check for finite weights, which runs on the device, always returns true
objects    megatron-core compares its groups of parameters with messages over NCCL; they go over gloo.  The messages of
           sft always do
buffers    the first all-to-all over a group takes the memory on the device that sft/estimate/communicators.py assumes
"""

import ctypes
from typing import Any

import torch.distributed as dist

from sft.estimate.communicators import ALL_TO_ALL_BYTES, COLLECTIVE_BYTES

_all_ranks: list[Any] = []  # the gloo group of all ranks


def give() -> None:
    """Installs the replacements in this process.  Call it before the process group is created."""
    from sft.mcore import page_locked
    from sft.mcore.checkpoint_io import engine_state, torch_dist_files

    page_locked.populate = lambda memory: None
    torch_dist_files.are_finite = lambda tensors: True
    engine_state.is_finite = lambda engine: True
    start, gather, exchange = dist.init_process_group, dist.all_gather_object, dist.all_to_all_single
    opened = set[str]()  # names of groups

    def init_process_group(*given: Any, **how: Any) -> None:
        start(*given, **how)
        _all_ranks[:] = [dist.new_group(backend="gloo")]

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        is_of_all = dist.get_world_size(group) == dist.get_world_size()  # another group is left as it is
        gather(object_list, obj, _all_ranks[0] if is_of_all else group)

    def all_to_all_single(output: Any, input: Any, *given: Any, group: Any = None, **how: Any) -> Any:
        name = (group or dist.group.WORLD).group_name
        if input.is_cuda and name not in opened and dist.get_world_size(group) > 1:
            opened.add(name)
            beyond = ctypes.c_size_t(int(ALL_TO_ALL_BYTES - COLLECTIVE_BYTES))
            assert ctypes.CDLL(None).standin_open_all_to_all(beyond) == 0, f"no memory for the all-to-alls of {name}"
        return exchange(output, input, *given, group=group, **how)

    for mine in (init_process_group, all_gather_object, all_to_all_single):
        setattr(dist, mine.__name__, mine)


def give_fla() -> None:
    """Installs functions of the right shapes in place of FLA's."""
    from sft.mcore.linear_attention import fla_functions, fla_kernel
    from tests.standin.fla_shapes import Shapes

    fla_functions.problem = fla_kernel.wrong_triton = lambda *wanted: None
    fla_functions.functions = fla_functions.loaded = lambda *wanted: Shapes()


if __name__ == "__main__":
    give()
    from sft.cli import run

    run()
