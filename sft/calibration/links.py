"""Measures messages between the ranks of a launch: bandwidth, latency, and the share that products do not hide.

all-gather       bytes per second that a rank receives from the others; this bandwidth is the reference
reduce-scatter   bandwidth as a share of the reference; gloo sums by an all-reduce, which sends twice as many bytes
send             bandwidth of a message from a rank to the next, in one direction, as a share of the reference
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sft.calibration.clock import seconds

SMALL = 256  # bytes of a message that measures the latency
SQUARE = 256  # rows and columns of the products that run beside a message


class Link(NamedTuple):
    """A measured link.

    gb_s                  GB/s that a rank receives in an all-gather
    latency_us            time of an all-gather of SMALL bytes
    reduce_scatter, send  bandwidths as shares of gb_s
    exposed               the share of a message that products do not hide (`exposed_share`)
    """

    gb_s: float
    latency_us: float
    reduce_scatter: float
    send: float
    exposed: float


@dataclass(frozen=True)
class Links:
    """Measures the links between the ranks of a group.

    num_bytes  bytes that each rank sends
    group      a process group; None: all ranks
    """

    num_bytes: int
    device: torch.device
    group: Any = None

    def measure(self) -> Link:
        """Measures bandwidths and latency.  Collective over all ranks; each rank passes its own group to `Links`."""
        size = dist.get_world_size(self.group)
        received = self.num_bytes * (size - 1)
        latency_s = self._gather_s(SMALL)
        gather_s = max(self._gather_s(self.num_bytes) - latency_s, 1e-9)
        scatter_s = max(self._scatter_s(self.num_bytes) - latency_s, 1e-9)
        send_s = max(self._send_s(self.num_bytes) - latency_s, 1e-9)
        return Link(
            gb_s=received / gather_s / 1e9,
            latency_us=latency_s * 1e6,
            reduce_scatter=gather_s / scatter_s,
            send=gather_s / (size - 1) / send_s,
            exposed=self._exposed(),
        )

    def copied_gb_s(self) -> float:
        """GB/s of a copy from page-locked host memory to the device.  CUDA only."""
        pinned, there = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=True), self._bytes(self.num_bytes)
        return self.num_bytes / seconds(lambda: there.copy_(pinned, non_blocking=True), self.device) / 1e9

    def _gather_s(self, num_bytes: int) -> float:
        part, whole = self._bytes(num_bytes), self._bytes(num_bytes * dist.get_world_size(self.group))
        return seconds(lambda: dist.all_gather_into_tensor(whole, part, group=self.group), self.device)

    def _scatter_s(self, num_bytes: int) -> float:
        part = torch.zeros(num_bytes // 4, device=self.device)
        whole = torch.zeros(num_bytes // 4 * dist.get_world_size(self.group), device=self.device)
        return seconds(lambda: dist.reduce_scatter_tensor(part, whole, group=self.group), self.device)

    def _send_s(self, num_bytes: int) -> float:
        """Seconds of a message of an even rank to the next rank.  A last rank without a partner does nothing."""
        rank, size, message = dist.get_rank(self.group), dist.get_world_size(self.group), self._bytes(num_bytes)
        other = rank + 1 if rank % 2 == 0 else rank - 1

        def call() -> None:
            if other < size:
                send_or_receive = dist.send if rank % 2 == 0 else dist.recv
                of_world = other if self.group is None else dist.get_global_rank(self.group, other)
                send_or_receive(message, of_world, group=self.group)

        return seconds(call, self.device)

    def _exposed(self) -> float:
        """The exposed share of a message and of products that take about as long as the message alone."""
        part, whole = self._bytes(self.num_bytes), self._bytes(self.num_bytes * dist.get_world_size(self.group))
        square = torch.zeros(SQUARE, SQUARE, device=self.device)
        product_s = seconds(lambda: torch.mm(square, square), self.device)
        message_s = self._gather_s(self.num_bytes)
        number = max(1, round(message_s / product_s))

        def products() -> None:
            for _ in range(number):
                torch.mm(square, square)

        def both() -> None:
            work = dist.all_gather_into_tensor(whole, part, group=self.group, async_op=True)
            products()
            if work is not None:
                work.wait()

        alone_s = seconds(products, self.device)
        return exposed_share(seconds(both, self.device), message_s, alone_s)

    def _bytes(self, number: int) -> torch.Tensor:
        return torch.zeros(number, dtype=torch.uint8, device=self.device)


def exposed_share(both_s: float, message_s: float, products_s: float) -> float:
    """Share of the shorter work that the longer does not hide: 0 if it hides all, 1 if they run one after the other.

    together 5 s, message alone 4 s, products alone 2 s -> 0.5
    """
    longer, shorter = max(message_s, products_s), min(message_s, products_s)
    return min(1.0, max(0.0, (both_s - longer) / shorter))
