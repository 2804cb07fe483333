"""Predicts whether a recipe fits the memory of a GPU, and otherwise finds the cheapest change after which it fits.

The changes are tried in this order: other savings of memory on the same layout, other layouts on the same GPUs, changes
of the task or the GPUs (`cheapest.py`).  In the first two kinds, the cheapest change is the one with the shortest
predicted step, in the last kind the one with the fewest GPU seconds per token.
"""

from sft.config import Config, yaml
from sft.estimate.communicators import nccl_bytes
from sft.estimate.gpus import GIB, usable_memory
from sft.estimate.memory import estimate
from sft.estimate.step_time import StepTime, step_time
from sft.estimate.time import shown
from sft.parallel.layout import Layout
from sft.planner import candidates
from sft.planner.cheapest import changes
from sft.planner.search import Search
from sft.planner.task import Choice, CpComm, Proposal, Savings, Shards, Sizes, Task


def problem(task: Task, layout: Layout) -> str | None:
    """The reason why the recipe of `task` does not fit on this layout, and a change that fits; None if it fits."""
    hardware, config = task.hardware, task.config
    usable = usable_memory(hardware.gpu, nccl_bytes(config, layout))
    memory = estimate(config, layout, task.vocab_size, trained=task.trained, lengths=task.lengths)
    if memory.device <= usable.bytes:
        return None
    time = step_time(config, layout, task.vocab_size, task.lengths, hardware.constants, task.trained, task.products)
    largest = ", ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in memory.items().items() if num_bytes)
    return (
        f"the recipe does not fit {hardware.gpu.name}: a rank needs {memory.device / GIB:,.1f} GiB (predicted: "
        f"{largest}), and can use {usable.describe()}.  {_cheapest(task, layout, time)}"
    )


def _cheapest(task: Task, layout: Layout, time: StepTime) -> str:
    before, search = f"instead of {shown(time.step_s)} s", Search(task, layout.world_size)
    if proposal := _with_savings(search, layout):
        return f"The cheapest change that fits is {_difference(task.config, proposal)}: {_numbers(proposal)} {before}."
    if proposals := search.best(1):
        best = proposals[0]
        return f"The cheapest layout that fits is {_difference(task.config, best)}: {_numbers(best)} {before}."
    if other := changes(task, layout.world_size):
        change = other[0]
        return (
            f"No layout of {layout.world_size} GPUs fits.  The cheapest change that fits is {change.setting} with "
            f"{_difference(change.task.config, change.proposal)}: {_numbers(change.proposal)}."
        )
    return f"No layout of {layout.world_size} GPUs fits, and no single change makes one fit."


def _numbers(proposal: Proposal) -> str:
    return f"{proposal.memory.device / GIB:.1f} GiB and {shown(proposal.time.step_s)} s a step (predicted)"


def _with_savings(search: Search, layout: Layout) -> Proposal | None:
    """The fastest proposal with this layout and any savings that fits device and host; None: no savings suffice."""
    parallel = search.task.config.parallel
    sizes = Sizes(layout.tp, layout.cp, layout.pp, layout.virtual_stages, layout.ep, parallel.dynamic_cp)
    cp_comm = CpComm(parallel.cp_comm, parallel.cp_a2a)
    shards = candidates.shards(search.task, candidates.shard_kinds(search.task), sizes, layout.world_size)
    choices = [Choice(sizes, cp_comm, Savings(), own) for own in shards]
    fitting = [
        search.proposal(choice._replace(savings=saving)) for choice in choices for saving in search.fitting(choice)
    ]
    return min(fitting, key=lambda proposal: (proposal.time.step_s, _num_savings(proposal)), default=None)


def _num_savings(proposal: Proposal) -> int:
    """The number of savings and shard settings that differ from the default."""
    chosen = (*proposal.choice.savings, *proposal.choice.shards)
    return sum(value != default for value, default in zip(chosen, (*Savings(), *Shards())))


def _difference(before: Config, proposal: Proposal) -> str:
    """The settings in which the proposal differs from `before`: `train.recompute=full train.mlp_tile=8192`."""
    after = proposal.config
    sections = ("parallel", "data", "train", "optim", "loss", "checkpoint")
    changed = [
        f"{name}.{key}={yaml.write(value)}"
        for name in sections
        for key, value in getattr(after, name)
        if value != getattr(getattr(before, name), key)
    ]
    return " ".join(changed)
