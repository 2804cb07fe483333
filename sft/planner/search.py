"""Finds the proposals with the shortest predicted step among those that are predicted to fit.

The search is best-first: a heap holds partial proposals with a lower bound of their time.  The first bound for sizes of
a layout is the time of the model's FLOPs at the highest rate, with the pipeline's bubble.  The second bound is the
predicted time without savings, without exposed messages over cp and dp, and without the update.  Later choices can only
take longer.  The second bound, and later the memory, are predicted only for partial proposals that the heap pops.  The
first complete proposals that the heap pops are the best ones: no heuristic excludes a proposal.

If the optimizer is offloaded, optim.offload_fraction is the smallest multiple of 1/8 with which the proposal fits the
device.  If nothing fits, a second search computes attention by chunks of heads (train.head_chunks).
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from sft.config.parallel import Shard
from sft.estimate.memory import Memory
from sft.planner import candidates
from sft.planner.predictions import PARTS, Predictions
from sft.planner.task import Choice, Proposal, Savings, Sizes, Task, without_copies

# (seconds, serial number, choice, whether the choice is complete).  The seconds of an incomplete choice are a lower
# bound.  All serial numbers differ, so comparisons of nodes never reach the choice.
Node = tuple[float, int, Choice, bool]


@dataclass
class Search:
    """The proposals for one task on one number of GPUs.  Predictions are cached, so that a second search is cheap.

    memories: the predicted memory of choices; searches for tasks that differ only in the GPU may share it
    """

    task: Task
    num_gpus: int
    memories: dict[Choice, Memory] = field(default_factory=dict)
    _bounds: list[Node] | None = None
    _in_chunks: bool = False
    _order: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._predicted = Predictions(self.task, self.num_gpus, self.memories)
        self._savings: list[Savings] = candidates.savings(self.task)
        self._shard_kinds: list[Shard] = candidates.shard_kinds(self.task)

    def best(self, number: int = 1, *, is_memory_limited: bool = True) -> list[Proposal]:
        """The `number` best proposals, the best first; fewer if fewer fit.  Of each `Proposal.group`, only the best.

        is_memory_limited: False includes proposals that do not fit the memory
        """
        proposals = self._best(number, is_memory_limited)
        if proposals or self._in_chunks or not candidates.savings(self.task, in_chunks=True):
            return proposals
        self._bounds, self._in_chunks = None, True
        self._savings = candidates.savings(self.task, in_chunks=True)
        return self._best(number, is_memory_limited)

    def _best(self, number: int, is_memory_limited: bool) -> list[Proposal]:
        heap, groups = self._of_sizes(), set[tuple[int, ...]]()
        proposals: list[Proposal] = []
        while heap and len(proposals) < number:
            bound, _, choice, is_complete = heapq.heappop(heap)
            if is_complete:
                proposal = self.proposal(choice)
                if proposal.group not in groups:
                    groups.add(proposal.group)
                    proposals.append(proposal)
            elif choice.cp_comm is None and bound < (second := self.bound(choice)):
                heapq.heappush(heap, (second, next(self._order), choice, False))
            elif choice.cp_comm is None:
                for other in self._implementations(choice.sizes):
                    heapq.heappush(heap, self._node(other, is_complete=False))
            else:
                for saving in self.fitting(choice) if is_memory_limited else [choice.savings]:
                    heapq.heappush(heap, self._node(choice._replace(savings=saving), is_complete=True))
        return proposals

    def least_memory(self) -> Proposal | None:
        """The proposal that needs the least device memory; None if no sizes fit the model and the number of GPUs."""
        choices = (
            choice._replace(savings=saving)
            for node in self._of_sizes()
            for choice in self._implementations(node[2].sizes)
            for saving in self._savings
            if saving.recompute == "full"
        )
        best = min(choices, key=lambda choice: self._predicted.memory(choice).device, default=None)
        return None if best is None else self.proposal(best)

    def proposal(self, choice: Choice) -> Proposal:
        time, memory, usable = (
            self._predicted.time(choice),
            self._predicted.memory(choice),
            self._predicted.usable(choice),
        )
        config, layout = self._predicted.resolved(choice)
        if config.checkpoint.copies_state and not memory.host_copy:
            config = without_copies(config)
        return Proposal(choice=choice, config=config, layout=layout, time=time, memory=memory, usable=usable)

    def _of_sizes(self) -> list[Node]:
        if self._bounds is None:
            least_s = self.task.least_gpu_s / self.num_gpus
            sizes = candidates.sizes(self.task, self.num_gpus)
            choices = (Choice(size, None, self._savings[0]) for size in sizes)
            self._bounds = [(least_s * self._turns(choice), next(self._order), choice, False) for choice in choices]
            heapq.heapify(self._bounds)
        return list(self._bounds)

    def _implementations(self, sizes: Sizes) -> Iterator[Choice]:
        """The choices of cp_comm and of shards for these sizes, without savings."""
        shards = list(candidates.shards(self.task, self._shard_kinds, sizes, self.num_gpus))
        for cp_comm in candidates.cp_comms(self.task, sizes, self.num_gpus):
            for own in shards:
                yield Choice(sizes, cp_comm, self._savings[0], own)

    def bound(self, choice: Choice) -> float:
        """The second bound, in seconds: no proposal with these sizes takes less."""
        time = self._predicted.time(choice)
        return time.step_s - self._turns(choice) * time.parts["cp"] - time.parts["dp"] - time.parts["optimizer"]

    def _turns(self, choice: Choice) -> float:
        """The factor by which the pipeline's bubble lengthens a step.

        pp 4, 8 microbatches -> 1 + 3/8        with 3 virtual stages -> 1 + 1/8
        """
        sizes, layout = choice.sizes, self._predicted.resolved(choice)[1]
        return 1 + (sizes.pp - 1) / sizes.virtual_stages / layout.num_microbatches

    def _node(self, choice: Choice, *, is_complete: bool) -> Node:
        return self._predicted.time(choice).step_s, next(self._order), choice, is_complete

    def fitting(self, choice: Choice) -> list[Savings]:
        """The savings with which the layout fits the device, and the ranks of a node fit its host.

        If the layout fits with some savings, savings that save at least as much are left out: they cannot be faster.
        """
        fitting: list[Savings] = []
        most = choice._replace(savings=self._savings[-1])
        usable = self._predicted.usable(most).bytes
        if self._predicted.memory(most).device > usable:  # rules out most layouts at once
            return fitting
        for saving in self._savings:
            cheapest = saving._replace(optim_offload_fraction=min(saving.optim_offload_fraction, 1 / PARTS))
            if not _is_slower(cheapest, fitting):
                own = self._predicted.least_offload(choice._replace(savings=saving))
                memory = self._predicted.memory(own)
                if (
                    memory.device <= usable
                    and self._predicted.fits_host(memory)
                    and not _is_slower(own.savings, fitting)
                ):
                    fitting.append(own.savings)
        return fitting


def _is_slower(saving: Savings, fitting: list[Savings]) -> bool:
    """Whether `saving` saves at least as much as one of `fitting`, so that it cannot be faster."""
    return any(candidates.saves_at_least(saving, less) for less in fitting)
