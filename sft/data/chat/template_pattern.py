"""Learns from renderings how a template writes chats: the form of each text, and the fillers between texts.

    user/content/ -> assistant/content/    <|im_end|>\\n<|im_start|>assistant

A text is a string that the model should see: the content of a message, its reasoning (a key of its own, or at the start
of the content), the name or an argument of a tool call, a tool result, or the name or description of a tool or of a
parameter.  Ids, names of speakers and other keys of a message are not texts.  A filler is the template's own text
between two texts.  If a rendering consists only of texts and known fillers, the template left out every text that the
rendering lacks.  Otherwise the omitted texts are unknown.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sft.data.chat.messages import THINKING, THOUGHT, Message, Tools

BY_LEAF = 3  # the form in which a template writes names and values of arguments one by one
_PLAIN = {"role", "content", *THINKING}
_KNOWN = _PLAIN | {"tool_calls"}
_ROLES = ("system", "user", "assistant")
_CONTENT = {role: f"{role}/content/" for role in _ROLES} | {"tool": "tool/tool result/"}
_REASONING, _INSIDE = "assistant/reasoning/", "assistant/reasoning/inside"
_NAME, _ARGUMENTS = "assistant/tool call/name", "assistant/tool call/arguments"
_KEY, _VALUE = "assistant/tool call/key", "assistant/tool call/value"
_TOOL = "tools/tool schema/"
NUM_FORMS = {_ARGUMENTS: 4, _TOOL: 6}  # numbers of forms; other labels have 2 forms
COMPOSITE = frozenset({_ARGUMENTS, _VALUE, _TOOL})  # texts that contain other texts, which templates may reformat
_INDENTS = (None, 4, 2)
_ENCODERS = {indent: json.JSONEncoder(ensure_ascii=False, indent=indent) for indent in _INDENTS}
_START, _END = "start", "end"
_MARGIN = 64  # spaces that a template may add or remove
_MOST_CHARACTERS = 2_000_000  # limit for all fillers; above it, fillers vary too much to be learnt


class ChatText(NamedTuple):
    """A text of a chat, without the spaces around it."""

    label: str  # role/kind/part: `system/content/`, `assistant/tool call/name`
    written: str  # the text as a template would write it: arguments of a call are JSON
    position: int  # index of the message in the chat, or of the tool in the list of tools


class TemplatePattern:
    """The fillers that one template writes between texts, and the forms in which it writes texts.

    forms  the form of each label's texts; labels that are missing have form 0.
           plain texts  0 unchanged, 1 escaped as in JSON
           arguments    0 to 2 JSON without indent, with indent 4, with indent 2; 3 names and values one by one
           tools        0 to 2 as for arguments; 3 to 5 the same for the tool's function alone
    """

    def __init__(self) -> None:
        self.forms: dict[str, int] = {}
        # {two labels: the fillers between texts with these labels, and the largest distance between the two texts}
        self._known: dict[tuple[str, str], tuple[set[str], int]] = {}
        self._moved: set[str] = set()  # labels whose texts the template does not write in the order of the messages
        self._characters = 0

    def left_out(self, text: str, texts: Sequence[ChatText], asides: Sequence[str]) -> list[ChatText] | None:
        """The texts that a rendering does not contain; None if these are unknown.

        The filler between two texts must be known for the labels of the texts.  This rule prevents that a short text is
        confused with the same characters in a header or in another text.
        """
        at, before, last_start = 0, _START, 0  # last_start: start of the previous text
        skipped: list[tuple[ChatText, int]] = []
        doubtful: list[tuple[ChatText, int, int]] = []  # skipped texts, and the spans that may still contain them
        for part in texts:
            if skipped and self._moved:
                at, before = self._catch_up(text, skipped, at, before, asides)
            end = self._end_of(text, part, at, before, asides)
            if end < 0:
                skipped.append((part, at))
                continue
            if skipped:
                for other, since in reversed(skipped):
                    if since != at:
                        break
                    doubtful.append((other, last_start, end))
            at, before, last_start = end, part.label, end - len(part.written)
        if skipped and self._moved:
            at, before = self._catch_up(text, skipped, at, before, asides)
        ends = self._known.get((before, _END))
        if ends is None or _bare(text[at:], asides) not in ends[0]:
            return None
        if not skipped:
            return []
        missed = [part for part, _ in skipped]
        doubtful += [
            (part, last_start, len(text)) for part, since in skipped if since == at or part.label in self._moved
        ]
        for part, since, end in doubtful:
            is_moved = part.label in self._moved
            if (not is_moved or part in missed) and text.find(part.written, 0 if is_moved else since, end) >= 0:
                return None  # it is unknown which of two texts is written here, and which is missing
        return missed

    def _catch_up(
        self, text: str, skipped: list[tuple[ChatText, int]], at: int, before: str, asides: Sequence[str]
    ) -> tuple[int, str]:
        """Removes from `skipped` the texts that the template writes at `at`, later than the text of their message."""
        waiting = [entry for entry in skipped if entry[0].label in self._moved]
        while waiting:
            ends = [(self._end_of(text, part, at, before, asides), (part, since)) for part, since in waiting]
            end, entry = next((reached for reached in ends if reached[0] >= 0), (-1, None))
            if entry is None:
                break
            skipped.remove(entry)
            waiting.remove(entry)
            at, before = end, entry[0].label
        return at, before

    def _end_of(self, text: str, part: ChatText, at: int, before: str, asides: Sequence[str]) -> int:
        """The end of `part` in the rendering, if it is the next text after `at`; otherwise -1."""
        label, written, _ = part
        known = self._known.get((before, label))
        if known is None:
            return -1
        limit = at + known[1] + len(written)
        start = text.find(written, at, limit)
        while start >= 0:
            between = text[at:start]
            if between.strip() in known[0] or (asides and _bare(between, asides) in known[0]):
                return start + len(written)
            start = text.find(written, start + 1, limit)
        return -1

    def learn(self, text: str, texts: Sequence[ChatText], asides: Sequence[str], unknown: str) -> None:
        """Learns the fillers between texts from a rendering that holds each of the texts.

        unknown  a string in all texts: a filler with it contains a text's second copy, and is not learnt
        """
        present = [(start, part) for part in texts if (start := text.find(part.written)) >= 0]
        first = len(text)  # the earliest start of all following texts
        for start, part in reversed(present):
            if start > first:
                self._moved.add(part.label)
            first = min(first, start)
        at, before = 0, _START
        for start, part in [*sorted(present), (len(text), ChatText(_END, "", 0))]:
            between = _bare(text[at:start], asides)
            if start >= at and unknown not in between and self._characters < _MOST_CHARACTERS:
                known, reach = self._known.get((before, part.label), (set(), 0))
                self._known[before, part.label] = known | {between}, max(reach, start - at + _MARGIN)
                self._characters += len(between)
            at, before = max(at, start + len(part.written)), part.label

    def next_form(self, label: str) -> None:
        """Tries the next form for the texts of a label; after the last form, the first one again."""
        self.forms[label] = (self.forms.get(label, 0) + 1) % NUM_FORMS.get(label, 2)


def _bare(between: str, asides: Sequence[str]) -> str:
    """A filler without spaces around it and with a placeholder for strings that differ from chat to chat."""
    for aside in asides:
        between = between.replace(aside, "\0")
    return between.strip()


def texts_of(messages: list[Message], tools: Tools, forms: Mapping[str, int]) -> list[ChatText]:
    """The texts that are not empty, in the order of the messages.  Tools come after a first system message.

    forms  of the template's pattern
    """
    texts: list[ChatText] = []
    pending = tools
    for index, message in enumerate(messages):
        if pending and (index or message["role"] != "system"):
            texts += _of_tools(pending, forms)
            pending = None
        content, label = message.get("content") or "", _CONTENT[message["role"]]
        if content and len(message) == 2 and label not in forms and "</think>" not in content:
            if bare := content.strip():  # most messages have no other text
                texts.append(ChatText(label, bare, index))
            continue
        for label, text in _of_message(message, forms):
            if bare := text.strip():
                is_json = label in forms and label not in COMPOSITE
                texts.append(ChatText(label, _json(bare)[1:-1] if is_json and forms[label] else bare, index))
    return texts + _of_tools(pending, forms) if pending else texts


def _of_message(message: Message, forms: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Labels and texts of a message, including empty texts."""
    role, content = message["role"], message.get("content") or ""
    if role != "assistant":
        yield _CONTENT[role], content
        return
    yield _REASONING, next((message[key] for key in THINKING if message.get(key)), "")
    inside = THOUGHT.match(content) if "</think>" in content else None
    if inside:
        yield _INSIDE, inside[2]
    yield _CONTENT[role], inside[4] if inside else content
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        yield _NAME, str(function.get("name", ""))
        arguments = function.get("arguments")
        if isinstance(arguments, dict) and forms.get(_ARGUMENTS) == BY_LEAF:
            for key, value in arguments.items():
                yield _KEY, key
                if value is not None and not isinstance(value, bool):  # true and True count as filler
                    yield _VALUE, value if isinstance(value, str) else _json(value)
        elif isinstance(arguments, str):
            yield _ARGUMENTS, arguments
        elif arguments:
            yield _ARGUMENTS, _json(arguments, _INDENTS[forms.get(_ARGUMENTS, 0)])


def _of_tools(tools: list[dict[str, Any]], forms: Mapping[str, int]) -> list[ChatText]:
    alone, indent = divmod(forms.get(_TOOL, 0), len(_INDENTS))
    shown = [tool.get("function", tool) if alone else tool for tool in tools]
    return [ChatText(_TOOL, _json(tool, _INDENTS[indent]), index) for index, tool in enumerate(shown)]


def _json(value: Any, indent: int | None = None) -> str:
    """JSON as the filter `tojson` of transformers writes it."""
    return _ENCODERS[indent].encode(value)


def asides_of(messages: list[Message]) -> list[str]:
    """Ids, names of speakers and other strings of messages that are not texts (see the module), longest first."""
    asides: set[str] = set()
    for message in messages:
        if len(message) > 2 and not message.keys() <= _PLAIN:
            asides |= {value for key, value in message.items() if key not in _KNOWN and isinstance(value, str)}
            asides |= {call["id"] for call in message.get("tool_calls") or () if isinstance(call.get("id"), str)}
    return sorted(asides - {""}, key=lambda aside: (-len(aside), aside)) if asides else []
