"""The results of compilations, as lines of a terminal and as docs/numbers/kernels.md."""

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.kernels.compile_one import Compiled
from tests.kernels.cubins import Usage
from tools import page_text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "numbers" / "kernels.md"
BEGIN, END = "<!-- made by make test-kernels -->\n", "<!-- end of kernels -->\n"
_PASSES = ("forward", "backward")


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
        return f"at most {max(x.usage.registers for x in self.found)} registers, {max(x.usage.spilled for x in self.found)} bytes spilled"


def read(rows: Sequence[Any]) -> list[Compiled]:
    """The JSON of compile_one.py -> what it compiled."""
    return [
        Compiled(step, kernel, Usage(*used), variants, seconds) for step, kernel, used, variants, seconds in rows
    ]


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


def write(results: Sequence[Result], minutes: float, jobs: int, versions: str, date: datetime.date) -> None:
    """Replaces the tables of the page."""
    by_kind = {kind: [x for x in results if x.kind == kind] for kind in dict.fromkeys(x.kind for x in results)}
    triton = [*by_kind.pop("loss head", []), *by_kind.pop("linear attention", [])]
    refused = by_kind.pop("refused", [])
    failed = [result for result in results if result.problem]
    lines = [
        "",
        *page_text.folded(
            f"{date}: {versions}. {len(results)} compilations in {minutes:.0f} minutes with {jobs} processes on two "
            f"cores, {len(failed)} failed."
        ),
        "",
        "## Attention",
        "",
        *_attention([result for kind in by_kind.values() for result in kind if result.found]),
        "",
        "## Still refused by the packages",
        "",
        "| layers | GPU | the package's words |",
        "|---|---|---|",
        *(f"| {x.text} | {x.architecture} | {x.found[0].kernel[:60].replace('|', ' ')} |" for x in refused if x.found),
        "",
        "## Linear attention and the loss head",
        "",
        *_triton([result for result in triton if result.found]),
        "",
    ]
    if failed:
        lines += ["## Failed", "", *(f"- {result.line}" for result in failed), ""]
    PAGE.write_text(page_text.replaced(PAGE.read_text(), BEGIN, END, "\n".join(lines)))
