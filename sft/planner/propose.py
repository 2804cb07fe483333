"""Plans one task on one number of GPUs, and collects all parts of the report."""

from sft.planner.cheapest import changes
from sft.planner.reasons import reasons
from sft.planner.report import Report
from sft.planner.search import Search
from sft.planner.task import Task


def propose(task: Task, num_gpus: int, number: int = 5) -> Report:
    """The report with the `number` best proposals and the reasons; if none fits, with changes that fit."""
    search = Search(task, num_gpus)
    proposals = search.best(number)
    if not proposals:
        return Report(
            task=task, num_gpus=num_gpus, proposals=(), changes=changes(task, num_gpus), least=search.least_memory()
        )
    return Report(task=task, num_gpus=num_gpus, proposals=proposals, reasons=reasons(search, proposals))
