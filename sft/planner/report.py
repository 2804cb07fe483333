"""Plans one task on one number of GPUs, and formats the result as text and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sft.estimate import attention_kernels
from sft.estimate.gpus import GIB
from sft.planner.cheapest import Change, changes
from sft.planner.reasons import Reasons, counted, named, part_name, reasons
from sft.planner.search import Search
from sft.planner.task import Proposal, Task
from sft.planner.written import seconds

_SMALL = 0.005  # parts below this share of the step are not shown


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a search for one number of GPUs.

    proposals  the proposals, the best first; empty if no layout fits the memory
    reasons    None if no layout fits
    changes    changes after which a layout fits; only if no layout fits
    least      if no layout fits, the proposal that needs the least memory; None if no sizes fit the model
    """

    task: Task
    num_gpus: int
    proposals: Sequence[Proposal]
    reasons: Reasons | None = None
    changes: Sequence[Change] = ()
    least: Proposal | None = None

    @staticmethod
    def of(task: Task, num_gpus: int, number: int = 5) -> "Report":
        """The report with the `number` best proposals and reasons, or with changes after which a layout fits."""
        search = Search(task, num_gpus)
        if proposals := search.best(number):
            return Report(task=task, num_gpus=num_gpus, proposals=proposals, reasons=reasons(search, proposals))
        fitting, least = changes(task, num_gpus), search.least_memory()
        return Report(task=task, num_gpus=num_gpus, proposals=(), changes=fitting, least=least)

    def lines(self, now: datetime) -> dict[str, list[str]]:
        """The lines that `sft plan` prints, by the name of their group."""
        groups = {"predict": self._subject()}
        if not self.proposals:
            return groups | {"no fit": [*self._no_fit()]}
        best = self.proposals[0]
        groups |= {"layouts": [*table(self.proposals)], "memory": [memory_line(best), best.usable.describe()]}
        groups |= {"time": [time_line(best)], "run": self._run(best, now)}
        if self.reasons is not None:
            groups |= {"why": [*self.reasons.why], "limits": [*self.reasons.limits], "buys": [*self.reasons.buys]}
        return groups

    def _subject(self) -> list[str]:
        task, hardware, config = self.task, self.task.hardware, self.task.config
        nodes = hardware.nodes(self.num_gpus)
        where = "one node" if nodes == 1 else f"{nodes} nodes, network {hardware.fabric}"
        length, packs = config.data.seq_length, config.train.global_batch_size
        return [
            f"{task.name}, {'LoRA' if config.lora.is_used else 'all weights'}, on "
            f"{counted(self.num_gpus, 'GPU')} {hardware.gpu.name}, {where}",
            f"{counted(packs, 'pack')} of {length:,} tokens a step, with documents of {_lengths(task)}",
            f"predicted, not measured; {hardware.constants.describe()}",
            attention_kernels.describe(config, hardware.gpu.name),
        ]

    def _run(self, best: Proposal, now: datetime) -> list[str]:
        time = best.time
        per_billion = 1e9 / time.tokens_per_gpu_s / 3600
        lines = [
            f"{time.tokens_per_s:,.0f} tokens/s, {time.tokens_per_gpu_s:,.0f} for each GPU, {time.mfu:.1%} MFU; "
            f"{per_billion:,.0f} GPU hours for a billion tokens{self._cost(per_billion)}"
        ]
        if self.task.tokens is not None:
            length_s = self.task.tokens / time.tokens_per_s
            gpu_hours, end = length_s * self.num_gpus / 3600, now + timedelta(seconds=length_s)
            lines.append(
                f"{self.task.tokens:,.0f} tokens: {gpu_hours:,.0f} GPU hours{self._cost(gpu_hours)} in "
                f"{length_s / 3600:,.1f} h without saves and evaluation; a run that starts now ends "
                f"{end:%Y-%m-%d %H:%M}"
            )
        return lines

    def _cost(self, gpu_hours: float) -> str:
        """The cost in brackets, if the task has a price.  With 2.50: 84 GPU hours -> " (cost 210)" """
        return "" if self.task.price is None else f" (cost {gpu_hours * self.task.price:,.0f})"

    def _no_fit(self) -> Iterator[str]:
        least = self.least
        if least is None:
            packs = self.task.config.train.global_batch_size
            ranks = counted(self.num_gpus, "rank")
            yield f"no layout of this model and of {counted(packs, 'pack')} a step has {ranks}"
        else:
            host, most = least.host_bytes / GIB, self.task.hardware.host_bytes / GIB
            yield (
                f"the layout that needs the least memory, {named(least)}, needs {least.memory.device / GIB:.0f} of "
                f"{least.usable.bytes / GIB:.0f} usable GiB, and {host:,.0f} of {most:,.0f} GiB of a host"
            )
        for number, change in enumerate(self.changes):
            first = "the cheapest change that fits" if number == 0 else "also fits"
            needed = f"{change.proposal.memory.device / GIB:.0f} GiB"
            yield (
                f"{first}: {change.setting}, with {named(change.proposal)}: {needed}, {change.gpu_seconds:,.0f} GPU "
                "seconds for a million tokens"
            )

    def json(self) -> dict[str, Any]:
        """The report as one JSON object."""
        task, hardware = self.task, self.task.hardware
        return {
            "predicted": True,
            "model": task.name,
            "num_gpus": self.num_gpus,
            "gpu": hardware.gpu.name,
            "gpus_per_node": hardware.gpus_per_node,
            "fabric": hardware.fabric,
            "seq_length": task.config.data.seq_length,
            "global_batch_size": task.config.train.global_batch_size,
            "lora": task.config.lora.is_used,
            "constants": {name: value._asdict() for name, value in hardware.constants.items()},
            "attention_kernels": {
                kind: {"kernel": assumed.kernel, "rate": assumed.rate and assumed.rate._asdict()}
                for kind, assumed in attention_kernels.attention_kernels(task.config, hardware.gpu.name).items()
            },
            "proposals": [proposal_json(proposal, task) for proposal in self.proposals],
            "why": list(self.reasons.why) if self.reasons else [],
            "limits": list(self.reasons.limits) if self.reasons else [],
            "buys": list(self.reasons.buys) if self.reasons else [],
            "changes": [
                {"change": change.setting, **proposal_json(change.proposal, change.task)} for change in self.changes
            ],
        }


def _lengths(task: Task) -> str:
    tokens, is_without = task.lengths.tokens, task.config.data.turns == "each" and not task.lengths.trees
    without = ", without trees of turns (--lengths data knows them)" if is_without else ""
    if len(tokens) == 1:
        return f"{tokens[0]:,.0f} tokens{without}"
    mean = float(task.lengths.shares @ tokens)
    return f"{tokens.min():,.0f} to {tokens.max():,.0f} tokens, {mean:,.0f} on average{without}"


def table(proposals: Sequence[Proposal]) -> Iterator[str]:
    """A table with one line for each proposal."""
    yield "  GiB   s/step  tokens/s/GPU   MFU  layout"
    for proposal in proposals:
        time = proposal.time
        yield (
            f"{proposal.memory.device / GIB:5.1f} {time.step_s:8.2f} {time.tokens_per_gpu_s:13,.0f} {time.mfu:5.1%}  "
            f"{named(proposal)}"
        )


def memory_line(proposal: Proposal) -> str:
    """The predicted memory: `56.2 GiB = weights 3.8 + gradients 7.6 + ...`, without items below 0.05 GiB."""
    items = ((name, value / GIB) for name, value in proposal.memory.items().items())
    shown = " + ".join(f"{name} {value:.1f}" for name, value in items if value >= 0.05)
    of_node = proposal.host_bytes / GIB
    host = f"; host {proposal.memory.host / GIB:.1f} GiB a rank, {of_node:,.0f} a node" if of_node else ""
    return f"{proposal.memory.device / GIB:.1f} GiB a rank = {shown}{host}"


def time_line(proposal: Proposal) -> str:
    """The predicted time: `21.8 s a step = linear 11.2 + attention 8.1 + ...`, without parts below 0.5%."""
    time = proposal.time
    parts = sorted(time.parts.items(), key=lambda item: -item[1])
    shown = [(part_name(name), value) for name, value in parts if value >= _SMALL * time.step_s]
    rest = time.step_s - sum(value for _, value in shown)
    words = [f"{name} {value:.2f}" for name, value in shown] + ([f"others {rest:.2f}"] if rest >= 0.005 else [])
    return f"{seconds(time.step_s)} a step = {' + '.join(words)}"


def proposal_json(proposal: Proposal, task: Task) -> dict[str, Any]:
    time, layout = proposal.time, proposal.layout
    gpu_hours = None if task.tokens is None else task.tokens / time.tokens_per_gpu_s / 3600
    return {
        "layout": layout.sizes | {"virtual_stages": layout.virtual_stages},
        "settings": proposal.settings,
        "memory_bytes": proposal.memory.items(),
        "device_bytes": proposal.memory.device,
        "usable_bytes": proposal.usable.bytes,
        "host_bytes_of_rank": proposal.memory.host,
        "parts_s": time.parts,
        "step_s": time.step_s,
        "tokens_per_s": time.tokens_per_s,
        "tokens_per_s_per_gpu": time.tokens_per_gpu_s,
        "mfu": time.mfu,
        "gpu_hours": gpu_hours,
        "cost": None if gpu_hours is None or task.price is None else gpu_hours * task.price,
        "hours": None if task.tokens is None else task.tokens / time.tokens_per_s / 3600,
    }
