"""Indexes the runs of a rendering, so that the texts of each message are found quickly.  A run is a piece of the
rendering that has one source (`template/rendering.py`).

Decides which texts of an assistant's message are its own, i.e. written by the assistant, and which belong to a header.
`turns.py` and `headers.py` find turns with the index, `habits.py` learns from it, `tokens.py` asks it whether the
template wrote a control token, and `omitted.py` finds texts that are not in the rendering.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from json import dumps

from sft.data.template.rendering import Rendering, Run, is_of_template
from sft.data.template.sources import Field, Unknown

_Path = tuple[int | None, str, tuple[str | int, ...]]  # message, role and path of a field

# Keys of an assistant's message whose texts the assistant did not write: text of headers, and results of Gemma's calls.
_HEADER = frozenset({"role", "name"})
_NOT_OWN = _HEADER | {"tool_responses", "tool_call_id"}
_TAGS = re.compile(r"</?think>")


class Reading:
    """A rendering with indexes.

    marks    the runs whose source is a field or unknown, in the order of the text, without roles and names in headers
    own      for each assistant's message, the indices in `marks` of its own texts
    unknown  the runs without a source that contain more than spaces
    """

    def __init__(self, rendering: Rendering, fields: Sequence[Field] = ()) -> None:
        self.text, self.runs, self.fields = rendering.text, rendering.runs, fields
        self.marks: list[Run] = []
        self.own: dict[int, list[int]] = {}
        for run in self.runs:
            source = run.source
            if isinstance(source, Field):
                if source.message is not None and source.path[0] in _HEADER:
                    continue
                if is_own(run):
                    assert source.message is not None
                    self.own.setdefault(source.message, []).append(len(self.marks))
            elif not isinstance(source, Unknown) or not self.text[run.start : run.end].strip():
                continue
            self.marks.append(run)
        self.unknown = [run for run in self.marks if isinstance(run.source, Unknown)]
        self._starts = [run.start for run in self.runs]
        self._mark_starts = [run.start for run in self.marks]

    def over(self, start: int, end: int) -> list[Run]:
        """The runs that overlap text[start:end]."""
        return self.runs[bisect_right(self._starts, start) - 1 : bisect_left(self._starts, end)] if start < end else []

    def is_constant(self, start: int, end: int) -> bool:
        """Whether the template alone wrote text[start:end]."""
        return all(is_of_template(run.source) for run in self.over(start, end))

    def before(self, run: Run) -> Run | None:
        """The mark before a mark; None before the first."""
        position = bisect_left(self._mark_starts, run.start)
        return self.marks[position - 1] if position else None

    def after(self, run: Run) -> Run | None:
        """The mark after a mark; None after the last."""
        position = bisect_right(self._mark_starts, run.start)
        return self.marks[position] if position < len(self.marks) else None

    @property
    def after_all(self) -> str:
        """The template's text after the last mark; the whole text if there is no mark."""
        return self.text[self.marks[-1].end :] if self.marks else self.text

    @cached_property
    def unwritten(self) -> list[tuple[Field, list[tuple[int, int]]]]:
        """The fields of which the template leaves out text, each with the spans of its characters that are left out.

        Spaces do not count, nor do <think> and </think>, because templates write these tags themselves.
        """
        written: dict[Field, list[tuple[int, int]]] = {}
        containers: dict[_Path, str] = {}
        for run in self.runs:
            source = run.source
            if isinstance(source, Field):
                if source.is_container:
                    path = source.message, source.role, source.path
                    containers[path] = containers.get(path, "") + self.text[run.start : run.end]
                else:
                    written.setdefault(source, []).append((run.first, run.last))
        hidden = "\0".join(self.text[run.start : run.end] for run in self.unknown)
        missing = []
        for field in self.fields:
            if field.path == ("role",):  # the template has its own words for roles
                continue
            gaps = _gaps(field.text, written.get(field, ()))
            if not gaps or (hidden and field.text.strip() in hidden):
                continue
            paths = ((field.message, field.role, field.path[:n]) for n in range(len(field.path)))
            if not any(path in containers and _is_in(field, containers[path]) for path in paths):
                missing.append((field, gaps))
        return missing


def _is_in(field: Field, container: str) -> bool:
    """Whether `container` contains the field.  container: what the rendering has of the JSON of an object or list; a
    template may have cut it"""
    if container[:1] in ("{", "[") and container[-1:] in ("}", "]"):
        return True
    text = field.text
    return any(form[1:-1] in container for form in (dumps(text), dumps(text, ensure_ascii=False), repr(text)))


def _gaps(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of a text outside of `spans`, except parts that hold only spaces, <think> and </think>."""
    if len(spans) == 1 and spans[0] == (0, len(text)):
        return []
    gaps, at = [], 0
    for start, end in [*sorted(spans), (len(text), len(text))]:
        if start > at and _TAGS.sub("", text[at:start]).strip():
            gaps.append((at, start))
        at = max(at, end)
    return gaps


def is_own(run: Run) -> bool:
    """Whether the run is text that the assistant wrote, and the template wrote it while it handled this message."""
    source = run.source
    return (
        isinstance(source, Field)
        and source.role == "assistant"
        and source.path[0] not in _NOT_OWN
        and run.writer in (source.message, None)
    )


def is_text(field: Field, message: int) -> bool:
    """Whether a field is text of message `message` that the model should see.

    This includes the names of a call's arguments.  It excludes ids, types and the names of other keys.
    """
    path = field.path
    if field.message != message or path[0] in _NOT_OWN:
        return False
    if path[0] == "tool_calls":
        return path[-1] == "name" or "arguments" in path
    return path[-1] != "type" and not str(path[-1]).endswith("=")


def common_length(left: str, right: str) -> int:
    """The length of the longest common prefix of two texts."""
    same, end = 0, min(len(left), len(right))
    while same < end:  # left[:same] equals right[:same], and left[:end + 1] does not equal right[:end + 1]
        middle = (same + end + 1) // 2
        if left[same:middle] == right[same:middle]:
            same = middle
        else:
            end = middle - 1
    return same


def shared_length(left: str, right: str, control: re.Pattern[str]) -> int:
    """The length of the longest common prefix of two texts that does not end inside a control token."""
    at = common_length(left, right)
    return next((match.start() for match in control.finditer(left) if match.start() < at < match.end()), at)


def is_in(run: Run, others: Sequence[Run]) -> bool:
    """Whether one of `others` has the same characters of the same field."""
    return any(other.source is run.source and other.first <= run.first and run.last <= other.last for other in others)


@lru_cache(maxsize=1_000)
def _last_tokens(shown: str, control: re.Pattern[str]) -> list[int]:
    """The positions of the last two control tokens of a text, or of the only one."""
    return [match.start() for match in control.finditer(shown)][-2:]


def after_header_end(between: str, shown: str, control: re.Pattern[str]) -> int:
    """The position in `between` after the end of the prompt `shown`; 0 if `between` does not contain this end.

    The end of a prompt is its text from its second last control token on, or from its last one.  The text before these
    tokens may be instructions, which `between` need not contain.
    """
    for last in _last_tokens(shown, control):
        if shown[last:].strip() and (at := between.rfind(shown[last:])) >= 0:
            return at + len(shown) - last
    return 0


@lru_cache(maxsize=1_000)
def _ends_within(header: str, control: re.Pattern[str]) -> list[int]:
    """The positions inside a header at which lines and control tokens begin or end, falling."""
    ends = {at for match in control.finditer(header) for at in match.span()}
    ends |= {at + 1 for at, letter in enumerate(header) if letter == "\n"}
    return sorted(ends - {0, len(header)}, reverse=True)


def after_header(text: str, length: int, header: str, control: re.Pattern[str]) -> int:
    """The position after the last occurrence of the header in text[:length], or of the longest beginning of the header
    that ends at a boundary of a line or token; 0 if there is none.

    A complete header must only begin in text[:length]: its <think> may be the first word of a content.
    """
    if header.strip() and (at := text.rfind(header, 0, length + len(header) - 1)) >= 0:
        return at + len(header)
    for end in _ends_within(header, control):
        if header[:end].strip() and (at := text.rfind(header[:end], 0, length)) >= 0:
            return at + end
    return 0
