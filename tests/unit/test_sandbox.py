"""Templates that want out, never end or write without measure."""

import time

import pytest

from sft.data.chat.render import prepared
from sft.data.chat.template import ChatTemplate, Refused
from sft.errors import DataError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
LOOP = "{% for i in range(100000) %}"
SECONDS, CHARACTERS = 0.3, 1_000_000


@pytest.fixture(autouse=True)
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.data.chat.sandbox.MAX_SECONDS", SECONDS)
    monkeypatch.setattr("sft.data.chat.sandbox.MAX_CHARACTERS", CHARACTERS)


def render(source: str) -> str:
    return ChatTemplate(source, "chat.jinja", {"bos_token": "<s>"}).render(prepared(CHAT), None)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append({}) }}",
        "{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ lipsum(n=1000) }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_no_way_out(source: str) -> None:
    """Refused by Jinja's immutable sandbox or by what transformers and we put in it."""
    with pytest.raises(Refused, match=r"chat template chat\.jinja refused the chat: "):
        render(source)
    assert render("{{ '{0.__class__}'.format(messages) }}{{ raise_exception.__globals__ }}") == ""


@pytest.mark.parametrize(
    "source",
    [
        LOOP * 2 + "{% endfor %}" * 2,  # writes nothing, so nothing is ever handed out
        LOOP + "{% for m in messages if range(100000) | sum %}{% endfor %}{% endfor %}",
        "{% set a = range(100000) | list %}{% for i in a %}{% for j in a %}{% endfor %}{% endfor %}",
        LOOP + "{% set x = range(100000) | list %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
    ],
)  # fmt: skip
def test_endless(source: str) -> None:
    with pytest.raises(DataError, match=r"chat template chat\.jinja takes longer than 0\.3 s"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        LOOP + "{{ messages[0].content * 1000 }}{% endfor %}",
        "{% set x %}" + LOOP + "x" * 100 + "{% endfor %}{% endset %}",
        "{{ 'x' * 10**9 }}",
        "{{ ([0] * 10**9) | length }}",
        "{% set ns = namespace(x='xy') %}" + LOOP + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xy') %}" + LOOP + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% macro f(x) %}{{ f(x + x) }}{% endmacro %}{{ f('xy') }}",
        "{{ 'x'.center(10**9) }}",
        "{{ '\t'.expandtabs(10**9) }}",
        "{{ ('x' * 10000).replace('x', 'y' * 10000) }}",
        "{{ ('x' * 10000).join(['a'] * 10000) }}",
        "{{ 'x\ny' | indent(10**9) }}",
        "{{ '%(a)s%(a)s' | format(a='x' * 900000) }}",
        "{% set ns = namespace(x=['xy']) %}" + LOOP + "{% set ns.x = [ns.x[0] ~ ns.x[0]] %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}" + LOOP + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% macro f(x) %}{{ f(x=x + x) }}{% endmacro %}{{ f(x='xy') }}",
        "{% set t = '{0:99999}' * 1000 %}{{ t.format(1) }}",
        "{% set t = '%99999d' * 1000 %}{{ t | format(*range(1000)) }}",
    ],
)  # fmt: skip
def test_too_much_text(source: str) -> None:
    with pytest.raises(DataError, match=r"chat template chat\.jinja writes more than 1,000,000 characters"):
        render(source)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ '%999999999d' % 1 }}", "formats text to a width"),
        ("{{ '{:>{}}'.format(1, 999999999) }}", "formats text to a width"),
        ("{{ 9 ** 99999999 }}", "computes a number of too many digits"),
        ("{{ messages | tojson(indent=10**9) }}", "indents JSON by more than 100 columns"),
    ],
)
def test_too_wide(source: str, complaint: str) -> None:
    with pytest.raises(DataError, match=rf"chat template chat\.jinja {complaint}"):
        render(source)


def test_a_budget_is_for_one_rendering() -> None:
    """And may be used up."""
    template = ChatTemplate("{{ 'x' * 1000000 }}", "chat.jinja", {})
    assert [len(template.render([], None)) for _ in range(3)] == [CHARACTERS] * 3


def test_what_templates_do() -> None:
    """Ordinary means give what they give in transformers."""
    source = """{%- set ns = namespace(n=0) -%}
    {%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}
        {%- if m.role is string and m['role'] == 'user' and not m.none -%}{{ bos_token ~ ns.n ~ m.content | trim }}
        {%- else -%}{{ '%s|%s' % (m.role, m.content.split('l')[-1]) + ' ' * 2 }}{%- continue -%}{%- endif -%}
    {%- endfor -%}{{ {'é': messages[0]} | tojson }}{{ ', '.join(['a', 'b']) }}
    {{- messages | map(attribute='role') | join }}"""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    expected = '<s>1Hiassistant|o  {"é": {"role": "user", "content": "Hi"}}a, buserassistant'
    assert render(source) == expected
    assert _compile_jinja_template(source).render(messages=CHAT, bos_token="<s>") == expected


def test_marks_inside_a_variable_are_refused() -> None:
    """They stand where the block is written."""
    plain = "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    template = ChatTemplate(plain, "chat.jinja", {"bos_token": "<s>"})
    assert template.marked(CHAT, None) == ("<s>Hi;Hello;", [(3, 5), (6, 11)])
    inside = "a{% set x %}b{% generation %}c{% endgeneration %}{% endset %}{{ x }}"
    with pytest.raises(
        DataError, match="inside a macro or a {% set %} block, where the position of its text is " "unknown"
    ):
        ChatTemplate(inside, "chat.jinja", {}).marked(CHAT, None)


def test_messages_as_transformers_hands_them_over() -> None:
    call = {"function": {"name": "f", "arguments": {"x": None}}}
    assert prepared([{"role": "assistant", "content": None, "thinking": "so", "tool_calls": [call]}]) == [
        {"role": "assistant", "thinking": "so", "reasoning_content": "so", "tool_calls": [call]}
    ]
    assert prepared([{"role": "user", "content": "x", "when": time.gmtime}]) == [
        {"role": "user", "content": "x", "when": "<builtin_function_or_method>"}
    ]
