"""Chats and templates that users of this trainer and of others reported, with the supervised text as a literal.

[[ ]] surrounds supervised text.  The templates are small, and have the shape of the reported ones.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft.data.chat.encode_chat import Encoding, encode_row
from sft.data.chat.omitted import find_omitted
from sft.data.chat.tokenizer import FolderTokenizer
from sft.data.rows.formats import read_row
from sft.errors import DataError
from tests.unit.fixtures.chats import assistant as answer
from tests.unit.fixtures.chats import user
from tests.unit.fixtures.folder import config, open_folder
from tests.unit.fixtures.model_folder import Tokens, marked, write_folder

Make = Callable[..., "Reported"]
CHATML = Tokens(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("<think>", "</think>", "<call>"), "<|im_end|>")
TALK = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
TOOLS = [{"type": "function", "function": {"name": "rain", "description": "rain of a day", "parameters": {}}}]


def call(arguments: Any, text: str | None = "", **more: Any) -> dict[str, Any]:
    function = {"name": "rain", "arguments": arguments}
    return answer(text, tool_calls=[{"id": "c1", "type": "function", "function": function}], **more)


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "c1"}


class Reported:
    """A tokenizer folder with a template."""

    def __init__(self, folder: Path, tokens: Tokens, template: str, **data: Any) -> None:
        self.tokens, self.folder, self.data = tokens, write_folder(folder, tokens, template), data

    @property
    def tokenizer(self) -> FolderTokenizer:
        return open_folder(self.folder, **self.data)

    def encoded(self, row: dict[str, Any] | list[dict[str, Any]], *, inserted: bool = True) -> Encoding:
        row = {"messages": row} if isinstance(row, list) else row
        return encode_row(read_row(row), self.tokenizer, config(supervise_inserted=inserted))

    def text(self, row: dict[str, Any] | list[dict[str, Any]], *, inserted: bool = True) -> str:
        encoding = self.encoded(row, inserted=inserted)
        return marked(encoding.tokens.tolist(), encoding.weights.tolist(), self.tokens)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(template: str, tokens: Tokens = CHATML, **data: Any) -> Reported:
        return Reported(tmp_path / "model", tokens, template, **data)

    return made


# F1: gpt-oss

HARMONY_TOKENS = Tokens(
    ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
    eos="<|return|>",
    stops=("<|return|>", "<|call|>"),
)
HARMONY = """{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|start|>assistant' }}GEN
{%- if m.thinking and loop.last %}
{{- '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{%- endif %}
{{- '<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}END
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
MARKS = ("{% generation %}", "{% endgeneration %}")


@pytest.mark.parametrize("marks", [("", ""), MARKS], ids=["plain", "marked"])
def test_harmony_with_several_turns_and_with_reasoning(make: Make, marks: tuple[str, str]) -> None:
    model = make(HARMONY.replace("GEN", marks[0]).replace("END", marks[1]), HARMONY_TOKENS)
    assert model.text([user("2+2?"), answer("4"), user("3+3?"), answer("6")]) == (
        "<|start|>user<|message|>2+2?<|end|><|start|>assistant[[<|channel|>final<|message|>4]]<|end|>"
        "<|start|>user<|message|>3+3?<|end|><|start|>assistant[[<|channel|>final<|message|>6<|return|>]]"
    )
    assert model.text([user("2+2?"), answer("4", thinking="sum")]) == (
        "<|start|>user<|message|>2+2?<|end|><|start|>assistant[[<|channel|>analysis<|message|>sum<|end|>"
        "<|start|>assistant<|channel|>final<|message|>4<|return|>]]"
    )


# F2: GLM

GLM_TOKENS = Tokens(
    ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    eos="<|endoftext|>",
    stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
)
GLM = """{%- for m in messages %}{{- '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{- '\ncall ' + c.function.name + (c.function.arguments | tojson) }}{%- endfor %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"""


def test_a_template_without_ends_of_turns(make: Make) -> None:
    model = make(GLM, GLM_TOKENS)
    assert model.text([user("2+2?"), answer("4"), user("3+3?"), answer("6")]) == (
        "<|user|>\n2+2?<|assistant|>\n[[4<|user|>]]\n3+3?<|assistant|>\n[[6<|user|>]]"
    )
    assert model.text([user("Rain?"), call({}), result("no"), answer("No.")]) == (
        "<|user|>\nRain?<|assistant|>\n[[\ncall rain{}<|observation|>]]\nno<|assistant|>\n[[No.<|user|>]]"
    )
    assert model.text([user("Rain?"), call({})]) == "<|user|>\nRain?<|assistant|>\n[[\ncall rain{}<|observation|>]]"


def test_an_answer_after_an_answer_hands_nothing_over(make: Make) -> None:
    """No server stops at the header of an answer, so the model need not write this header."""
    assert make(GLM, GLM_TOKENS).text([user("2+2?"), answer("4"), answer("Four.")]) == (
        "<|user|>\n2+2?<|assistant|>\n[[4]]<|assistant|>\n[[Four.<|user|>]]"
    )


# F3: DeepSeek

JOINED = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{- '<call>' + c.function.name + ' ' + c.function.arguments }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


@pytest.mark.parametrize("arguments", ['{"day": "Monday"}', {"day": "Monday"}], ids=["text", "object"])
def test_a_template_that_joins_arguments_as_text(make: Make, arguments: object) -> None:
    assert make(JOINED).text([user("Rain?"), call(arguments)]) == (
        '<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n[[<call>rain {"day": "Monday"}<|im_end|>]]\n'
    )


# F4: MiniMax-M2, Mistral

ORDERED = """{%- set ns = namespace(call=false) %}{%- for m in messages %}{%- if m.role == 'assistant' %}
{%- set ns.call = true if m.tool_calls else false %}{{- '<|im_start|>assistant\n' }}
{{- ('<think>\n' + m.reasoning_content + '\n</think>\n' if m.reasoning_content else '') + m.content }}
{%- for c in m.tool_calls or [] %}{{- '<call>' + c.function.name + ' ' + (c.function.arguments | tojson) }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- else %}{%- if m.role == 'tool' and not ns.call %}{{- raise_exception('no call') }}{%- endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""


def test_a_template_that_wants_a_call_before_a_result(make: Make) -> None:
    chat = [
        user("Rain?"),
        call({"day": 1}, reasoning_content="look"),
        result("no"),
        answer("No.", reasoning_content="so"),
    ]
    assert make(ORDERED).text(chat) == (
        "<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n<think>\n"
        '[[look\n</think>\n<call>rain {"day": 1}<|im_end|>]]\n<|im_start|>tool\nno<|im_end|>\n'
        "<|im_start|>assistant\n<think>\n[[so\n</think>\nNo.<|im_end|>]]\n"
    )
    plain = [user("Rain?"), call({"day": 1}, "I look."), result("no"), answer("No.")]
    assert make(ORDERED).text(plain) == (
        "<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n"
        '[[I look.<call>rain {"day": 1}<|im_end|>]]\n<|im_start|>tool\nno<|im_end|>\n'
        "<|im_start|>assistant\n[[No.<|im_end|>]]\n"
    )


# F5 and F19: marks that begin with text of the prompt, and text after the prompt

THINKER = """{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}GEN
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' if ns.last < loop.index0 }}
{{- m.content + '<|im_end|>' }}END
{{- '\n' }}{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""


@pytest.mark.parametrize("marks", [("", ""), MARKS], ids=["plain", "marked"])
def test_marks_that_begin_with_text_of_the_prompt(make: Make, marks: tuple[str, str]) -> None:
    model = make(THINKER.replace("GEN", marks[0]).replace("END", marks[1]))
    before = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert model.text([user("2+2?"), answer("4", reasoning_content="sum")]) == (
        f"{before}[[sum\n</think>\n\n4<|im_end|>]]\n"
    )
    assert model.text([user("2+2?"), answer("4")]) == f"{before}[[\n</think>\n\n4<|im_end|>]]\n"


def test_text_that_the_template_inserts_after_the_prompt(make: Make) -> None:
    model = make(THINKER.replace("GEN", "").replace("END", ""))
    before = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert model.text([user("2+2?"), answer("4")], inserted=False) == f"{before}\n</think>\n\n[[4<|im_end|>]]\n"


def test_harmony_s_channel_is_inserted(make: Make) -> None:
    model = make(HARMONY.replace("GEN", "").replace("END", ""), HARMONY_TOKENS)
    assert model.text([user("2+2?"), answer("4")], inserted=False) == (
        "<|start|>user<|message|>2+2?<|end|><|start|>assistant<|channel|>final<|message|>[[4<|return|>]]"
    )


# Separators only between turns, so a prompt has none before its header; and a content that begins with the end of the
# prompt

BETWEEN = """{%- for m in messages %}{{- '<|' + m.role + '|>' + WRITE + '<|end|>' }}
{%- if not loop.last %}{{- '\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\n' }}{%- endif %}"""
BETWEEN_TOKENS = Tokens(
    ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"), ("<think>", "</think>"), "<|end|>", "<|bos|>"
)


@pytest.mark.parametrize("content", ["m.content", "(m.content | list | join)"], ids=["plain", "letters"])
def test_a_content_that_begins_as_the_prompt_ends(make: Make, content: str) -> None:
    model = make(BETWEEN.replace("WRITE", content), BETWEEN_TOKENS)
    chat = [user("2+2?"), answer("<think>\nsum</think>4"), user("3+3?"), answer("6")]
    answers = "<|assistant|><think>\n[[sum</think>4<|end|>]]\n<|user|>3+3?<|end|>\n<|assistant|>[[6<|end|>]]"
    for inserted in (True, False):
        assert model.text(chat, inserted=inserted) == f"<|user|>2+2?<|end|>\n{answers}"
        assert model.text(chat[1:], inserted=inserted) == answers
    habits = model.tokenizer.habits
    assert habits.inside == {"<think>", "</think>"}, "a header is no token that an answer may contain"
    assert habits.lead == ""
    assert model.encoded([user("2+2?"), answer("<|assistant|>")]).spelled == (("<|assistant|>", "assistant"),)


# F7: keys of a row that change the text

SWITCHED = """{{- '<|im_start|>system\n' }}
{{- '/no_think' if enable_thinking is defined and not enable_thinking else '/think' }}
{%- for d in documents or [] %}{{- '\n' + d.text }}{%- endfor %}{{- '<|im_end|>\n' }}""" + TALK
HI = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello<|im_end|>]]\n"


def test_keys_of_rows_reach_the_template(make: Make) -> None:
    model, chat = make(SWITCHED), [user("Hi"), answer("Hello")]
    assert model.text({"messages": chat}) == "<|im_start|>system\n/think<|im_end|>\n" + HI
    without = model.text({"messages": chat, "chat_template_kwargs": {"enable_thinking": False}})
    assert without == "<|im_start|>system\n/no_think<|im_end|>\n" + HI
    with_documents = model.text({"messages": chat, "documents": [{"title": "t", "text": "A fact."}]})
    assert with_documents == "<|im_start|>system\n/think\nA fact.<|im_end|>\n" + HI


# F9: tokens of roles that are not special

ROLES = """{%- for m in messages %}{{- '<U>' + m.content if m.role == 'user' else '<A>' + m.content + '<EOS>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<A>' }}{%- endif %}"""
ROLE_TOKENS = Tokens(("<EOS>",), ("<U>", "<A>"), "<EOS>")


def test_a_user_types_the_token_of_a_role(make: Make) -> None:
    encoding = make(ROLES, ROLE_TOKENS).encoded([user("What does <A> mean?"), answer("<A> is a role.")])
    answers = 256 + len(ROLE_TOKENS.special) + ROLE_TOKENS.ordinary.index("<A>")
    assert encoding.tokens.tolist().count(answers) == 1
    assert encoding.spelled == (("<A>", "user"), ("<A>", "assistant"))


# F10: templates with names, and templates that need tools

WITH_TOOLS = """{%- for t in tools %}{{- '<|im_start|>tool\n' + t.function.name + '<|im_end|>\n' }}{%- endfor %}"""


def test_named_templates(make: Make) -> None:
    model = make("unused")
    (model.folder / "chat_template.jinja").unlink()
    settings = json.loads((model.folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = [
        {"name": "default", "template": TALK},
        {"name": "tool_use", "template": WITH_TOOLS + TALK},
    ]
    (model.folder / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = [user("Hi"), answer("Hello")]
    assert model.text({"messages": chat, "tools": TOOLS}) == "<|im_start|>tool\nrain<|im_end|>\n" + HI
    assert model.text(chat) == HI


def test_a_template_that_needs_tools(make: Make) -> None:
    chat = [user("Hi"), answer("Hello")]
    model = make(WITH_TOOLS + TALK)
    assert model.text({"messages": chat, "tools": TOOLS}) == "<|im_start|>tool\nrain<|im_end|>\n" + HI
    with pytest.raises(DataError, match="not iterable"):
        model.text(chat)


# F11: a misleading tag


def test_a_tag_inside_of_an_answer_is_no_reasoning(make: Make) -> None:
    template = TALK.replace("m.content", "m.content.split('</think>')[-1]")
    encoding = make(template).encoded([user("How?"), answer("Write the tag </think> at its end.")])
    assert encoding.rendered is not None
    assert [(text.number, text.role, text.kind) for text in find_omitted(encoding.rendered)] == [
        (2, "assistant", "content")
    ]


# F14: templates that ask for the date


def test_the_date_is_that_of_the_recipe(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = [user("Hi"), answer("Hello")]
    monkeypatch.setattr(time, "time", lambda: 2e9)
    dated = "{{- strftime_now('%d %b %Y') + '\n' }}" + TALK
    model = make(dated)
    assert model.text(chat) == "01 Jan 2026\n" + HI
    later = make(dated, date="2026-11-26")
    assert later.text(chat) == "26 Nov 2026\n" + HI
    assert later.tokenizer.digest != model.tokenizer.digest
    assert make(TALK).tokenizer.digest == make(TALK, date="2026-11-26").tokenizer.digest
    own = {"messages": chat, "chat_template_kwargs": {"date": "today"}}
    assert make("{{- (date or strftime_now('%Y')) + '\n' }}" + TALK).text(own) == "today\n" + HI


# F15: a process that is stopped for a while


def test_a_process_that_stands_still(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two readings of the clock, an hour passes."""
    now = iter(range(0, 10**9, 3600))
    for clock in ("monotonic", "perf_counter", "time"):
        monkeypatch.setattr(time, clock, lambda: float(next(now)))
    assert make(TALK).text([user("Hi"), answer("Hello")]) == HI
