"""Loops over indices that end early: a result that is written again equals a rendering by itself."""

from typing import Any

import pytest
from jinja2 import nodes

from sft.data.template.chat_template import ChatTemplate
from sft.data.template.iterations import repeated
from sft.data.template.replay import KeptResults
from sft.data.template.sandbox import Sandbox
from sft.data.template.scans import IndexScan
from tests.unit.data.template.replaying import both

# c0 .. c9; a scan from one user to the next passes one message, two or none.
CHAT: list[dict[str, Any]] = [
    {"role": role, "content": f"c{i}"}
    for i, role in enumerate("user tool user tool tool user user tool user tool".split())
]
EACH = "{% for m in messages %}{{ m.content }}{% set ns = namespace(stop=false, n=0) %}"
END = "{{ ns.n }}{{ ns.stop }};{% endfor %}"
NEXT = "{% for k in range(loop.index0 + 1, messages | length) %}"
SET = "{% set ns.stop = true %}"
USER = "messages[k].role == 'user'"
COUNT = "{{ messages[k].content }}{% set ns.n = ns.n + 1 %}"
FIRST = "{% if ns.stop %}{% elif " + USER + " %}" + SET + "{% else %}" + COUNT + "{% endif %}{% endfor %}"
INSIDE = "{% if not ns.stop %}{% if " + USER + " %}" + SET + "{% else %}" + COUNT + "{% endif %}{% endif %}{% endfor %}"

# Loops that depend on the items up to the first user, and the number of iterations of the chat's loop that are executed
SCANS = {
    "flag first": EACH + NEXT + FIRST + END,
    "flag negated": EACH + NEXT + INSIDE + END,
    "index": EACH + NEXT + FIRST.replace(COUNT, COUNT + "{{ k }}") + END,
    "item by a name": EACH + NEXT + FIRST.replace(COUNT, "{% set o = messages[k] %}{{ o.content }}") + END,
    "another list": "{% set l = messages[1:] %}" + (EACH + NEXT + FIRST + END).replace("messages", "l"),
    "backwards": EACH + "{% for k in range(loop.index0 - 1, -1, -1) %}" + FIRST + END,
    "two scans": EACH + NEXT + FIRST + NEXT + INSIDE + END,
}
# Loops that look like these and depend on more
HIDDEN = {
    "last of the scan": EACH + NEXT + FIRST.replace(COUNT, "{{ loop.last }}") + END,
    "length of the scan": EACH + NEXT + FIRST.replace("{% if ns.stop %}", "{% if ns.stop %}{{ loop.length }}") + END,
    "length of an iteration": EACH + NEXT + FIRST.replace(COUNT, "{{ loop.length }}") + END,
    "condition on a local name": EACH + "{% set x = true %}" + NEXT + FIRST.replace(USER, USER + " and not x") + END,
    "end that the loop changes": "{% set e = 0 %}"
    + EACH
    + "{% set e = messages | length %}"
    + NEXT.replace("messages | length", "e")
    + FIRST
    + END,
    "text after the stop": EACH + NEXT + FIRST.replace("{% if ns.stop %}", "{% if ns.stop %} ") + END,
    "text of each iteration": EACH + NEXT + "." + FIRST + END,
    "text after the condition": EACH + NEXT + FIRST.replace("{% endif %}", "{% endif %}.") + END,
    "change after the stop": EACH + NEXT + FIRST.replace("stop %}{% elif", "stop %}{% set ns.n = k %}{% elif") + END,
    "else after the stop": EACH
    + NEXT
    + INSIDE.replace("{% endif %}{% endfor %}", "{% else %}{{ k }}{% endif %}{% endfor %}")
    + END,
    "flag that falls": EACH
    + NEXT
    + INSIDE.replace(SET, SET + "{% if k < 5 %}{% set ns.stop = false %}{% endif %}")
    + END,
    "flag that is computed": EACH + NEXT + INSIDE.replace("stop = true", "stop = k > 4") + END,
    "flag under another name": "{% set all = namespace(stop=false, n=0) %}"
    + EACH.replace("namespace(stop=false, n=0)", "all")
    + NEXT
    + INSIDE.replace(SET, SET + "{% set all.stop = false %}")
    + END,
    "flag of a macro": "{% set ns = namespace(stop=false, n=0) %}{% macro f() %}{% set ns.stop = false %}{% endmacro %}"
    + "{% for m in messages %}{{ m.content }}"
    + NEXT
    + INSIDE.replace(SET, SET + "{{ f() }}")
    + END,
    "new namespace": EACH + NEXT + INSIDE.replace(SET, SET + "{% set ns = namespace(stop=false, n=k) %}") + END,
    "continue": EACH
    + NEXT
    + INSIDE.replace("stop %}{% if", "stop %}{% if k < 4 %}{% continue %}{% endif %}{% if")
    + END,
    "continue before the flag": EACH
    + NEXT
    + INSIDE.replace(SET, "{% if k < 4 %}{% continue %}{% endif %}" + SET)
    + END,
    "break": EACH + NEXT + INSIDE.replace(COUNT, COUNT + "{% if k > 3 %}{% break %}{% endif %}") + END,
    "flag in an inner condition": EACH + NEXT + INSIDE.replace(SET, "{% if k > 4 %}" + SET + "{% endif %}") + END,
    "second condition": EACH + NEXT + FIRST.replace("{% elif", "{% elif k < 5 %}x{% elif", 1) + END,
    "condition on the index": EACH + NEXT + FIRST.replace(USER, "k > 4") + END,
    "condition on all": EACH + NEXT + FIRST.replace(USER, USER + " and messages | length > 6") + END,
    "condition on the last": EACH + NEXT + FIRST.replace(USER, "messages[-1].role == messages[k].role") + END,
    "condition on the flag": EACH + NEXT + FIRST.replace(USER, "ns.n > 1") + END,
    "all messages inside": EACH + NEXT + FIRST.replace(COUNT, "{{ messages | length }}") + END,
    "message beyond": EACH + NEXT + FIRST.replace(COUNT, "{{ (messages[k + 3] or m).content }}") + END,
    "last message inside": EACH + NEXT + FIRST.replace(COUNT, "{{ messages[-1].content }}") + END,
    "from the end": EACH + "{% for k in range(messages | length - 1, loop.index0, -1) %}" + FIRST + END,
    "below zero": EACH + "{% for k in range(loop.index0 - 1, -3, -1) %}" + FIRST + END,
    "beyond the end": EACH
    + NEXT.replace("length)", "length + 1)")
    + FIRST.replace(USER, USER + " or not messages[k]")
    + END,
    "steps": EACH + NEXT.replace("length)", "length, 2)") + FIRST + END,
    "no flag": EACH + NEXT + COUNT + "{% endfor %}" + END,
    "flag that stays": EACH + NEXT + FIRST.replace(SET, "x") + END,
    "set before": EACH + "{% if messages | length > 5 %}" + SET + "{% endif %}" + NEXT + FIRST + END,
    "name of the list": EACH + "{% set l = messages %}" + (NEXT + FIRST).replace("messages", "l") + END,
    "name that the loop changes": "{% set l = messages %}"
    + EACH
    + (NEXT + FIRST.replace(COUNT, "{% set l = messages %}")).replace("messages", "l")
    + END,
    "list that grows": "{% set l = [] %}"
    + EACH
    + "{% set _ = l.append(m) %}"
    + (NEXT + FIRST).replace("messages", "l").replace("loop.index0 + 1", "0")
    + END,
    "list of texts": "{% set l = messages | map(attribute='role') | list %}"
    + EACH
    + (NEXT + FIRST).replace("messages", "l").replace("l[k].role", "l[k]").replace("l[k].content", "l[k]")
    + END,
    "another range": "{% macro range(a, b) %}{{ b }}{% endmacro %}"
    + EACH
    + NEXT
    + "{{ messages[0].role }}{% endfor %}"
    + END,
    "index of an inner loop": EACH
    + NEXT
    + FIRST.replace(COUNT, "{% for k in [0] %}{{ messages[k].content }}{% endfor %}")
    + END,
    "else of the loop": EACH + NEXT + FIRST.replace("{% endfor %}", "{% else %}none{% endfor %}") + END,
    "test of the loop": EACH + NEXT.replace(" %}", " if k < 5 %}") + FIRST + END,
    "in a macro": "{% macro f(m, i) %}{% set ns = namespace(stop=false, n=0) %}"
    + (NEXT + FIRST).replace("loop.index0", "i")
    + "{{ ns.n }}{% endmacro %}{% for m in messages %}{{ m.content }}{{ f(m, loop.index0) }}{% endfor %}",
}


@pytest.mark.parametrize("case", [*SCANS, *HIDDEN])
def test_renderings_are_equal(case: str) -> None:
    for alone, again in both((SCANS | HIDDEN)[case], CHAT, None, KeptResults()):
        assert alone == again


@pytest.mark.parametrize("case", SCANS)
def test_a_scan_runs_once_for_each_end(case: str) -> None:
    """20 renderings of 1 to 10 messages have 110 iterations.  A message is executed for each one up to the next user.

    The next users after messages 0 to 9 are 2 2 5 5 5 6 8 8 and none: 3 + 2 + 4 + 3 + 2 + 2 + 3 + 2 + 2 + 1 = 24.
    """
    kept = KeptResults()
    for _ in both(SCANS[case], CHAT, None, kept):
        pass
    runs, all_runs = {"backwards": (10, 110), "another list": (21, 90)}.get(case, (24, 110))
    assert (kept.executed, kept.replayed) == (runs, all_runs - runs)


@pytest.mark.parametrize(("case", "stops"), [("flag first", True), ("flag negated", True), ("no flag", False)])
def test_the_key_of_a_scan(case: str, stops: bool) -> None:
    tree = Sandbox("2026-01-01").parse((SCANS | HIDDEN)[case])
    [(_, reads)] = repeated(tree)
    [scan] = [key for key in reads.keys if isinstance(key, IndexScan)]
    assert (scan.items.name, scan.target) == ("messages", "k")
    assert isinstance(scan.stops, nodes.Compare) == stops and "messages" not in reads.names


def test_a_template_with_a_scan_is_executed_where_it_raises() -> None:
    source = EACH + NEXT + FIRST.replace(COUNT, "{{ raise_exception('no') }}") + END
    kept = KeptResults()
    results = [alone for alone, again in both(source, CHAT, None, kept) if alone == again]
    assert len(results) == 20 and any(isinstance(result, str) for result in results)
    assert ChatTemplate(source, "t", {}).render(CHAT[:1]).text == "c00False;"
