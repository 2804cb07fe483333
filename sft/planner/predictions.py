"""Predicts time and memory of the choices for one task on one number of GPUs.  Predictions are cached."""

from dataclasses import dataclass, field, replace
from math import ceil

from sft.config import Config
from sft.estimate.communicators import nccl_bytes
from sft.estimate.gpus import Usable, usable_memory
from sft.estimate.memory import Memory, estimate
from sft.estimate.step_time import StepTime, step_time
from sft.parallel.layout import Layout
from sft.planner.task import Choice, Task, configured

PARTS = 8  # optim.offload_fraction is a multiple of 1 / 8


@dataclass
class Predictions:
    """The predictions for one task on `num_gpus` GPUs, with their cache.  memories: the cache of `memory`"""

    task: Task
    num_gpus: int
    memories: dict[Choice, Memory] = field(default_factory=dict)
    _configs: dict[Choice, tuple[Config, Layout]] = field(default_factory=dict)
    _times: dict[Choice, StepTime] = field(default_factory=dict)

    def least_offload(self, choice: Choice) -> Choice:
        """The choice with the smallest optim.offload_fraction with which it fits the device.

        If it does not fit with 1, or if it offloads nothing, the result is `choice` itself.  Device memory is a convex
        function of the fraction, so the straight line from 0 to 1 is an upper bound, with which the search begins.
        """
        if not choice.savings.optim_offload_fraction:
            return choice

        def with_parts(parts: int) -> Choice:
            return choice._replace(savings=choice.savings._replace(optim_offload_fraction=parts / PARTS))

        on_device, on_host = (self.memory(with_parts(parts)).device for parts in (0, PARTS))
        usable = self.usable(choice).bytes
        if on_host > usable or on_host == on_device:
            return choice
        parts = min(max(1, ceil(PARTS * (on_device - usable) / (on_device - on_host))), PARTS)
        while parts > 1 and self.memory(with_parts(parts - 1)).device <= usable:
            parts -= 1
        return with_parts(parts)

    def fits_host(self, memory: Memory) -> bool:
        hardware = self.task.hardware
        return memory.host_of_node(hardware.gpus_per_node, self.num_gpus) <= hardware.host_bytes

    def usable(self, choice: Choice) -> Usable:
        return usable_memory(self.task.hardware.gpu, nccl_bytes(*self.resolved(choice)))

    def resolved(self, choice: Choice) -> tuple[Config, Layout]:
        if choice not in self._configs:
            config = configured(self.task.config, choice)
            self._configs[choice] = config, Layout.resolve(config, self.num_gpus)
        return self._configs[choice]

    def time(self, choice: Choice) -> StepTime:
        if choice not in self._times:
            task, hardware = self.task, self.task.hardware
            self._times[choice] = step_time(
                *self.resolved(choice),
                task.vocab_size,
                task.lengths,
                hardware.constants,
                trained=task.trained,
                products=task.products,
            )
        return self._times[choice]

    def memory(self, choice: Choice) -> Memory:
        if choice not in self.memories:
            config, layout = self.resolved(choice)
            task = self.task
            memory = estimate(config, layout, task.vocab_size, trained=task.trained, lengths=task.lengths)
            if memory.host_copy and not self.fits_host(memory):  # then training waits for saves (`Search.proposal`)
                memory = replace(memory, host_copy=0.0)
            self.memories[choice] = memory
        return self.memories[choice]
