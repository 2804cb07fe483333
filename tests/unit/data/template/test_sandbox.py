"""Templates that try to leave the sandbox, never end or write without limit are ended by counts.  test_limited.py tests
limits of the process."""

from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from sft.data.chat.tokenizer import load_tokenizer
from sft.data.template import limits
from sft.data.template.chat_template import DATE, MAX_SOURCE, ChatTemplate, Refused
from sft.data.template.sandbox import Sandbox
from sft.errors import DataError
from tests.unit.fixtures.folder import config, make_folder

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
LOOP = "{% for i in range(100000) %}"
STEPS, CHARACTERS, MADE = 100_000, 1_000_000, 5_000_000


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STEPS", STEPS)
    monkeypatch.setattr(limits, "MAX_CHARACTERS", CHARACTERS)
    monkeypatch.setattr(limits, "MAX_MADE", MADE)


def render(source: str) -> str:
    return ChatTemplate(source, "chat.jinja", {"bos_token": "<s>"}).render(CHAT).text


def doubled(times: int, step: str) -> str:
    """`step` repeated with names for X and Y: X is a new value, Y the value of the step before."""
    return "".join(step.replace("X", f"x{i + 1}").replace("Y", f"x{i}") for i in range(times))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append({}) }}",
        "{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ lipsum(n=1000) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% block a %}{{ self.b() }}{% endblock %}{% block b %}{{ self.a() }}{% endblock %}",
    ],
)
def test_no_way_out(source: str) -> None:
    """Jinja's immutable sandbox, or an addition of transformers or of sft, refuses the template."""
    with pytest.raises(Refused, match=r"chat template chat\.jinja refused the chat: "):
        render(source)
    assert render("{{ '{0.__class__}'.format(messages) }}{{ raise_exception.__globals__ }}") == ""
    assert render("{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.y }}") == "", "no more than a key"


def test_a_namespace_knows_nothing_of_another() -> None:
    """A value that one chat or namespace has set is undefined in the next."""
    source = (
        "{% set ns = namespace() %}{% set other = namespace() %}{% for m in messages %}{% if ns.seen %},{% endif %}"
        "{% set ns.seen = true %}{{ m.content }}{% if other.seen %}!{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source, "chat.jinja", {})
    assert [template.render(CHAT).text for _ in range(3)] == ["Hi,Hello", "Hi,Hello", "Hi,Hello"]


@pytest.mark.parametrize("value", ["messages[0].content", "'x'", "('x' | safe)", "loop.index", "('x' ~ 1)", "n", "f"])
@pytest.mark.parametrize("name", ["pieces", "field", "of", "filled", "_sub", "_filled"])
def test_names_of_ours_are_hidden(value: str, name: str) -> None:
    """Every way to name an attribute is tried."""
    ways = (
        f"{{{{ {value}.{name} }}}}",
        f"{{{{ {value}['{name}'] }}}}",
        f"{{{{ {value} | attr('{name}') }}}}",
        f"{{{{ [{value}] | map(attribute='{name}') | join }}}}",
        f"{{{{ '{{0.{name}}}'.format({value}) }}}}",
    )
    for way in ways:
        source = f"{{% for i in [1] %}}{way}{{% endfor %}}"
        template = ChatTemplate(source, "chat.jinja", {"n": 1, "f": 1.5})
        assert template.render([{"role": "user", "content": "Hi"}], variables={"n": 1, "f": 1.5}).text == ""


@pytest.mark.parametrize(
    "name", ["sft_step", "tick", "step", "write", "named", "enter", "guarded", "text_of", "loop_items"]
)
def test_what_counts_has_no_name(name: str) -> None:
    for source in (f"{{{{ 1 | {name} }}}}", f"{{{{ [1] | map('{name}') | list }}}}", f"{{{{ (-10**15) is {name} }}}}"):
        with pytest.raises(Refused):
            render(source)
    for owner in ("", "self.", "environment.", "context.", "strftime_now.", "range.", "namespace()."):
        with pytest.raises(Refused):
            render(f"{{{{ {owner}{name}(-10**15) }}}}")
    assert render("{{ environment }}{{ context }}{{ strftime_now.__self__ }}{{ resolve }}{{ undefined }}") == ""


def test_names_are_those_of_transformers() -> None:
    theirs, ours = _compile_jinja_template("").environment, Sandbox(DATE)
    assert theirs.globals.keys() - {"lipsum"} == ours.globals.keys()
    assert theirs.filters.keys() == ours.filters.keys() and theirs.tests.keys() == ours.tests.keys()


@pytest.mark.parametrize(
    "source",
    [
        LOOP * 2 + "{% endfor %}" * 2,  # the loop writes nothing, so the template never yields a text
        LOOP + "{% for m in messages if range(100000) | sum %}{% endfor %}{% endfor %}",
        "{% set a = range(60000) | list %}{% for i in a %}{% for j in a %}{% endfor %}{% endfor %}",
        LOOP + "{% set x = range(100000) | list %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
        "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call f() %}" * 18 + "{% endcall %}" * 18,
        LOOP + "{% for x in range(100000) | map('string') | map('upper') %}{% endfor %}{% endfor %}",
        LOOP + "{% set x = range(100000) | select | list %}{% endfor %}",
        LOOP + "{% set x = range(100000) | groupby('real') %}{% endfor %}",
        LOOP + "{% set x = range(100000) | sort %}{% endfor %}",
        LOOP + "{% set x = {}.fromkeys(range(100000)) %}{% endfor %}",
        "{{ [] | slice(120000) | list | length }}",
        "{% for c in 'x' * 1000000 %}{{ loop.length }}{% endfor %}",
        "{{ ('x' * 1000000) | list | length }}",
        "{{ ('x' * 1000000) | min }}",
        "{{ ('x ' * 500000).split() | length }}",
        "{{ ('xy' * 500000).split('y') | length }}",
        "{{ (messages[0].content * 500000) | length }}",  # each text has a source of its own
    ],
)  # fmt: skip
def test_endless(source: str) -> None:
    with pytest.raises(DataError, match=r"chat template chat\.jinja takes more than 100,000 steps; "):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**9 }}",
        "{% set x = 'x' * 400000 %}{{ (x + x + x) | length }}",
        "{% set x = 'x' * 400000 %}{{ (x ~ x ~ x) | length }}",
        "{{ ([0] * 10**9) | length }}",
        "{% set ns = namespace(x='xy') %}" + LOOP + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xy') %}" + LOOP + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% macro f(x) %}{{ f(x + x) }}{% endmacro %}{{ f('xy') }}",
        "{{ ('x' * 10000).replace('x', 'y' * 10000) }}",
        "{{ ('x' * 10000).replace('', 'y' * 1000) }}",
        "{{ ('x' * 10000).join(['a'] * 10000) }}",
        "{{ range(1000) | join(d='x' * 999999) }}",
        "{{ '%(a)s%(a)s' | format(a='x' * 900000) }}",
        "{% set ns = namespace(x=['xy']) %}" + LOOP + "{% set ns.x = [ns.x[0] ~ ns.x[0]] %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}" + LOOP + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace() %}{% set ns.x = [ns, ns] %}{{ ns.x }}",
        "{% macro f(x) %}{{ f(x=x + x) }}{% endmacro %}{{ f(x='xy') }}",
        "{% set t = '{0:99999}' * 1000 %}{{ t.format(1) }}",
        "{% set t = '%99999d' * 1000 %}{{ t | format(*range(1000)) }}",
        "{% set x0 = 'xx' %}" + doubled(40, "{% set X = Y ~ Y %}"),
        "{% macro f(x0='xx'" + doubled(40, ", X=Y ~ Y") + ") %}{{ x40 }}{% endmacro %}{{ f() }}",
        "{% for x0 in ['x' * 1000] %}" + doubled(18, "{% for X in [Y ~ Y] %}") + "{% endfor %}" * 19,
        "{% set x0 = 'xx' %}{% autoescape true %}" + doubled(40, "{% set X = Y ~ Y %}") + "{% endautoescape %}",
        "{{ ([[[[['a'] * 100] * 100] * 100] * 100] * 100) | string }}",
        "{{ 'a'.encode() * 3000000000 }}",
        "{{ (('a' * 100000).encode() * 100000) | length }}",
        "{% set ns = namespace(b='a'.encode()) %}" + LOOP + "{% set ns.b = ns.b + ns.b %}{% endfor %}",
        "{{ ('x' * 10000).translate({120: 'y' * 10000}) }}",
        "{{ ('a\n' * 1000) | indent('x' * 10000) }}",
        "{{ ('a ' * 10000) | wordwrap(1, wrapstring='x' * 1000) }}",
        "{{ ('http://a ' * 1000) | urlize(rel='x' * 10000) }}",
        "{{ ([[1] * 1000] * 10000) | sum(start=[]) }}",
        "{{ ('x' * 10000) | truncate(100, end='y' * 999999) }}",
        "{{ {'a': '<' * 900000} | xmlattr }}",
        "{{ '\t'.expandtabs(999999) }}{{ '\t\t'.expandtabs(999999) }}",
        "{% for x0 in [[1]] %}" + doubled(18, "{% for X in [[Y, Y]] %}") + "{{ x18 | pprint }}" + "{% endfor %}" * 19,
    ],
)  # fmt: skip
def test_too_much_text(source: str) -> None:
    with pytest.raises(DataError, match=r"chat template chat\.jinja writes more than 1,000,000 characters"):
        render(source)


def test_what_a_call_is_given_alone_bounds_its_result() -> None:
    """Variables of the surrounding loop do not count."""
    source = "{% for m in messages %}{% set text = m.content %}{{ text.replace('x', 'y') }}{% endfor %}"
    template = ChatTemplate(source, "chat.jinja", {})
    assert template.render([{"role": "user", "content": "x" * 2000}]).text == "y" * 2000


@pytest.mark.parametrize(
    "source",
    [
        LOOP + "{{ 'Hi' * 1000 }}{% endfor %}",
        "{% set x %}" + LOOP + "x" * 1000 + "{% endfor %}{% endset %}",
        LOOP + "{% set x = ('x' * 1000)[1:] %}{% endfor %}",
        LOOP + "{% set x = ('x' * 1000) | upper %}{% endfor %}",
        LOOP + "{% set x = ('x' * 1000).title() %}{% endfor %}",
        "{% autoescape true %}" + LOOP + "{{ 'x' * 1000 }}{% endfor %}{% endautoescape %}",
    ],
)
def test_too_much_text_in_all(source: str) -> None:
    with pytest.raises(DataError, match=r"chat template chat\.jinja writes more than 5,000,000 characters"):
        render(source)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ '%999999999d' % 1 }}", "formats text to a width"),
        ("{{ '%0999999999d' % 1 }}", "formats text to a width"),
        ("{{ '%*d' % (10**9, 1) }}", "formats text to a width"),
        ("{{ '{:>{}}'.format(1, 999999999) }}", "formats text to a width"),
        ("{{ strftime_now('%999999d') }}", "formats text to a width"),
        ("{{ 9 ** 99999999 }}", "computes a number of too many digits"),
        ("{{ ('f' * 100000) | int(0, 16) }}", "computes a number of too many digits"),
        ("{{ messages | tojson(indent=10**9) }}", "gives tojson a number or text above 100"),
        ("{{ messages | tojson(indent='x' * 1000) }}", "gives tojson a number or text above 100"),
        ("{{ messages | tojson(separators=('x' * 1000, 'y')) }}", "gives tojson a number or text above 100"),
        ("{{ 1 | round(1000000000, 'ceil') }}", "gives round a number or text above 1,000"),
        ("{{ [] | slice(10**12) | list }}", "gives slice a number or text above 1,000,000"),
        ("{{ [1] | batch(10**9, 0) | list }}", "gives batch a number or text above 1,000,000"),
        ("{{ 1 | center(3000000000) }}", "gives center a number or text above 1,000,000"),
        ("{{ 'x'.center(10**9) }}", "gives center a number or text above 1,000,000"),
        ("{{ '1'.zfill(10**10) }}", "gives zfill a number or text above 1,000,000"),
        ("{{ '1'.ljust(10**10) }}", "gives ljust a number or text above 1,000,000"),
        ("{{ '\t'.expandtabs(10**9) }}", "gives expandtabs a number or text above 1,000,000"),
        ("{{ 'x\ny' | indent(10**9) }}", "gives indent a number or text above 1,000,000"),
        ("{% set x = 1 %}{{ x.to_bytes(10**10, 'big') }}", "gives to_bytes a number or text above 1,000,000"),
    ],
)
def test_too_wide(source: str, complaint: str) -> None:
    with pytest.raises(DataError, match=rf"chat template chat\.jinja {complaint}"):
        render(source)


def test_a_source_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"chat template chat\.jinja has 5,000,000 characters; one of at most 1,000,000"
    ):
        render("x" * 5_000_000)
    folder, file = make_folder(tmp_path / "model", None), tmp_path / "t.jinja"
    file.write_text("x" * MAX_SOURCE + "y")
    with pytest.raises(DataError, match=r"t\.jinja has 1,000,001 characters"):
        load_tokenizer(config(tokenizer=str(folder), chat_template=str(file)))


@pytest.mark.parametrize("source", ["{#" * 400_000, "{% raw %}" * 100_000, "{{ " + "(" * 400_000, "{% if 1 %}" * 9_000])
def test_sources_that_are_hard_to_read(source: str) -> None:
    template = ChatTemplate(source, "chat.jinja", {})
    assert not template.asks_for_date  # comments are removed in one pass
    with pytest.raises(Refused, match=r"chat template chat\.jinja cannot be read: "):
        template.render(CHAT)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("a\n{% for m in %}\nb", "cannot be read: Expected an expression, got 'end of statement block'@"),
        ("a\n{{ raise_exception('no roles') }}\nb", "refused the chat: no roles@"),
        ("{% macro f() %}\n{{ raise_exception('no') }}{% endmacro %}\n\n{{ f() }}", "refused the chat: no@"),
        ("a\n{{ messages[0].content + 1 }}", None),
        (f"a\n{{{{ raise_exception('no') }}}}{' ' * 900}x", "refused the chat: no@"),
    ],
)
def test_an_error_shows_its_line(source: str, complaint: str | None) -> None:
    with pytest.raises(Refused) as error:
        render(source)
    line = source.splitlines()[1]
    shown = line if len(line) <= 120 else line[:117] + "..."
    place = f"  (line 2: `{shown}`)"
    assert str(error.value).endswith(place) and len(str(error.value)) < 300
    if complaint is not None:
        assert str(error.value) == f"chat template chat.jinja {complaint.replace('@', place)}"


def test_a_reason_has_a_length() -> None:
    with pytest.raises(Refused) as error:
        render("{{ raise_exception('x' * 900000) }}")
    assert len(str(error.value)) < 1_000


def test_limits_are_for_one_rendering() -> None:
    """A rendering may use the limits up; the next one starts anew."""
    template = ChatTemplate("{{ 'x' * 1000000 }}", "chat.jinja", {})
    assert [len(template.render([]).text) for _ in range(3)] == [CHARACTERS] * 3


def test_memory_that_runs_out_is_no_refusal() -> None:
    """Memory depends on the machine, so a lack of it must not skip a row."""
    template = ChatTemplate("{{ x }}", "chat.jinja", {})
    sandbox, _ = template._compiled[0]

    def none_left(characters: int = 0) -> bool:
        raise MemoryError

    sandbox.tick = none_left  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        template.render([])


def test_what_templates_do() -> None:
    """Ordinary operations give the same results as in transformers."""
    source = """{%- set ns = namespace(n=0) -%}
    {%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}
        {%- if m.role is string and m['role'] == 'user' and not m.none -%}{{ bos_token ~ ns.n ~ m.content | trim }}
        {%- else -%}{{ '%s|%s' % (m.role, m.content.split('l')[-1]) + ' ' * 2 }}{%- continue -%}{%- endif -%}
    {%- endfor -%}{{ {'é': messages[0]} | tojson }}{{ ', '.join(['a', 'b']) }}
    {{- messages | map(attribute='role') | join }}{{ messages[1:][0].content[-2:][::-1] }}
    {{- '=' * 3 ~ messages | length }}
    {%- for m in messages[::-1] if m.content[:1] == 'H' recursive %}{{ loop.index ~ '/' ~ loop.length }}{% endfor %}"""
    expected = '<s>1Hiassistant|o  {"é": {"role": "user", "content": "Hi"}}a, buserassistantol===21/22/2'
    assert _compile_jinja_template(source).render(messages=CHAT, bos_token="<s>") == expected
    assert render(source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a' + 'b' + messages[0].content + '<' }}", "abHi<"),
        ("{{ 'a' + ('b' + messages[0].content) + 'c' }}", "abHic"),
        ("{{ 1 + 2 + 3 }},{{ 1 + 2.5 + 3 }},{{ messages | length + 1 + 1 }}", "6,6.5,4"),
        ("{{ [1] + ['a'] + messages[:1] }}", "[1, 'a', {'role': 'user', 'content': 'Hi'}]"),
        ("{{ '<' + ('<' | safe) + '<' }},{{ ('<' | safe) + '<' + '<' }}", "&lt;<&lt;,<&lt;&lt;"),
        ("{{ 'a' + '{}'.format(1) + 'b' + 'c'.upper() }}", "a1bC"),
    ],
)
def test_sums_of_several_values(source: str, expected: str) -> None:
    assert _compile_jinja_template(source).render(messages=CHAT) == expected
    assert render(source) == expected


@pytest.mark.parametrize("source", ["{{ 'a' + 1 + 'b' }}", "{{ 1 + 2 + 'a' }}", "{{ 'a' + none }}", "{{ 'a' + x }}"])
def test_sums_that_python_refuses(source: str) -> None:
    with pytest.raises(Refused):
        render(source)


def test_text_marked_safe() -> None:
    """As in transformers, a text marked safe escapes text that is added to it; with `autoescape`, all texts do."""
    source = (
        "{{ ('<' | safe) ~ '<' ~ ('<' | safe + '<') }}{% autoescape true %}{{ '<' }}{{ '<' ~ 1 }}{% endautoescape %}"
    )
    assert render(source) == _compile_jinja_template(source).render()
