"""What ranks send each other for context parallelism: bytes of collectives, bytes on the loopback, and how fast."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# By which keys, values and their gradients travel; indices of the tensor of all ranks, and of one rank.
COLLECTIVES = {"all_gather_into_tensor": (0, 1), "reduce_scatter_tensor": (1, 0)}
PART = 4 << 20  # bytes of a rank in a message that measures the bandwidth


class KeyTraffic:
    """Counts the bytes that this rank sends to the other ranks of CP groups for keys, values and their gradients.

    Counts a tensor of all ranks minus a rank's own part, as a ring sends it.  Gloo may send more: it sums gradients
    with an all-reduce.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup | None]) -> None:
        self._groups = [group for group in groups if group is not None]
        self.num_bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        replaced: dict[str, Any] = {}
        for name, (whole, part) in COLLECTIVES.items():
            replaced[name] = self._counting(getattr(dist, name), whole, part)
        with mock.patch.multiple(dist, **replaced):
            yield

    def _counting(self, collective: Callable[..., Any], whole: int, part: int) -> Callable[..., Any]:
        def call(*tensors: torch.Tensor, group: Any = None, **options: Any) -> Any:
            if any(group is counted for counted in self._groups):
                self.num_bytes += tensors[whole].nbytes - tensors[part].nbytes
            return collective(*tensors, group=group, **options)

        return call


def loopback_bytes() -> int:
    """Bytes that the loopback has carried in the network namespace of this process."""
    lines = Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines()
    (counts,) = [line.split(":")[1] for line in lines if line.strip().startswith("lo:")]
    return int(counts.split()[0])


def bandwidth(group: Any) -> float:
    """GB per second that a rank receives while all ranks of the group send keys, values and gradients.  Collective.

    The messages are those of a layer: two all-gathers and a reduce-scatter.  All ranks return the same number.
    """
    part, whole = torch.zeros(PART // 4), torch.zeros(group.size() * PART // 4)
    fastest = float("inf")
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(2):
            dist.all_gather_into_tensor(whole, part, group=group)
        dist.reduce_scatter_tensor(part, whole, group=group)
        fastest = min(fastest, slowest_rank(time.perf_counter() - start))
    return 3 * (group.size() - 1) * PART / fastest / 1e9


def slowest_rank(seconds: float) -> float:
    """The seconds of the slowest rank, on every rank."""
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def sum_over_ranks(number: int) -> int:
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)
