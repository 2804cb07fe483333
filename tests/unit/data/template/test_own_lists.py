"""A template may change lists that it has made itself, as that of Kimi-K2 does, and nothing that it is given."""

from copy import deepcopy
from typing import Any

import pytest

from sft.data.template import limits
from sft.data.template.chat_template import ChatTemplate, Refused
from sft.data.template.rendering import trace_inputs
from sft.data.template.sources import CONSTANT, Field
from sft.errors import DataError

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": [1, 2]}}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": [{"type": "text", "text": "Hello"}], "tool_calls": [CALL]},
]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {"required": ["x"]}}}]


def made(source: str) -> ChatTemplate:
    return ChatTemplate(source, "chat.jinja", {"more_tokens": ["<a>", "<b>"]}, {"words": [["a"], "b"]})


def render(source: str) -> str:
    return made(source).render(CHAT, TOOLS, documents=[{"text": ["a"]}], variables={"row": {"names": ["b"]}}).text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% set l = [] %}{% set _ = l.append('a') %}{% set _ = l.append('b') %}{{ l.pop(0) }}{{ l | join }}", "ab"),
        ("{% set n = namespace(l=['a']) %}{% set _ = n.l.extend(['b', 'c']) %}{{ n.l.pop() }}{{ n.l | join }}", "cab"),
        (
            "{% set l = messages | list %}{% set _ = l.append(messages[0]) %}{{ l | length }}{{ messages | length }}",
            "32",
        ),
        ("{% set l = messages[1:] %}{% set _ = l.insert(0, 1) %}{{ l | length }}{{ messages | length }}", "22"),
        ("{% set l = 'a b'.split() %}{% set _ = l.extend(l) %}{{ l | join }}", "abab"),
    ],
)
def test_own_lists(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize("change", ["append(1)", "extend([1])", "insert(0, 1)", "pop()"])
@pytest.mark.parametrize(
    "given",
    "messages tools documents words words[0] more_tokens row.names documents[0].text messages[1].tool_calls "
    "messages[1].content tools[0].function.parameters.required".split()
    + ["messages[1].tool_calls[0].function.arguments.x", "(messages | last).content", "namespace(l=messages).l"],
)
def test_what_a_template_is_given_stays(given: str, change: str) -> None:
    before = deepcopy((CHAT, TOOLS))
    template = made("{% set l = " + given + " %}{{ l." + change + " }}")
    inputs = trace_inputs(CHAT, TOOLS, [{"text": ["a"]}], {"row": {"names": ["b"]}})
    copy = repr(inputs[:4])
    with pytest.raises(Refused, match="must not (append|extend|insert|pop) to a list that it is given"):
        template.rendered(inputs)
    assert (CHAT, TOOLS) == before and repr(inputs[:4]) == copy
    assert template.switches == {"words": [["a"], "b"]} and template.special_tokens == {"more_tokens": ["<a>", "<b>"]}


@pytest.mark.parametrize("method", ["sort", "clear", "remove", "reverse", "__setitem__", "__iadd__"])
def test_other_methods_are_refused(method: str) -> None:
    with pytest.raises(Refused, match="unsafe"):
        render("{% set l = ['a'] %}{{ l." + method + "('a') }}")


@pytest.mark.parametrize("value", ["l", "[]", "{}", "namespace()", "messages[:1]", "range(3)"])
def test_lists_stay_flat(value: str) -> None:
    """A list in itself, or a list many times in others, would have no size that can be checked."""
    with pytest.raises(Refused, match="must get texts, numbers or messages"):
        render("{% set l = [] %}{{ l.append(" + value + ") }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% set l = [1] %}{% for i in range(100) %}{% set _ = l.extend(l) %}{% endfor %}",
        "{% set l = [] %}{% for i in range(100000) %}{% set _ = l.append(i) %}{% endfor %}",
        "{% set l = [] %}{% for i in range(100) %}{% set _ = l.extend(range(100000)) %}{% endfor %}",
        "{% set l = [0] * 60000 %}{% for i in range(90000) %}{% set _ = l.insert(0, 1) %}{{ l.pop() }}{% endfor %}",
        "{% set l = [] %}{% for i in range(9000) %}{% set _ = l.append('x' * 99) %}{{ l | join }}{% endfor %}",
    ],
)
def test_growth_is_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STEPS", 100_000)
    monkeypatch.setattr(limits, "MAX_CHARACTERS", 1_000_000)
    monkeypatch.setattr(limits, "MAX_MADE", 5_000_000)
    with pytest.raises(DataError, match="takes more than 100,000 steps|writes more than [15],000,000 characters"):
        render(source)


def test_texts_in_a_list_keep_their_sources() -> None:
    source = (
        "{% set l = [] %}{% for m in messages %}{% set _ = l.append(m.content) %}{% endfor %}{{ l.pop(0) }}{{ 'x' }}"
    )
    runs = made(source).render([CHAT[0], {"role": "assistant", "content": "Hello"}]).runs
    assert isinstance(runs[0].source, Field) and (runs[0].source.message, runs[0].source.path) == (0, ("content",))
    assert runs[1].source is CONSTANT


def test_the_number_of_an_iteration_is_known_from_the_first_rendering_on() -> None:
    first, second = (
        made_again.render(CHAT[:1]) for made_again in [made("{% for m in messages %}{{ loop.index }}{% endfor %}")] * 2
    )
    assert first.runs == second.runs and first.runs[0].source is CONSTANT
