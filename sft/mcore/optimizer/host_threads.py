"""Makes Adam in host memory use all cores of its rank.  torchrun and `sft train --processes` start a rank with one CPU
thread."""

import os
import socket
from collections.abc import Collection, Sequence
from fractions import Fraction

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer

from sft.mcore.optimizer.inner import inner_optimizers
from sft.parallel.collectives import all_gather_objects

Cores = tuple[str, Collection[int]]  # a machine, and the cores on which a rank may run


def use(optimizer: MegatronOptimizer, group: dist.ProcessGroup) -> None:
    """Make each Adam in host memory step with the threads of this rank.  Collective."""
    ranks = all_gather_objects(lambda: (socket.gethostname(), _cores()), group)
    threads, threads_outside = num_threads(ranks, dist.get_rank(group)), torch.get_num_threads()
    for adam in inner_optimizers(optimizer):
        if all(param.device.type == "cpu" for settings in adam.param_groups for param in settings["params"]):
            adam.register_step_pre_hook(lambda *unused: torch.set_num_threads(threads))
            adam.register_step_post_hook(lambda *unused: torch.set_num_threads(threads_outside))


def num_threads(ranks: Sequence[Cores], rank: int) -> int:
    """The number of threads of `rank`, at least 1.  Ranks that may run on the same core share it equally.

    8 cores, two ranks that may run on all of them -> 4 threads each
    8 cores, a rank bound to cores 0 to 5 and a rank bound to cores 6 and 7 -> 6 and 2 threads
    """
    machine, cores = ranks[rank]
    neighbours = [others for name, others in ranks if name == machine]
    return max(1, int(sum(Fraction(1, sum(core in others for others in neighbours)) for core in cores)))


def _cores() -> Collection[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))  # macOS
