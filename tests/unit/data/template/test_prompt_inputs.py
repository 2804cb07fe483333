"""The inputs on which the header of an answer depends: found in the template, and never fewer than the real ones."""

from itertools import chain
from pathlib import Path

import pytest
from jinja2 import Environment

from sft.data.chat import prompts
from sft.data.template.prompt_inputs import PromptInputs, prompt_inputs, shape
from sft.errors import DataError
from tests.unit.released_chats import CHATS
from tests.unit.released_templates import FAMILIES, NAMES, Model

NOTHING, SHAPES, TEXTS = PromptInputs

LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"
ASK = "{% if add_generation_prompt and not ns.f %}<a>{% endif %}"


def flag(body: str, first: str = "false") -> str:
    return f"{{% set ns = namespace(f={first}) %}}{{% for m in messages %}}{body}{{% endfor %}}{ASK}"


CASES = {
    "no header": (LOOP, NOTHING),
    "a constant": (LOOP + "{% if add_generation_prompt %}<a>{{ bos_token }}{% endif %}", NOTHING),
    "a variable": (LOOP + "{% if add_generation_prompt %}{% if think %}<a>{% endif %}{% endif %}", NOTHING),
    "a constant under a variable":
        ("{% set x = '<b>' if think else '<a>' %}{% if add_generation_prompt %}{{ x }}{% endif %}", NOTHING),
    "an if inside the loop":
        ("{% for m in messages %}{% if add_generation_prompt %}<a>{% endif %}{% endfor %}", SHAPES),
    "a text in the header": (LOOP + "{% if add_generation_prompt %}{{ messages[0].content }}{% endif %}", TEXTS),
    "a text in an else": ("{% if not add_generation_prompt %}{% else %}{{ messages[0].content }}{% endif %}", TEXTS),
    "a role": (LOOP + "{% if add_generation_prompt and messages[-1].role != 'tool' %}<a>{% endif %}", SHAPES),
    "an inline if": (LOOP + "{{ '<a>' if add_generation_prompt }}", TEXTS),
    "a flag of roles": (flag("{% if m['role'] == 'tool' %}{% set ns.f = true %}{% endif %}"), SHAPES),
    "a flag of keys": (flag("{% if 'tool_calls' in m %}{% set ns.f = true %}{% endif %}"), SHAPES),
    "a flag of values": (flag("{% if m.tool_calls %}{% set ns.f = true %}{% endif %}"), SHAPES),
    "a flag of null": (flag("{% if m['content'] is none %}{% set ns.f = true %}{% endif %}"), SHAPES),
    "a flag of get": (flag("{% if m.get('tool_calls') %}{% set ns.f = true %}{% endif %}"), SHAPES),
    "a flag of an inner loop": (flag("{% for c in m.tool_calls %}{% set ns.f = true %}{% endfor %}"), TEXTS),
    "a number of calls": (flag("{% for c in m.tool_calls %}{% set ns.f = not ns.f %}{% endfor %}"), TEXTS),
    "a flag of a place": (flag("{% if loop.first or loop.index0 > 2 %}{% set ns.f = true %}{% endif %}"), SHAPES),
    "the message before": (flag("{% set ns.f = loop.previtem %}"), TEXTS),
    "a namespace by another name":
        (flag("{% set ns.f = true %}") + "{% set b = ns %}{% set b.f = messages[0].content %}", TEXTS),
    "a flag of flags": (flag("{% if m.role == 'a' and not ns.f %}{% set ns.f = true %}{% endif %}"), SHAPES),
    "a flag of an else": (flag("{% if m.role == 'a' %}{% else %}{% set ns.f = true %}{% endif %}"), SHAPES),
    "a text": (flag("{% if m.content == 'x' %}{% set ns.f = true %}{% endif %}"), TEXTS),
    "a part of a text": (flag("{% if 'x' in m.content %}{% set ns.f = true %}{% endif %}"), TEXTS),
    "a text in an elif":
        (flag("{% if 'x' in m.content %}{% elif m.role == 'a' %}{% set ns.f = true %}{% endif %}"), TEXTS),
    "the else of a text": (flag("{% if 'x' in m.content %}{% else %}{% set ns.f = true %}{% endif %}"), TEXTS),
    "a text as value": (flag("{% set ns.f = m.content %}"), TEXTS),
    "a text as default": (flag("{% if (m.content or '') == 'x' %}{% set ns.f = true %}{% endif %}"), TEXTS),
    "the name of a call":
        (flag("{% for c in m.tool_calls %}{% if c.name == 'x' %}{% set ns.f = true %}{% endif %}{% endfor %}"), TEXTS),
    "a text first": (flag("", first="messages[0].content"), TEXTS),
    "a text by another name": (flag("{% set t = m.content %}{% if t == 'x' %}{% set ns.f = true %}{% endif %}"), TEXTS),
    "a jump": (flag("{% if m.content %}{% continue %}{% endif %}{% set ns.f = true %}"), TEXTS),
    "a loop with a filter": (flag("").replace("in messages", "in messages if m.content == 'x'"), NOTHING),
    "a flag in a loop with a filter":
        (flag("{% set ns.f = true %}").replace("in messages", "in messages if m.content == 'x'"), TEXTS),
    "other messages":
        ("{% set messages = messages[1:] %}" + flag("{% if m.role == 'a' %}{% set ns.f = 1 %}{% endif %}"), TEXTS),
    "a loop over others":
        (flag("{% if m.role %}{% set ns.f = true %}{% endif %}").replace("in messages", "in some(messages)"), TEXTS),
    "a macro":
        ("{% set ns = namespace(f=false) %}{% macro x(m) %}{% set ns.f = true %}{% endmacro %}{{ x(1) }}" + ASK, TEXTS),
    "a set block":
        ("{% set x %}{{ messages[0].content }}{% endset %}{% if add_generation_prompt %}{{ x }}{% endif %}", TEXTS),
    "a call": (LOOP + "{% if add_generation_prompt %}{{ header(messages) }}{% endif %}", TEXTS),
    "tools": (LOOP + "{% if add_generation_prompt %}{{ tools }}{% endif %}", TEXTS),
    "two loops by one name":
        ("{% for m in tools %}{% endfor %}" + flag("{% if m.role == 'a' %}{% set ns.f = true %}{% endif %}"), TEXTS),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_of_a_template(case: str) -> None:
    source, expected = CASES[case]
    tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    assert prompt_inputs(tree, {"bos_token", "think"}) is expected


def test_shape_written_out() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{}], "reasoning_content": ""}
    assert shape(message) == (
        "assistant", ("content", None), ("reasoning_content", False), ("role", True), ("tool_calls", True),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
def test_remembered_prompts_change_no_mask(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All chats with one tokenizer, in both orders, give the same masks as each chat with a tokenizer without cached
    prompts."""
    family = FAMILIES[NAMES.index(name)]
    model = Model(tmp_path, name, family)
    assert model.ours.template.prompt_inputs is SHAPES
    shared: dict[str, list[object]] = {}
    for chat in chain(CHATS, reversed(CHATS)):
        shared.setdefault(chat, []).append(_masked(model, chat))
    assert len(model.ours.prompts._cached) > 5
    monkeypatch.setattr(prompts, "_MOST", 0)
    alone = Model(tmp_path / "alone", name, family)
    for chat, found in shared.items():
        assert found == [_masked(alone, chat)] * 2, chat
    assert sum(found[0] is not None for found in shared.values()) > 3 and not alone.ours.prompts._cached


def _masked(model: Model, chat: str) -> tuple[list[int], list[float]] | None:
    try:
        encoded = model.encoded(chat)
    except DataError:
        return None
    return encoded.tokens.tolist(), encoded.weights.tolist()
