"""The results of compilations, as lines of a terminal and as docs/numbers/kernels.md."""

import datetime
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.kernels.compile_one import Compiled
from tests.kernels.cubins import Usage
from tools import page_text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "numbers" / "kernels.md"
BEGIN, END = "<!-- made by make test-kernels -->\n", "<!-- end of kernels -->\n"
_PASSES = ("forward", "backward")
TRITON = ("loss head", "linear attention")


class Result(NamedTuple):
    """One compilation.

    problem  why it failed; "" if it did not
    seconds  of the whole process, with imports
    """

    kind: str
    text: str
    architecture: str
    found: Sequence[Compiled]
    problem: str
    seconds: float

    @property
    def line(self) -> str:
        verdict = f"FAILED: {self.problem}" if self.problem else f"{len(self.found)} kernels, {self._worst()}"
        if self.kind == "refused" and not self.problem:
            verdict = f"still refused: {self.found[0].kernel[:100]}"
        return f"{self.architecture}  {self.kind}, {self.text}: {verdict}, {self.seconds:.0f} s"

    def _worst(self) -> str:
        registers, spilled = (max(x.usage[column] for x in self.found) for column in (0, 1))
        return f"at most {registers} registers, {spilled} bytes spilled"


def read(rows: Sequence[Any]) -> list[Compiled]:
    """The JSON of compile_one.py -> what it compiled."""
    return [Compiled(step, kernel, Usage(*used), variants, seconds) for step, kernel, used, variants, seconds in rows]


def load(file: Path) -> list[Result]:
    rows = json.loads(file.read_text()) if file.exists() else []
    return [Result(*row[:3], read(row[3]), *row[4:]) for row in rows]


def store(file: Path, results: Sequence[Result]) -> None:
    """Adds the results to those in the file.  They replace results of the same configurations."""
    known = {result[:3]: result for result in [*load(file), *results]}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps([*known.values()]))


def _kib(size: int) -> str:
    return f"{size / 1024:.0f}"


def _attention(results: Sequence[Result]) -> Iterator[str]:
    """One line for each configuration; pairs are forward / backward, of the kernel that takes most."""
    yield "| kernel | layers | GPU | seconds | registers | spilled | shared KiB |"
    yield "|---|---|---|---|---|---|---|"
    for result in results:
        of_pass = [[x for x in result.found if x.step == step] for step in _PASSES]
        cells = (
            " / ".join(f"{sum(x.seconds for x in found):.0f}" for found in of_pass),
            *(
                " / ".join(shown(max(x.usage[column] for x in found)) for found in of_pass)
                for column, shown in enumerate((str, str, _kib))
            ),
        )
        yield f"| {result.kind} | {result.text} | {result.architecture} | {' | '.join(cells)} |"


def _triton(results: Sequence[Result]) -> Iterator[str]:
    """One line for each kernel: the least and the most over the configurations and passes in which it runs."""
    yield "| kernel | GPU | variants | seconds | registers | spilled | shared KiB |"
    yield "|---|---|---|---|---|---|---|"
    for architecture in dict.fromkeys(result.architecture for result in results):
        found = [x for result in results if result.architecture == architecture for x in result.found]
        for name in sorted({x.kernel for x in found}):
            rows = [x for x in found if x.kernel == name]
            cells = (
                str(sum(x.variants for x in rows)),
                f"{sum(x.seconds for x in rows):.0f}",
                _range([x.usage.registers for x in rows], str),
                _range([x.usage.spilled for x in rows], str),
                _range([x.usage.shared for x in rows], _kib),
            )
            yield f"| `{name}` | {architecture} | {' | '.join(cells)} |"


def _range(values: Sequence[int], shown: Any) -> str:
    low, high = shown(min(values)), shown(max(values))
    return str(low) if low == high else f"{low} to {high}"


def write(results: Sequence[Result], order: Sequence[tuple[str, str, str]], versions: str, date: datetime.date) -> None:
    """Replaces the tables of the page.  order: the configurations of today; others are left out"""
    known = {result[:3]: result for result in results}
    results = [known[key] for key in order if key in known]
    triton = [result for result in results if result.kind in TRITON and result.found]
    refused = [result for result in results if result.kind == "refused" and result.found]
    attention = [result for result in results if result.kind not in (*TRITON, "refused") and result.found]
    failed = [result for result in results if result.problem]
    seconds = sum(result.seconds for result in results)
    summary = (
        f"{date}: {versions}. {len(results)} of {len(order)} compilations, {seconds / 60:.0f} minutes of one core, "
        f"{len(failed)} failed."
    )
    lines = [
        *("", *page_text.folded(summary), "", "## Attention", "", *_attention(attention), ""),
        *("## Still refused by the packages", "", "| layers | GPU | the package's words |", "|---|---|---|"),
        *(f"| {x.text} | {x.architecture} | {_cell(x.found[0].kernel)} |" for x in refused),
        *("", "## Linear attention and the loss head", "", *_triton(triton), ""),
    ]
    if failed:
        lines += ["## Failed", "", *(f"- {result.line}" for result in failed), ""]
    PAGE.write_text(page_text.replaced(PAGE.read_text(), BEGIN, END, "\n".join(lines)))


def _cell(words: str) -> str:
    """At most 40 columns, so that the line is not too long."""
    return words if len(words) <= 40 else f"{words[:37]}..."
