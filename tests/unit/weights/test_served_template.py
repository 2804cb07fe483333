"""A template for servers renders chats as the trained template did with the settings of the run."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sft.data.template.chat_template import ChatTemplate
from sft.weights.serving import served_template
from sft.weights.serving.served_template import default_line, for_servers, literal
from tests.unit.fixtures.folder import TEMPLATES, template

DATE = "2025-03-09"
CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
CHATS: list[list[dict[str, Any]]] = [[USER], [USER, ANSWER], [{"role": "system", "content": "s"}, USER, ANSWER, USER]]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


def rendered(source: str, **variables: Any) -> list[str]:
    """The chats rendered by transformers, with and without prompt and tools."""
    return [
        render_jinja_template([chat], tools=tools, chat_template=source, add_generation_prompt=prompt, **variables)[0][
            0
        ]
        for chat in CHATS
        for prompt in (False, True)
        for tools in (None, TOOLS)
    ]


def test_a_template_without_settings_stays_as_it_is() -> None:
    made = for_servers(CHATML, {}, {}, DATE)
    assert made.source == CHATML and not (made.requests or made.has_date or made.asks_for_today or made.has_marks)


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_templates_of_models_keep_their_text(name: str) -> None:
    """Every free variable that may be true or false is set to false."""
    source, tokens = template(name), {"bos_token": "<bos>", "eos_token": "<eos>"}
    switches = dict.fromkeys(ChatTemplate(source, name, tokens).free_switches, False)
    made = for_servers(source, tokens, switches, DATE)
    assert not made.requests and not made.asks_for_today and not made.has_marks
    assert made.source.count(" is not defined %}{%- set ") >= len(switches)


@pytest.mark.parametrize("start", ["", "\n", "  ", "  {# c #}\n", "\n\n  {%- if true %}\n{% endif %}\n", "text\n"])
@pytest.mark.parametrize("value", [True, False, 3, -2.5, 1e-7, 'a"b\\n\n\t{{ x }} %} é 😀', ""])
def test_a_switch_becomes_a_default(start: str, value: bool | float | str) -> None:
    source = start + "[{{ v }}|{{ v is defined }}]" + CHATML
    made = for_servers(source, {}, {"v": value}, None)
    assert made.requests == () and made.source == default_line("v", value) + source
    assert rendered(made.source) == rendered(source, v=value)
    assert rendered(made.source, v="other") == rendered(source, v="other"), "a request's own value wins"
    assert "v" in ChatTemplate(made.source, "", {}).variables, "a later run may set it"


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_numbers_that_jinja_has_no_name_for(value: float) -> None:
    assert rendered(f"{{{{ {literal(value)} }}}}") == rendered("{{ v }}", v=value)


def test_a_default_reaches_macros_loops_and_set_blocks() -> None:
    source = (
        "{%- macro head(m) %}<{{ m.role }}{{ mode if mode is defined else '?' }}>{% endmacro %}"
        "{%- for m in messages %}{{ head(m) }}{{ mode }}{{ m.content }}{% endfor %}"
        "{%- set x %}({{ mode }}){% endset %}{{ x }}{% if mode %}{% set y = mode %}{{ y }}{% endif %}"
    )
    made = for_servers(source, {}, {"mode": "deep"}, None)
    assert made.requests == () and rendered(made.source) == rendered(source, mode="deep")
    assert rendered(made.source)[0] == "<userdeep>deepHi(deep)deep"


def test_a_default_that_changes_the_text_is_left_to_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{{ v }}" + CHATML
    monkeypatch.setattr(served_template, "default_line", lambda name, value: "{%- set v = 'wrong' %}\n")
    made = for_servers(source, {}, {"v": "right"}, None)
    assert (made.source, made.requests) == (source, ("v",))


def test_the_date_of_the_training_takes_the_place_of_the_clock() -> None:
    source = (
        "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
        "{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}{%- endif %}"
        '{%- macro iso() %}{{ strftime_now("%Y-%m-%d") }}{% endmacro %}'
        "{{ date_string }} {{ iso() }}{% for m in messages %} {{ strftime_now('%B') }}{% endfor %}"
    )
    made = for_servers(source, {}, {}, DATE)
    assert made.has_date and not made.asks_for_today
    assert rendered(made.source)[0] == "09 Mar 2025 2025-03-09 March"
    assert rendered(made.source, date_string="today")[0] == "today 2025-03-09 March", "a request's own value wins"
    again = for_servers(made.source, {}, {}, "2026-01-01")
    assert again.source == made.source and not again.asks_for_today


def test_a_format_that_is_computed_is_reported() -> None:
    made = for_servers("{{ strftime_now('%Y' + '-%m') }}" + CHATML, {}, {}, DATE)
    assert made.asks_for_today and not made.has_date


@pytest.mark.parametrize("left", ["", "-", "+"])
@pytest.mark.parametrize("right", ["", "-", "+"])
@pytest.mark.parametrize("around", ["", " ", "\n", "\n  "])
def test_marks_go_and_blanks_stay(left: str, right: str, around: str) -> None:
    tags = [f"{{%{left} {name} {right}%}}" for name in ("generation", "endgeneration")]
    source = (
        "{# {% generation %} is a mark #}{% for m in messages %}x" + around + tags[0] + around + "{{ m.content }}"
        "{% for c in 'ab' %}{{ c }}{% if loop.last %}{{ m.role }}{% endif %}{% endfor %}"
        + around
        + tags[1]
        + around
        + "y{% endfor %}{% raw %}{% generation %}{% endraw %}"
    )
    made = for_servers(source, {}, {}, None)
    assert not made.has_marks and made.source.count("{%" + left + " generation") == (left == "") * 2
    assert rendered(made.source) == rendered(source)


def test_marks_with_variables_of_their_own() -> None:
    source = (
        "{% set n = 'out' %}{% for m in messages %}{% generation %}{% set n = 'in' %}{{ n }}{% endgeneration %}"
        "{{ n }}{% endfor %}"
    )
    made = for_servers(source, {}, {}, None)
    assert not made.has_marks and "generation" not in made.source
    assert rendered(made.source) == rendered(source) and rendered(source)[0] == "inout"
