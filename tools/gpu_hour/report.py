"""Writes a JSON and a Markdown report of all results in a folder, also while steps are missing or one is running.

report.json   machine, bars, steps with all their rows
report.md     the same results for people: bars, then how each step ended, then the tables that the steps printed
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft.files.atomic_files import replace_text
from tools.bench.harness import Bar, Row, number
from tools.gpu_hour import bars
from tools.gpu_hour.bars import Outcome
from tools.gpu_hour.runner import before_torchrun
from tools.gpu_hour.step import OUTPUT, ROWS, Result, Setting, Step
from tools.gpu_hour.steps import JUNIT

JSON, MARKDOWN = "report.json", "report.md"
LAST_LINES = 6  # number of lines that the report shows of a step that printed no table
TINY = (
    "**Toy sizes (`--tiny`): this report shows that the commands run and how a report reads.  Its numbers say nothing "
    "about a GPU.**"
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a run.

    machine  the facts that tools/gpu_hour/machine.py measures
    results  name of a step -> its result, for the steps that have ended
    """

    steps: Sequence[Step]
    setting: Setting
    machine: Mapping[str, Any]
    results: Mapping[str, Result]

    def write(self, running: str = "") -> list[Bar]:
        """Replaces both files, and returns the bars.  running: the name of the step that runs now, or empty"""
        outcomes = {step.name: self._outcome(step.name) for step in self.steps}
        groups = bars.judged(outcomes, tiny=self.setting.tiny)
        content = {
            "tiny": self.setting.tiny,
            "gpus": self.setting.gpus,
            "machine": self.machine,
            "bars": [
                {"group": title, **asdict(bar), "verdict": bar.verdict} for title, group in groups for bar in group
            ],
            "steps": [
                {
                    "name": step.name,
                    "question": step.question,
                    "limit_s": step.limit_s,
                    **(asdict(self.results[step.name]) if step.name in self.results else {"status": "not ended"}),
                    "rows": outcomes[step.name].rows,
                }
                for step in self.steps
            ],
        }
        out = self.setting.out
        replace_text(out / JSON, json.dumps(content, indent=1) + "\n")
        replace_text(out / MARKDOWN, "\n".join(self._markdown(groups, running)) + "\n")
        return [bar for _, group in groups for bar in group]

    def _outcome(self, name: str) -> Outcome:
        """The outcome of a step from its files, whether it has ended or not."""
        folder = self.setting.folder(name)
        return Outcome(result=self.results.get(name), rows=list(_rows(folder / ROWS)), tests=_text(folder / JUNIT))

    def _markdown(self, groups: Sequence[tuple[str, Sequence[Bar]]], running: str) -> Iterator[str]:
        verdicts = Counter(bar.verdict for _, group in groups for bar in group)
        ended = Counter(self.results[step.name].status for step in self.steps if step.name in self.results)
        to_come = len(self.steps) - ended.total()
        machine = self.machine
        yield "# GPU hour\n"
        if self.setting.tiny:
            yield f"{TINY}\n"
        gpus = f"{self.setting.gpus} x {machine['device']}" if machine["num_gpus"] else machine["device"]
        yield f"{machine['date']}, commit {machine['commit']} (code {machine['source']}), {gpus}"
        yield ", ".join(f"{name} {version}" for name, version in machine["versions"].items()) + "\n"
        yield f"- Bars: {', '.join(f'{verdicts[key]} {key}' for key in ('met', 'MISSED', 'not measured'))}."
        yield f"- Steps: {', '.join(f'{count} {status}' for status, count in ended.items())}, {to_come} to come.\n"
        yield "## Bars\n"
        yield "| verdict | bar | measured | bound |\n|---|---|---:|---:|"
        for title, group in groups:
            yield f"| | **{title}** | | |"
            for bar in group:
                value = "" if bar.value is None else number(bar.value)
                yield f"| {bar.verdict} | {bar.name} | {value} | {bar.relation} {number(bar.bound)} |"
        yield "\n## Steps\n"
        yield "| step | question | result | seconds | limit |\n|---|---|---|---:|---:|"
        yield from (self._line(step, running) for step in self.steps)
        for step in self.steps:
            if printed := list(excerpt(_text(self.setting.folder(step.name) / OUTPUT))):
                yield from (f"\n## {step.name}\n", *printed)

    def _line(self, step: Step, running: str) -> str:
        result, text, seconds = self.results.get(step.name), "running" if step.name == running else "not begun", ""
        if result:
            text = ": ".join(filter(None, [result.status, result.reason.replace("|", "/")]))
            seconds = f"{result.seconds:.0f}"
        return f"| {step.name} | {step.question} | {text} | {seconds} | {step.limit_s} |"


def excerpt(output: str) -> Iterator[str]:
    """The tables that a step printed, or its last lines if it printed none."""
    lines = before_torchrun(output)
    tables = [line for line in lines if line.startswith("|")]
    for line, below in zip(tables, [*tables[1:], ""]):
        if below.startswith("|--") and line is not tables[0]:  # `line` is the head of another table
            yield ""
        yield line
    last = [line for line in lines if line.strip() and not line.startswith("$ ")][-LAST_LINES:]
    if last and not tables:
        yield from ("```text", *(line[:200] for line in last), "```")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _rows(path: Path) -> Iterator[Row]:
    """The rows of a file: one per line, or a single row that fills the file.  Omits a last line that a kill cut."""
    text = _text(path)
    with suppress(json.JSONDecodeError):
        if text.startswith("{\n"):
            yield json.loads(text)
        else:
            yield from map(json.loads, text.splitlines())
