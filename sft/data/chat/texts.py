"""The texts of a chat, each with its role and kind, and the same chat with a word of its own in each.

Decides what counts as a text: contents, reasoning (also at the head of a content), names and arguments of tool calls,
results, and of a tool its name, its description and those of its parameters.  Ids, names of speakers and other keys of
a message do not.  Does not decide which texts a template leaves out (`omitted.py`).
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from sft.data.chat.said import THOUGHT
from sft.data.chat.template import THINKING, Message, Tools

Kind = Literal["content", "reasoning", "tool call", "tool result", "tool schema"]
BY_LEAF = 3  # form of arguments that are written name by name and value by value
_PLAIN = {"role", "content", *THINKING}
_KNOWN = _PLAIN | {"tool_calls"}
_ROLES = ("system", "user", "assistant")
_CONTENT = {role: f"{role}/content/" for role in _ROLES} | {"tool": "tool/tool result/"}
_REASONING, _INSIDE = "assistant/reasoning/", "assistant/reasoning/inside"
_NAME, _ARGUMENTS = "assistant/tool call/name", "assistant/tool call/arguments"
_KEY, _VALUE = "assistant/tool call/key", "assistant/tool call/value"
_TOOL = "tools/tool schema/"
NUM_FORMS = {_ARGUMENTS: 4, _TOOL: 6}  # of others 2
COMPOSITE = frozenset(
    {_ARGUMENTS, _VALUE, _TOOL}
)  # texts that hold others, which a template may write in ways of its own
_INDENTS = (None, 4, 2)
_WRITERS = {
    indent: json.JSONEncoder(ensure_ascii=False, indent=indent) for indent in _INDENTS
}  # made once: half the time


class Text(NamedTuple):
    """A text without the spaces around it.

    label  role/kind/part: `system/content/`, `assistant/tool call/name`
    said   as a template would write it: arguments of a call are JSON
    place  number of the message, or of the tool, from 0
    """

    label: str
    said: str
    place: int


def texts_of(messages: list[Message], tools: Tools, forms: Mapping[str, int]) -> list[Text]:
    """The texts in the order of the messages; tools stand behind a first system message.  Empty ones are none.

    forms  how a template writes a label's texts, where that is not the first way: as it stands, or as in JSON; for
           arguments and tools JSON, with an indent of 4, of 2; then arguments leaf by leaf, or a tool's function alone
    """
    texts: list[Text] = []
    pending = tools
    for place, message in enumerate(messages):
        role = message["role"]
        if pending and (place or role != "system"):
            texts += _of_tools(pending, forms)
            pending = None
        if role == "assistant":
            _add_assistant(texts, message, place, forms)
        elif said := (message.get("content") or "").strip():
            label = _CONTENT[role]
            texts.append(_text(label, _written(said, forms[label]) if label in forms else said, place))
    return texts + _of_tools(pending, forms) if pending else texts


def _add_assistant(texts: list[Text], message: Message, place: int, forms: Mapping[str, int]) -> None:
    content, own = message.get("content") or "", _CONTENT["assistant"]
    if (
        content and len(message) == 2 and own not in forms and "</think>" not in content
    ):  # the most frequent ones, at once
        if said := content.strip():
            texts.append(_text(own, said, place))
        return
    found = []
    if len(message) > 2 and (thought := next((message[key] for key in THINKING if message.get(key)), "")):
        found.append((_REASONING, thought))
    inside = THOUGHT.match(content) if "</think>" in content else None
    if inside:
        found.append((_INSIDE, inside[2]))
    found.append((own, inside[4] if inside else content))
    for call in message.get("tool_calls") or ():
        found += _of_call(call.get("function") or call, forms)
    for label, whole in found:
        if said := whole.strip():
            form = forms.get(label, 0) if label not in COMPOSITE else 0
            texts.append(_text(label, _written(said, form) if form else said, place))


def _text(label: str, said: str, place: int) -> Text:
    """Text(label, said, place), in a third of the time."""
    return tuple.__new__(Text, (label, said, place))


def _of_call(function: Mapping[str, Any], forms: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    yield _NAME, str(function.get("name", ""))
    arguments = function.get("arguments")
    if isinstance(arguments, dict) and forms.get(_ARGUMENTS) == BY_LEAF:
        for key, value in arguments.items():
            yield _KEY, key
            if value is not None and not isinstance(value, bool):  # true, or True, is what stands between others
                yield _VALUE, value if isinstance(value, str) else _json(value)
    elif arguments:
        yield _ARGUMENTS, (
            arguments if isinstance(arguments, str) else _json(arguments, _INDENTS[forms.get(_ARGUMENTS, 0)])
        )


def _of_tools(tools: list[dict[str, Any]], forms: Mapping[str, int]) -> list[Text]:
    alone, indent = divmod(forms.get(_TOOL, 0), len(_INDENTS))
    written = [tool.get("function", tool) if alone else tool for tool in tools]
    return [Text(_TOOL, _json(tool, _INDENTS[indent]), place) for place, tool in enumerate(written)]


def _written(said: str, form: int) -> str:
    return json.dumps(said, ensure_ascii=False)[1:-1] if form else said


def _json(value: Any, indent: int | None = None) -> str:
    """As the filter `tojson` of transformers writes it."""
    return _WRITERS[indent].encode(value)


def asides_of(messages: list[Message]) -> list[str]:
    """What a template may write besides the texts and differs from chat to chat: ids, names; longer ones first."""
    found: set[str] = set()
    for message in messages:
        if len(message) > 2 and not message.keys() <= _PLAIN:
            found |= {value for key, value in message.items() if key not in _KNOWN and isinstance(value, str)}
            found |= {call["id"] for call in message.get("tool_calls") or () if isinstance(call.get("id"), str)}
    return sorted(found - {""}, key=lambda aside: (-len(aside), aside)) if found else []


class Marked:
    """A chat with a word of its own inside each text, so that its rendering shows which texts the template writes.

    content "Be brief."  ->  "Be br711111000001ief."

    A word stands in the middle: what a text begins and ends with, and what a template may look for there, stays.
    Words are digits, which no quoting changes; a number among the arguments of a call is replaced by one.
    """

    def __init__(self, messages: list[Message], tools: Tools, everything: str) -> None:
        # A stem that no text has, so that every word found was put there.  It does not begin as it ends: digits before
        # a word are not taken for its beginning.
        self.stem = "711111"
        while self.stem in everything:
            self.stem += "1"
        self._count = 0
        self._word = re.compile(self.stem + r"\d{6}")
        self.messages = [self._message(message) for message in messages]
        self.tools = None if tools is None else [self._tool(tool) for tool in tools]

    def words(self, text: str) -> list[str]:
        """The words in a text."""
        return self._word.findall(text)

    def _mark(self, text: str) -> str:
        said = text.strip()
        if not said:
            return text
        middle = text.index(said) + (len(said) + 1) // 2
        return text[:middle] + self._new() + text[middle:]

    def _new(self) -> str:
        self._count += 1
        return f"{self.stem}{self._count:06}"

    def _message(self, message: Message) -> Message:
        marked = dict(message)
        thought = next((message[key] for key in THINKING if message.get(key)), None)
        if thought is not None:
            marked |= dict.fromkeys((key for key in THINKING if key in message), self._mark(thought))
        content = message.get("content") or ""
        inside = THOUGHT.match(content) if message["role"] == "assistant" and "</think>" in content else None
        if inside:
            content = inside[1] + self._mark(inside[2]) + inside[3] + self._mark(inside[4])
        if content:
            marked["content"] = content if inside else self._mark(content)
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return marked

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function") or call
        marked = {**function, "name": self._mark(str(function.get("name", "")))}
        if "arguments" in function:
            marked["arguments"] = self._argument(function["arguments"])
        return {**call, "function": marked} if "function" in call else marked

    def _argument(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._mark(value)
        if isinstance(value, dict):
            return {self._mark(key): self._argument(item) for key, item in value.items()}
        if isinstance(value, int | float) and not isinstance(value, bool):
            return int(self._new())
        return [self._argument(item) for item in value] if isinstance(value, list) else value

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool.get("function", tool)
        marked = {**self._schema(function), "name": self._mark(str(function.get("name", "")))}
        return {**tool, "function": marked} if "function" in tool else marked

    def _schema(self, value: Any) -> Any:
        """Descriptions and the names of parameters, however deep."""
        if isinstance(value, list):
            return [self._schema(item) for item in value]
        if not isinstance(value, dict):
            return value
        marked: dict[str, Any] = {}
        properties = value.get("properties")
        names = {name: self._mark(name) for name in properties} if isinstance(properties, dict) else {}
        for key, item in value.items():
            if key == "properties" and names:
                marked[key] = {names[name]: self._schema(schema) for name, schema in item.items()}
            elif key == "required" and isinstance(item, list):
                marked[key] = [names.get(name, name) if isinstance(name, str) else name for name in item]
            elif key == "description" and isinstance(item, str):
                marked[key] = self._mark(item)
            else:
                marked[key] = self._schema(item)
        return marked
