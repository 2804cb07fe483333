"""Renderings of a chat up to each of its turns: with kept results of statements, each equals a rendering by itself, and
the characters that the template writes grow linearly with turns."""

from typing import Any

import pytest

from sft.data.template import replay
from sft.data.template.chat_template import ChatTemplate
from sft.data.template.rendering import trace_inputs
from sft.data.template.replay import KeptResults
from tests.unit.data.template.replaying import both
from tests.unit.data.traces import TOOLS, trace
from tests.unit.fixtures.folder import template as fixture
from tests.unit.released_chats import Message, for_transformers
from tests.unit.released_templates import FAMILIES, template

SMALL = [{"role": "system", "content": "S"}, *trace(3, 2)]
CHAT: list[Message] = [
    {"role": "user" if i % 2 == 0 else "assistant", "content": f"c{i}", "reasoning_content": f"r{i}"} for i in range(8)
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.template)
def test_renderings_of_released_templates_are_equal(family: Any) -> None:
    messages, kept = for_transformers(SMALL, as_text=family.as_text), KeptResults()
    for alone, again in both(template(family.template), messages, TOOLS, kept):
        assert alone == again
    for alone, again in both(template(family.template), CHAT, None, KeptResults()):
        assert alone == again


# Characters that the template writes, as multiples of the longest rendering's.  A message is written again where a
# template drops its thinking, and where it is the last one.  gpt-oss and Kimi drop all thinking at an answer, so no
# single rendering has all that is written.
MOST = {
    "qwen3": (1.8, 4.3),
    "qwen3_8": (1.8, 1.8),
    "glm4moe": (1.1, 3.0),
    "gptoss": (4.9, 5.2),
    "deepseekv3": (1.0, 1.0),
    "qwen3_5_think": (1.8, 4.3),
    "gemma4": (1.8, 4.4),
    "gemma4_v5": (1.8, 4.6),
}
FIXTURES = {"kimi": (3.0, 3.0), "minimax": (1.8, 4.6), "deepseek_v31": (1.1, 1.1)}


@pytest.mark.parametrize("name", [*MOST, *FIXTURES])
@pytest.mark.parametrize("which", ["one", "many"])
def test_characters_grow_linearly(name: str, which: str) -> None:
    """32, 60 and 120 turns.  Separate renderings would write 16 to 120 times the longest one."""
    source = fixture(name) if name in FIXTURES else template(name)
    as_text = any(family.template == name and family.as_text for family in FAMILIES)
    most = {**MOST, **FIXTURES}[name][which == "many"]
    for num_turns in (32, 60, 120):
        messages = trace(1, num_turns - 1) if which == "one" else trace(num_turns // 4)
        made, kept = ChatTemplate(source, "t", {}), KeptResults()
        inputs = trace_inputs(for_transformers(messages, as_text=as_text), TOOLS, None, {})
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        assert len(turns) == num_turns
        for turn in turns:
            longest = made.rendered(inputs._replace(messages=inputs.messages[: turn + 1]), kept=kept)
        assert kept.written <= most * len(longest.text), (num_turns, kept.written / len(longest.text))


LAST = "{% for m in messages %}{{ m.content }}"
LOOP = LAST + "{% endfor %}"
WITH_NS = "{% set ns = namespace(n=0, l=[]) %}"
TRICKY = {
    "last": LAST + "{% if loop.last %}!{% endif %}{% endfor %}",
    "length": LAST + "{{ loop.length }}{{ loop.revindex }}{% endfor %}",
    "next": LAST + "{{ (loop.nextitem or m).content }}{{ (loop.previtem or m).content }}{% endfor %}",
    "item": LAST + "{{ messages[loop.index0 - 1].content }}{{ (messages[loop.index0 + 2] or m).content }}{% endfor %}",
    "end": LAST + "{{ messages[-1].content }}{{ messages | length }}{% endfor %}",
    "slice": LAST + "{{ messages[loop.index:] | length }}{% endfor %}",
    "behind": "{% set rest = messages[1:] %}{% for m in rest %}{{ m.content }}{{ messages[loop.index0 - 1].content }}"
    "{{ (rest[loop.index0 + 1] or m).content }}{% endfor %}",
    "the first one decides": WITH_NS
    + LAST
    + "{% if loop.first %}{% set ns.n = messages[loop.index0 - 1].content %}{% endif %}{{ ns.n }}{% endfor %}",
    "all": LAST + "{% for o in messages %}{{ o.role }}{% endfor %}{% endfor %}",
    "query": LAST + "{% set f = namespace(x=1) %}{% for o in messages[loop.index:] %}{% if o.content == 'c5' %}"
    "{% set f.x = 2 %}{% elif o.content == 'c3' %}{% set f.x = 3 %}{% endif %}{% endfor %}{{ f.x }}{% endfor %}",
    "count": WITH_NS + LAST + "{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}{{ ns.n }}",
    "changed before it is read": WITH_NS
    + LAST
    + "{% if ns.n > 2 %}a{% endif %}{% set ns.n = ns.n + 1 %}{% if ns.n > 2 %}b{% endif %}{% endfor %}",
    "reverse": WITH_NS + "{% for m in messages[::-1] %}{% set ns.n = ns.n + loop.index0 %}{% endfor %}" + LAST
    # a decision that changes with every message
    + "{{ loop.index0 > ns.n - 3 }}{% endfor %}",
    "alias": WITH_NS + LAST + "{% set a = ns %}{% set a.n = a.n + 1 %}{{ ns.n }}{% endfor %}",
    "alias of a macro": WITH_NS
    + "{% macro f(x) %}{% set x.n = x.n + 1 %}{% endmacro %}"
    + LAST
    + "{{ f(ns) }}{{ ns.n }}{% endfor %}",
    "macro": WITH_NS
    + "{% macro f() %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ messages | length }}{% endmacro %}"
    + LAST
    + "{{ f() }}{% endfor %}{{ f() }}",
    "macro's own name": WITH_NS
    + "{% macro f(x) %}{% set ns = namespace(n=x) %}{{ ns.n }}{% endmacro %}"
    + LAST
    + "{% set ns.n = ns.n + 1 %}{{ f(5) }}{{ ns.n }}{% endfor %}",
    "list": WITH_NS + LAST + "{% set _ = ns.l.append(m.content) %}{{ ns.l | join }}{% endfor %}{{ ns.l | length }}",
    "two names of a list": WITH_NS
    + "{% set l = ns.l %}"
    + LAST
    + "{% set _ = ns.l.append(loop.index) %}{{ l | length }}{% if l | length > 3 %}x{% endif %}{% endfor %}",
    "names of a list that part": WITH_NS
    + "{% if messages | length > 4 %}{% set l = ns.l %}{% else %}{% set l = [] %}{% endif %}"
    + LAST
    + "{% set _ = ns.l.append(1) %}{% if l | length > 1 %}x{% endif %}{% endfor %}",
    "list of the loop": "{% set l = [1, 2] %}{% for i in l %}{{ i }}{{ loop.last }}"
    "{% if l | length < messages | length %}{% set _ = l.append(i + 2) %}{% endif %}{% endfor %}",
    "method by another way": WITH_NS + LAST + "{% set f = ns.l['append'] %}{{ f(1) }}{{ ns.l | length }}{% endfor %}",
    "cycle": "{% set c = cycler('a', 'b') %}" + LAST + "{{ c.next() }}{{ loop.cycle('x', 'y', 'z') }}{% endfor %}",
    "changed": LAST + "{{ loop.changed(m.role) }}{% endfor %}",
    "joiner": "{% set j = joiner(',') %}" + LAST + "{{ j() }}{% endfor %}",
    "break": LAST
    + "{% if loop.index0 == 4 %}{% break %}{% endif %}{% if m.content == 'c2' %}{% continue %}{% endif %}-"
    "{% endfor %}",
    "else": "{% for m in messages[5:] %}{{ m.content }}{% else %}none{% endfor %}",
    "test": WITH_NS
    + "{% for m in messages if ns.n < 3 %}{{ m.content }}{% set ns.n = ns.n + 1 %}{{ loop.last }}{% endfor %}",
    "prompt": LAST + "{% if loop.last and not add_generation_prompt %}.{% endif %}{% endfor %}",
    "assigned later": LAST + "{{ sep }}{% endfor %}{% set sep = 'z' %}{{ sep }}",
    "assigned in another loop": "{% for m in messages %}{% set sep = 1 %}{% endfor %}" + LAST + "{{ sep }}{% endfor %}",
    "local name": LAST + "{% if loop.first %}{% set sep = 'y' %}{% endif %}{{ sep }}{% endfor %}",
    "true is not one": WITH_NS
    + "{% set ns.n = true if messages | length > 3 else 1 %}"
    + LAST
    + "{{ ns.n }}{% endfor %}",
    "equal texts": "{% set x = messages[0].role if messages | length > 3 else 'user' %}" + LAST + "{{ x }}{% endfor %}",
    "raises": LAST + "{% if messages | length == 5 %}{{ raise_exception('no') }}{% endif %}{% endfor %}",
    "key that raises": WITH_NS
    + LAST
    + "{% if m.content == 'c9' and loop.index0 > ns.none.x %}x{% endif %}{% endfor %}",
    "set block": LAST + "{% set t %}{{ m.role }}{{ loop.index }}{% endset %}{{ t | upper }}{% endfor %}",
    "text": WITH_NS + "{% set ns.n = messages | length %}{{ messages | map(attribute='role') | join(ns.n | string) }}",
    "twice": LOOP + LOOP,
}


TWO = "{% set a = namespace(x='0') %}{% set c = namespace(x='0') %}"
SHARES = TWO + "{% set b = a if add_generation_prompt else c %}"
CHANGES_A = "{% macro f() %}{% set a.x = '1' %}{% endmacro %}"
FIND = "{% if o.role == 'assistant' %}{% set q.v = 1 %}{% endif %}{% endfor %}{{ q.v }}{% endfor %}"
MACRO = "{% macro f(m) %}A{{ m.content }}{% endmacro %}"
CALLS = "{% for m in messages %}{{ f(m) }}{% endfor %}"
SEARCH = "{% if 'assistant' in it %}A{% endif %}{% endfor %}"
# What a template changes under one name and reads under another, and other values that change without notice.
HIDDEN = {
    "shared namespace": SHARES + LAST + "{% set a.x = '1' %}{{ b.x }}{% endfor %}",
    "shared by length": TWO
    + "{% set b = a if messages | length > 2 else c %}"
    + LAST
    + "{% set a.x = '1' %}{{ b.x | upper }}{% endfor %}",
    "shared, both changed": SHARES.replace("'0'", "0")
    + LAST
    + "{% set a.x = a.x + 1 %}{% set b.x = b.x + 1 %}{{ a.x }}{% endfor %}",
    "shared in a macro": SHARES + CHANGES_A + LAST + "{{ f() }}{{ b.x }}{% endfor %}",
    "shared in a text": SHARES + CHANGES_A + "{{ f() }}{{ b.x }}",
    "shared in a namespace": TWO
    + "{% set h = namespace(v=a if add_generation_prompt else c) %}"
    + LAST
    + "{% set a.x = '1' %}{% if h.v.x == '1' %}y{% endif %}{% endfor %}",
    "order of attributes": "{% set ns = namespace() %}"
    + LAST
    + "{% if loop.last %}{% set ns.b = 1 %}{% endif %}{% set ns.a = 1 %}{% set ns.b = 1 %}{% endfor %}{{ ns }}",
    "macro under a condition": "{% if not add_generation_prompt %}" + MACRO + "{% endif %}" + CALLS,
    "default of a macro": WITH_NS
    + "{% macro g() %}{% set ns.n = ns.n + 1 %}{% endmacro %}{% macro f(m, x=g()) %}{{ ns.n }}{% endmacro %}"
    + CALLS
    + "{{ ns.n }}",
    "default changes a list": "{% set l = [] %}{% macro f(m, x=l.append(1)) %}{{ l | length }}{% endmacro %}"
    + CALLS
    + "{{ l | length }}",
    "writer of a query": LAST
    + "{% set q = namespace(v='n') %}{% for o in messages[loop.index:] %}"
    + FIND.replace("1", "'y'"),
    "text of a query": LAST + "{% set q = namespace(v=0) %}{% for o in messages[loop.index:] %} " + FIND,
    "writer of a text": "{% for m in [messages[-1], 'x'] %}{% if m is string %}{{ m | upper }}{% endif %}{% endfor %}",
    "writer after skipped messages": "{% for m in messages + ['x', 'y'] %}{% if m is string %}Y{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}",
    "list in a tuple": WITH_NS
    + LAST
    + "{% set ns.n = ([],) %}{% endfor %}"
    + LAST
    + "{% set _ = ns.n[0].append(1) %}{{ ns.n[0] | length }}{% endfor %}",
    "list in a list": "{% set ns = namespace(l=[[0]]) %}"
    + LAST
    + "{% set _ = ns.l.append(1) %}{% endfor %}"
    + LAST
    + "{% set _ = ns.l[0].append(1) %}{{ ns.l[0] | length }}{% endfor %}",
    "loop after an inner one": LAST + "{% for x in [] %}{% else %}{{ loop.last }}{% endfor %}{% endfor %}",
    "loop in a test": LAST + "{% for x in [1] if loop.last %}{{ x }}{% endfor %}{% endfor %}",
    "name of the loop": "{% set loop = messages[-1] %}{{ loop.content | upper }}",
    "iterator": "{% set it = messages | map(attribute='role') %}" + LAST + SEARCH,
    "iterator in a test": "{% set it = messages | map(attribute='role') %}"
    + LAST
    + SEARCH.replace("in it", "is in(it)"),
    "iterator in a namespace": "{% set ns = namespace(it=messages | map(attribute='role')) %}"
    + LAST
    + SEARCH.replace("in it", "in ns.it"),
    "iterator before": "{% for g in [messages | map(attribute='role'), 1] %}"
    "{% if loop.previtem and 'user' in loop.previtem %}A{% endif %}{{ loop.index }}{% endfor %}",
}


@pytest.mark.parametrize("case", [*TRICKY, *HIDDEN])
def test_tricky_templates_are_equal(case: str) -> None:
    for alone, again in both((TRICKY | HIDDEN)[case], CHAT, TOOLS, KeptResults()):
        assert alone == again


def test_what_is_executed() -> None:
    """8 messages, rendered up to each, with and without a prompt."""
    kept = KeptResults()
    assert all(a == b for a, b in both(TRICKY["last"], CHAT, None, kept))
    assert (kept.executed, kept.replayed) == (15, 57)  # each message as the last one, all but one as another; 72 in all
    kept = KeptResults()
    assert all(a == b for a, b in both(TRICKY["end"], CHAT, None, kept))
    assert (kept.executed, kept.replayed) == (36, 36)  # only the prompt repeats the chat


def test_characters_that_are_written_again_count_once() -> None:
    """8 messages as the last one, of 3 characters, and 7 as another, of 2: 38, of 80 in all renderings."""
    made, kept, inputs = ChatTemplate(TRICKY["last"], "t", {}), KeptResults(), trace_inputs(CHAT, None, None, {})
    lengths = [
        len(made.rendered(inputs._replace(messages=inputs.messages[:stop]), kept=kept).text) for stop in range(1, 9)
    ]
    assert (sum(lengths), made.meter.characters, kept.written, kept.copied) == (80, 38, 38, 42)
    made.rendered(inputs)
    assert made.meter.characters == 38 + 17


def test_results_that_never_help_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "TRIES", 5)
    kept = KeptResults()
    made = ChatTemplate(TRICKY["end"], "t", {})
    inputs = trace_inputs(CHAT, None, None, {})
    for stop in range(1, 9):
        made.rendered(inputs._replace(messages=inputs.messages[:stop]), kept=kept)
    assert kept.executed == 36 and len(kept.results) == 6  # the results of the first three renderings


def test_kept_characters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_KEPT", 5)
    kept = KeptResults()
    assert all(a == b for a, b in both(TRICKY["last"], CHAT, None, kept))
    assert sum(len(result.text) for result in kept.results.values()) <= 5
