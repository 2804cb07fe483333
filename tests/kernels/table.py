"""Prints the results of compilations, as lines of a terminal and as docs/numbers/kernels.md."""

import datetime
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.kernels.changed import LINEAR, LOSS, REFUSED
from tests.kernels.cubins import Compiled, Usage
from tools import page_text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "numbers" / "kernels.md"
BEGIN, END = "<!-- made by make test-kernels -->\n", "<!-- end of kernels -->\n"
_PASSES = ("forward", "backward")
_HEADS = re.compile(r", (\d+) heads a key")
TRITON = (LOSS, LINEAR)
Key = tuple[str, str, str]  # kind, text and architecture of a result


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
        if self.kind == REFUSED and not self.problem:
            verdict = f"still refused: {self.found[0].kernel[:100]}"
        return f"{self.architecture}  {self.kind}, {self.text}: {verdict}, {self.seconds:.0f} s"

    def _worst(self) -> str:
        registers, spilled = (max(x.usage[column] for x in self.found) for column in (0, 1))
        return f"at most {registers} registers, {spilled} bytes spilled"


def read(rows: Sequence[Any]) -> list[Compiled]:
    """The JSON of compile_one.py -> what it compiled."""
    return [Compiled(step, kernel, Usage(*used), variants, seconds) for step, kernel, used, variants, seconds in rows]


class Stored(NamedTuple):
    """The content of a file of results.

    versions  of Python and of the packages that compiled them
    """

    versions: str
    results: Sequence[Result]


def load(file: Path) -> Stored:
    if not file.exists():
        return Stored("", [])
    versions, rows = json.loads(file.read_text())
    return Stored(versions, [Result(*row[:3], read(row[3]), *row[4:]) for row in rows])


def store(file: Path, new: Stored) -> None:
    """Adds the results to those in the file.  They replace results of the same configurations; results of other
    versions are removed."""
    old = load(file)
    kept = old.results if old.versions == new.versions else []
    known = {result[:3]: result for result in [*kept, *new.results]}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(Stored(new.versions, [*known.values()])))


def _kib(size: int) -> str:
    return f"{size / 1024:.0f}"


def _attention(results: Sequence[Result]) -> Iterator[str]:
    """A line for each kind of layers whose kernel spills, without the number of heads, and a list of all others.

    Pairs are forward / backward, of the kernel that takes most.  Layers that take the same share a line, which has the
    longest compilations.
    """
    groups: dict[tuple[str, ...], list[tuple[int, list[float]]]] = defaultdict(list)
    others: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for result in results:
        of_pass = [[x for x in result.found if x.step == step] for step in _PASSES]
        used = (
            " / ".join(shown(max(x.usage[column] for x in found)) for found in of_pass)
            for column, shown in enumerate((str, str, _kib))
        )
        heads = _HEADS.search(result.text)
        layers = _HEADS.sub("", result.text)
        if any(x.usage.spilled for x in result.found):
            seconds = [sum(x.seconds for x in found) for found in of_pass]
            groups[result.kind, layers, result.architecture, *used].append((int(heads[1]) if heads else 0, seconds))
        else:
            others[result.kind, result.architecture][layers] = None
    yield "| kernel | layers | query heads of a key head | GPU | seconds | registers | spilled | shared KiB |"
    yield "|---|---|---|---|---|---|---|---|"
    for (kernel, layers, architecture, *cells), rows in groups.items():
        shared = ", ".join(str(number) for number in sorted({number for number, _ in rows}) if number)
        longest = " / ".join(f"{max(times):.0f}" for times in zip(*(times for _, times in rows), strict=True))
        yield f"| {kernel} | {layers} | {shared} | {architecture} | {longest} | {' | '.join(cells)} |"
    yield ""
    yield "These spill nothing:"
    yield ""
    for (kernel, architecture), names in others.items():
        yield from page_text.folded(f"- {kernel}, {architecture}: {'; '.join(names)}")


def _triton(results: Sequence[Result]) -> Iterator[str]:
    """A line for each kernel that spills, with the least and the most over the configurations and passes in which it
    runs, and a list of all others."""
    yield "| kernel | GPU | variants | seconds | registers | spilled | shared KiB |"
    yield "|---|---|---|---|---|---|---|"
    others: dict[str, dict[str, None]] = defaultdict(dict)
    for architecture in dict.fromkeys(result.architecture for result in results):
        found = [x for result in results if result.architecture == architecture for x in result.found]
        for name in sorted({x.kernel for x in found}):
            rows = [x for x in found if x.kernel == name]
            if not any(x.usage.spilled for x in rows):
                others[name][architecture] = None
                continue
            cells = (
                str(sum(x.variants for x in rows)),
                f"{sum(x.seconds for x in rows):.0f}",
                _range([x.usage.registers for x in rows], str),
                _range([x.usage.spilled for x in rows], str),
                _range([x.usage.shared for x in rows], _kib),
            )
            yield f"| `{name}` | {architecture} | {' | '.join(cells)} |"
    yield ""
    yield "These spill nothing:"
    yield ""
    alike: dict[str, list[str]] = defaultdict(list)
    for name, architectures in others.items():
        alike[", ".join(architectures)].append(f"`{name}`")
    for text, names in alike.items():
        yield from page_text.folded(f"- {text}: {', '.join(names)}")


def _range(values: Sequence[int], shown: Any) -> str:
    low, high = shown(min(values)), shown(max(values))
    return str(low) if low == high else f"{low} to {high}"


def _differences(results: Sequence[Result], pinned: Sequence[Result]) -> list[str]:
    """The passes for which two sets of packages differ in registers, spilled bytes or shared memory.

    Layers that differ in the number of heads alone share a line.
    """
    other = {result[:3]: result for result in pinned if result.found}
    lines = dict[str, None]()
    for result in results:
        for step in _PASSES:
            own, theirs = (_most(x.found, step) for x in (result, other.get(result[:3], result)))
            pairs = [(x, y) for x, y in zip(theirs, own, strict=True) if x != y]
            if pairs:
                what = f"{result.kind}, {_HEADS.sub('', result.text)}, {result.architecture}, {step}"
                numbers = (", ".join(column) for column in zip(*pairs, strict=True))
                lines[f"- {what}: {'; above '.join(numbers)}"] = None
    return [line for text in lines for line in page_text.folded(text)]


def _most(found: Sequence[Compiled], step: str) -> tuple[str, str, str]:
    used = [x.usage for x in found if x.step == step]
    registers, spilled, shared = (max((x[column] for x in used), default=0) for column in range(3))
    return f"{registers} registers", f"{spilled} bytes spilled", f"{_kib(shared)} KiB shared"


def _refused(results: Sequence[Result], reasons: Mapping[Key, str]) -> Iterator[str]:
    for x in results:
        yield from page_text.folded(f"- {x.text}, {x.architecture}: {reasons[x[:3]]}")


def write(
    stored: Stored,
    pinned: Stored,
    order: Mapping[Key, str],
    without: Sequence[str],
    date: datetime.date,
) -> None:
    """Replaces the tables of the page.

    order    the configurations of today; others are left out.  For one that must be refused, our code's reason
    without  lines about layers that no package computes
    """
    results, again = (_today(x, order) for x in (stored, pinned))
    triton = [result for result in results if result.kind in TRITON and result.found]
    refused = [result for result in results if result.kind == REFUSED and result.found]
    attention = [result for result in results if result.kind not in (*TRITON, REFUSED) and result.found]
    lines = [
        *(
            "",
            *_summary(stored.versions, results, order, date),
            *_missing(results, order),
            "",
        ),
        *("## Attention", "", *_attention(attention), ""),
        *(
            "## Layers without these kernels",
            "",
            *(x for line in without for x in page_text.folded(line)),
            "",
        ),
        *("## Still refused by the packages", "", *_refused(refused, order), ""),
        *("## Linear attention and the loss head", "", *_triton(triton), ""),
    ]
    if again:
        wanted = [key for key in order if key[0] not in TRITON]
        lines += [
            *(
                "## With the packages that ffpa-attn pins",
                "",
                *_summary(pinned.versions, again, wanted, date),
                "",
            ),
            *(_differences(attention, again) or ["Registers, spilled bytes and shared memory are those above."]),
            "",
        ]
    if failed := [result for result in [*results, *again] if result.problem]:
        lines += ["## Failed", "", *(f"- {result.line}" for result in failed), ""]
    PAGE.write_text(page_text.replaced(PAGE.read_text(), BEGIN, END, "\n".join(lines)))


def _missing(results: Sequence[Result], order: Collection[Key]) -> Iterator[str]:
    """A line with the configurations that have no result; nothing if all have one."""
    done, lacking = {result[:3] for result in results}, defaultdict[tuple[str, str], list[str]](list)
    for kind, text, architecture in order:
        if (kind, text, architecture) not in done:
            lacking[architecture, kind].append(text)
    if lacking:
        texts = (f"{architecture}, {kind}: {'; '.join(names)}" for (architecture, kind), names in lacking.items())
        yield from ("", *page_text.folded(f"Not compiled yet: {'. '.join(texts)}."))


def _today(stored: Stored, order: Collection[Key]) -> list[Result]:
    known = {result[:3]: result for result in stored.results}
    return [known[key] for key in order if key in known]


def _summary(
    versions: str,
    results: Sequence[Result],
    order: Collection[Key],
    date: datetime.date,
) -> list[str]:
    seconds, failed = sum(result.seconds for result in results), sum(bool(result.problem) for result in results)
    return page_text.folded(
        f"{date}: {versions}. {len(results)} of {len(order)} compilations, {seconds / 60:.0f} minutes of one core, "
        f"{failed} failed."
    )
