"""Changes the chat template of a training, so that a server renders the same text without our settings.

    {% generation %} marks          become comments, because servers do not know the tag
    strftime_now("%d %b %Y")        becomes the date of data.date
    data.chat_template_kwargs       become defaults: {%- if think is not defined %}{%- set think = false %}{%- endif %}

Each change is kept only if the template still renders a set of chats, with and without tools and reasoning, to the same
text as in training.  `ForServers` reports the other changes, for example switches that each request must give.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import nodes

from sft.data.rows.messages import Message, Tools
from sft.data.template.chat_template import DATE, ChatTemplate
from sft.errors import DataError

_CLOCK = "strftime_now"
# A date that no training has.  A template that still asks for the date renders this one, so its chats differ from those
# of the training, and the template is not taken.
_ANOTHER_DAY = "1987-11-28"
# Comments and raw blocks first, because tags inside them are text.
_TAG = re.compile(
    r"\{#.*?#\}|\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}"
    r"|\{%(?P<left>[-+]?)\s*(?P<name>(?:end)?generation)\s*(?P<right>[-+]?)%\}",
    re.DOTALL,
)
_USER, _ANSWER = {"role": "user", "content": "Is it raining?"}, {"role": "assistant", "content": "No, it is dry."}
_SYSTEM, _THOUGHT = {"role": "system", "content": "Be brief."}, {**_ANSWER, "reasoning_content": "I look outside."}
_FUNCTION = {"name": "rain", "description": "Says whether it rains."}
_SCHEMA = {"type": "object", "properties": {"day": {"type": "string"}}, "required": ["day"]}
_TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {**_FUNCTION, "parameters": _SCHEMA}}]
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "rain", "arguments": {"day": "Monday"}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "name": "rain", "tool_call_id": "abcdefghi", "content": "dry"}
_CHATS: list[tuple[list[Message], Tools]] = [
    ([_USER], None),
    ([_USER, _ANSWER], None),
    ([_SYSTEM, _USER, _ANSWER, _USER, _ANSWER], None),
    ([_USER, _THOUGHT, _USER, _THOUGHT], None),
    ([_SYSTEM, _USER], _TOOLS),
    ([_USER, _CALLING, _RESULT], _TOOLS),
    ([_SYSTEM, _USER, {**_CALLING, "reasoning_content": "I ask."}, _RESULT, _ANSWER, _USER, _THOUGHT], _TOOLS),
]


@dataclass(frozen=True, kw_only=True)
class ForServers:
    """A template for servers, and the changes that it could not have."""

    source: str
    requests: tuple[str, ...]  # the switches that it reads and does not set by default
    has_date: bool  # whether it contains the date of the training
    asks_for_today: bool  # whether it asks the server for today's date
    has_marks: bool  # whether it still has {% generation %} marks


def for_servers(
    source: str, special_tokens: Mapping[str, Any], switches: Mapping[str, Any], date: str | None
) -> ForServers:
    """The template `source`, changed for servers.

    special_tokens: the tokens that the tokenizer gives to the template; switches: data.chat_template_kwargs
    date: data.date; None: not set
    """
    trained = ChatTemplate(source, "trained", dict(special_tokens), date=date or DATE)
    read = {name: value for name, value in switches.items() if name in trained.variables}
    asks = _asks_for_date(source)
    wanted, variables, result = list(_renderings(trained, read)), {**read, _CLOCK: trained.date}, source

    def keeps(candidate: str, without: str | None = None) -> bool:
        """Take the candidate as the result if it renders the chats as in training.  Returns whether it was taken.

        without: the variable that the candidate sets by default, and that the chats are rendered without
        """
        nonlocal result
        others = {name: value for name, value in variables.items() if name != without}
        clock = others.pop(_CLOCK, _ANOTHER_DAY)
        template = ChatTemplate(candidate, "exported", dict(special_tokens), date=clock)
        if candidate == result or list(_renderings(template, others)) != wanted:
            return False
        variables.pop(without or "", None)
        result = candidate
        return True

    had_marks = _without_marks(source, "{{#{left} {name} {right}#}}") != source
    has_marks = had_marks and not any(keeps(candidate) for candidate in _unmarked(source))
    has_date = asks and date is not None and (line := _clock_line(source, date)) != "" and keeps(line + result, _CLOCK)
    requests = [name for name, value in read.items() if not keeps(default_line(name, value) + result, name)]
    return ForServers(
        source=result,
        requests=tuple(requests),
        has_date=has_date,
        asks_for_today=asks and not has_date,
        has_marks=has_marks,
    )


def default_line(name: str, value: bool | int | float | str) -> str:
    """A line of Jinja that gives the variable a value if the request gives none.

    It ends with a newline, which trim_blocks removes.  So blanks and newlines after it have the same effect as at the
    start of the file.
    """
    return f"{{%- if {name} is not defined %}}{{%- set {name} = {literal(value)} %}}{{%- endif %}}\n"


def literal(value: bool | int | float | str) -> str:
    """The value in Jinja's notation.  Texts keep their characters, because Jinja does not join escaped surrogates."""
    if isinstance(value, float) and not math.isfinite(value):
        return "1e999 - 1e999" if math.isnan(value) else "1e999" if value > 0 else "-1e999"
    return json.dumps(value, ensure_ascii=False)


def _renderings(template: ChatTemplate, variables: dict[str, Any]) -> Iterator[str | None]:
    """The texts of `_CHATS`, each with and without a generation prompt; None for a chat that the template refuses."""
    for messages, tools in _CHATS:
        for prompt in (False, True):
            try:
                yield template.render(messages, tools, prompt=prompt, variables=variables).text
            except DataError:
                yield None


def _unmarked(source: str) -> Iterator[str]:
    """Candidates for the template without generation marks, best first: with comments or `with` blocks instead.

    A comment removes the same whitespace as a mark.  A `with` block also limits the scope of variables as a mark does.
    """
    scoped = any(block.find(nodes.Assign) for block in _tree(source).find_all(nodes.CallBlock))
    if not scoped:
        yield _without_marks(source, "{{#{left} {name} {right}#}}")
    yield _without_marks(source, "{{%{left} {scope} {right}%}}")


def _without_marks(source: str, form: str) -> str:
    def other(match: re.Match[str]) -> str:
        name = match["name"]
        if name is None:
            return match[0]
        scope = "with" if name == "generation" else "endwith"
        return form.format(left=match["left"], right=match["right"], name=name, scope=scope)

    return _TAG.sub(other, source)


def _clock_line(source: str, date: str) -> str:
    """A Jinja macro that replaces the server's clock for all formats in the template.

    "" if the template computes a format, so that the formats are not known.
    """
    formats: list[str] = []
    for call in _tree(source).find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == _CLOCK:
            if len(call.args) != 1 or not isinstance(call.args[0], nodes.Const) or call.kwargs:
                return ""
            formats.append(str(call.args[0].value))
    midnight = datetime.strptime(date, "%Y-%m-%d")
    pairs = ", ".join(f"{literal(text)}: {literal(midnight.strftime(text))}" for text in dict.fromkeys(formats))
    return f"{{%- macro {_CLOCK}(format) %}}{{{{- {{{pairs}}}[format] }}}}{{%- endmacro %}}\n" if formats else ""


def _asks_for_date(source: str) -> bool:
    """Whether the template uses the server's clock, and defines no macro of the same name."""
    tree = _tree(source)
    return any(name.name == _CLOCK for name in tree.find_all(nodes.Name)) and not any(
        macro.name == _CLOCK for macro in tree.find_all(nodes.Macro)
    )


def _tree(source: str) -> nodes.Template:
    """The template as transformers parses it."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    tree: nodes.Template = _compile_jinja_template("").environment.parse(source)
    return tree
