"""Jinja expressions and statements, each with Python that gives the same text, and several forms of a text in Jinja."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

EITHER = 2  # a label if both 0 and 1 are correct
ROLES = ("system", "user", "assistant", "tool")
Message = dict[str, Any]


@dataclass(frozen=True)
class Where:
    """The message that the template is writing."""

    m: Message
    index: int
    messages: list[Message]  # in the order in which the loop visits them
    tools: list[dict] | None

    @property
    def last(self) -> bool:
        return self.index == len(self.messages) - 1

    @property
    def first(self) -> bool:
        return self.index == 0

    def role_at(self, index: int) -> str | None:
        return self.messages[index]["role"] if 0 <= index < len(self.messages) else None


Text = Callable[[Where], str]


class Expr(NamedTuple):
    """A Jinja expression with a text as its value, and Python that gives the same text.  raw: the text, if it is a
    constant."""

    jinja: str
    text: Text
    raw: str = ""


class Part(NamedTuple):
    """Jinja statements that write a text, and Python that gives the same text."""

    jinja: str
    text: Text


def quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\t", "\\t")
    return f"'{escaped}'"


def constant(text: str) -> Expr:
    return Expr(quote(text), lambda w: text, text)


def tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


# Operations that keep or change the characters of a text: (Jinja, Python), {} stands for the text.

SAME: list[tuple[str, Callable[[str], str]]] = [
    ("{}", lambda s: s),
    ("{} | string", lambda s: s),
    ("({} | safe) ~ ''", lambda s: s),
    ("{} | default('none')", lambda s: s),
    ("'' + {}", lambda s: s),
    ("{} ~ ''", lambda s: s),
    ("'%s' % {}", lambda s: s),
    ("'%s' | format({})", lambda s: s),
    ("'{{}}'.format({})", lambda s: s),
    ("[{}] | join", lambda s: s),
    ("['', {}] | join('')", lambda s: s),
    ("''.join([{}])", lambda s: s),
    ("{}.split('\\n') | join('\\n')", lambda s: s),
    ("'</think>'.join({}.split('</think>'))", lambda s: s),
    ("{} | list | join", lambda s: s),
    ("{}[:]", lambda s: s),
    ("({0}[:3] + {0}[3:])", lambda s: s),
    ("({0}[:2] ~ {0}[2:])", lambda s: s),
    ("({0} if {0} else '')", lambda s: s),
    ("({} or '')", lambda s: s),
    ("{}.replace('\\r\\n', '\\n')", lambda s: s.replace("\r\n", "\n")),
    ("{} | replace('zz', 'zz')", lambda s: s),
    ("({} * 1)", lambda s: s),
    ("[{}] | map('string') | first", lambda s: s),
    ("{{'t': {}}}['t']", lambda s: s),
    ("{{'t': {}}}.t", lambda s: s),
    ("(none or {})", lambda s: s),
]
CHANGED: list[tuple[str, Callable[[str], str]]] = [
    ("{} | trim", str.strip),
    ("{}.strip()", str.strip),
    ("{}.rstrip()", str.rstrip),
    ("{}.lstrip('\\n')", lambda s: s.lstrip("\n")),
    ("{}.strip('\\n ')", lambda s: s.strip("\n ")),
    ("{}.split('</think>')[-1]", lambda s: s.split("</think>")[-1]),
    ("{}.split('</think>')[-1].lstrip('\\n')", lambda s: s.split("</think>")[-1].lstrip("\n")),
    ("{}.rpartition('</think>')[2]", lambda s: s.rpartition("</think>")[2]),
    ("{}.split('</think>', 1)[-1]", lambda s: s.split("</think>", 1)[-1]),
    ("{} | replace('  ', ' ')", lambda s: s.replace("  ", " ")),
    ("{} | replace('\\n\\n', '\\n')", lambda s: s.replace("\n\n", "\n")),
    ("{}.removeprefix(' ')", lambda s: s.removeprefix(" ")),
    ("{}.split() | join(' ')", lambda s: " ".join(s.split())),
    ("{}.splitlines() | join('\\n')", lambda s: "\n".join(s.splitlines())),
    ("({0}[1:] if {0}[:1] == ' ' else {0})", lambda s: s[1:] if s[:1] == " " else s),
    ("[{}] | map('trim') | join", str.strip),
]
