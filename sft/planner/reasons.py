"""Explains why the best proposal is the best, what limits it, and what more GPUs would change, all by predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sft.estimate.gpus import GIB
from sft.planner.search import Search
from sft.planner.task import Proposal, Task

SAME = 0.02  # predicted times that differ by less cannot be distinguished
_MESSAGES = ("tp", "cp", "ep", "pp", "dp")
_SHOWN = 0.005  # parts whose difference is a smaller share of the step are not named


@dataclass(frozen=True, kw_only=True)
class Reasons:
    """Sentences without a full stop.

    why     why the best proposal is faster than the second one
    limits  which parts of a step, and whether memory and the batch, limit the speed
    buys    what more GPUs would give
    """

    why: Sequence[str]
    limits: Sequence[str]
    buys: Sequence[str]


def reasons(search: Search, proposals: Sequence[Proposal]) -> Reasons:
    """The reasons for the first proposal.  proposals: at least one, found by `search`, the best first"""
    best = proposals[0]
    return Reasons(why=_why(proposals), limits=_limits(search, best), buys=_buys(search, best))


def named(proposal: Proposal) -> str:
    """A short name of the proposal: `tp 4, cp 2, dp 8, recompute selective`."""
    sizes = {"tp": proposal.layout.tp, "cp": proposal.layout.cp, "pp": proposal.layout.pp, "dp": proposal.layout.dp}
    sizes |= {"ep": proposal.layout.ep}
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["one GPU"]
    hidden = {f"parallel.{name}" for name in (*sizes, "cp_a2a")} | {"data.doc_multiple"}
    return ", ".join([*words, *(_setting(proposal, key) for key in proposal.settings if key not in hidden)])


def counted(number: int, word: str) -> str:
    """The number with its noun, singular or plural: `1 GPU`, `8 GPUs`."""
    return f"{number:,} {word}{'s' * (number != 1)}"


def _setting(proposal: Proposal, key: str) -> str:
    value = proposal.settings[key]
    if key == "parallel.cp_comm" and "parallel.cp_a2a" in proposal.settings:
        return f"cp_comm {value} with cp_a2a {proposal.settings['parallel.cp_a2a']}"
    if key == "optim.offload_fraction" and value < 1:
        return f"{value:g} of the optimizer offloaded"
    words = {
        "train.offload_fraction": "activations offloaded",
        "optim.offload_fraction": "optimizer offloaded",
        "parallel.dynamic_cp": "dynamic CP",
        "checkpoint.async_save": "training waits for saves",
    }
    return words.get(key) or f"{key.rpartition('.')[2].replace('_', ' ')} {value}"


def _why(proposals: Sequence[Proposal]) -> list[str]:
    if len(proposals) == 1:
        return ["no other layout is predicted to fit"]
    best, second = proposals[:2]
    less = second.time.step_s - best.time.step_s
    share = less / second.time.step_s
    lines = [f"{less:.2g} s ({share:.1%}) faster a step than {named(second)}: {_differences(best, second)}"]
    if share < SAME:
        memories = " and ".join(f"{proposal.memory.device / GIB:.0f}" for proposal in (best, second))
        lines.append(f"times that differ by less than {SAME:.0%} cannot be distinguished; both need {memories} GiB")
    return lines


def _differences(best: Proposal, second: Proposal) -> str:
    """The parts of a step in which two proposals differ: `0.31 s less linear, 0.12 s less cp, but 0.2 s more tp`."""
    more = {name: second.time.parts[name] - best.time.parts[name] for name in best.time.parts}
    step = second.time.step_s
    ordered = sorted((name for name in more if abs(more[name]) > _SHOWN * step), key=lambda name: -abs(more[name]))
    less = [f"{more[name]:.2g} s less {part_name(name)}" for name in ordered if more[name] > 0]
    worse = [f"{-more[name]:.2g} s more {part_name(name)}" for name in ordered if more[name] < 0]
    return ", but ".join(", ".join(words) for words in (less, worse) if words) or "no part differs much"


def part_name(name: str) -> str:
    """The name of a part of a step: linear -> linear, cp -> exposed cp."""
    return f"exposed {name}" if name in _MESSAGES else name


def _shares(parts: Mapping[str, float]) -> str:
    """The three largest parts: `linear 52%, attention 31%, recompute 9%`."""
    total = sum(parts.values())
    largest = sorted(parts, key=lambda name: -parts[name])[:3]
    return ", ".join(f"{part_name(name)} {parts[name] / total:.0%}" for name in largest)


def _limits(search: Search, best: Proposal) -> list[str]:
    lines = [f"time: {_shares(best.time.parts)} of the step"]
    free = search.best(1, is_memory_limited=False)[0]
    if free.time.step_s < best.time.step_s * (1 - SAME):
        lines.append(
            f"memory: {named(free)} would take {1 - free.time.step_s / best.time.step_s:.0%} less, but needs "
            f"{free.memory.device / GIB:.0f} of {free.usable.bytes / GIB:.0f} usable GiB"
        )
    else:
        lines.append("memory does not: with any amount, no layout is predicted to be faster")
    batch = search.task.with_packs(2 * search.task.config.train.global_batch_size)
    if larger := Search(batch, search.num_gpus).best(1):
        gain = larger[0].time.tokens_per_s / best.time.tokens_per_s - 1
        packs = search.task.config.train.global_batch_size
        if gain > SAME:
            lines.append(
                f"the batch: {counted(2 * packs, 'pack')} a step instead of {packs} give {gain:.0%} more tokens/s"
            )
    return lines


def next_counts(task: Task, num_gpus: int) -> list[int]:
    """The numbers of GPUs to compare: one node more, and twice as many; within a node only twice as many.

    8 GPUs, nodes of 8 -> [16]        64 -> [72, 128]        2 -> [4]
    """
    node = task.hardware.gpus_per_node
    return sorted({num_gpus + node, 2 * num_gpus} if num_gpus >= node else {2 * num_gpus})


def _buys(search: Search, best: Proposal) -> list[str]:
    lines = []
    for count in next_counts(search.task, search.num_gpus):
        proposals = Search(search.task, count).best(1)
        if not proposals:
            packs = counted(search.task.config.train.global_batch_size, "pack")
            lines.append(f"{count} GPUs: no layout of {packs} a step fits")
            continue
        proposal = proposals[0]
        gain = proposal.time.tokens_per_s / best.time.tokens_per_s
        cost = best.time.tokens_per_gpu_s / proposal.time.tokens_per_gpu_s - 1
        hours = f"{abs(cost):.0%} {'more' if cost > 0 else 'fewer'} GPU hours"
        lines.append(f"{count} GPUs: {gain:.2f} times the tokens/s with {named(proposal)}, for {hours}")
    return lines
