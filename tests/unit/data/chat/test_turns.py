"""Where turns of an assistant begin and end, in templates of every shape."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft.data.chat.encode_chat import encode_chat
from sft.data.chat.tokenizer import FolderTokenizer
from sft.data.rows.formats import Chat
from sft.errors import DataError
from tests.unit.fixtures.chats import (
    ASSISTANT_FIRST,
    CALLING,
    CALLING_AGAIN,
    CALLING_TWICE,
    TALK,
    THINKING,
    THINKING_CALLING,
    THINKING_INSIDE,
    TOOLS,
    Messages,
    assistant,
    call,
    chat_of,
    runs,
    tool,
    user,
)
from tests.unit.fixtures.folder import load_folder, template

Tokenizers = Callable[[str], FolderTokenizer]
ADD = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
DEEP = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>'
DEEP_CALL = f"<｜tool▁calls▁begin｜>{DEEP}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
FINAL = "<|channel|>final<|message|>"
TO_ADD = " to=functions.add<|channel|>commentary json<|message|>"
GLM_CALL = "\n<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
MINIMAX_CALL = (
    '<minimax:tool_call>\n<invoke name="add">\n<parameter name="x">1</parameter>\n</invoke>\n</minimax:tool_call>'
)
INDENTED = '{\n        "tool_name": "add",\n        "parameters": {\n            "x": 1\n        }\n    }'
ACTION = f"Action: ```json\n[\n    {INDENTED}\n]```"
ANALYSIS = "<|channel|>analysis<|message|>"
SUM = [user("2 + 2?"), assistant([{"type": "thinking", "thinking": "sum"}, {"type": "text", "text": "4"}])]


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        ("llama31", CALLING, ['<|python_tag|>{"name": "add", "parameters": {"x": 1}}<|eom_id|>', "3.<|eot_id|>"]),
        ("mistral_tools", CALLING, ['[TOOL_CALLS] [{"name": "add", "arguments": {"x": 1}}]</s>', " 3.</s>"]),
        ("qwen25", CALLING_TWICE, [f"Let me\n{ADD}\n{ADD.replace('1', '2')}<|im_end|>", "3 and 4.<|im_end|>"]),
        ("deepseek_v3", CALLING, [DEEP_CALL, "3.<｜end▁of▁sentence｜>"]),
        # The template leaves thinking out of the first turn; thinking is supervised where the template writes it.
        ("qwen3", THINKING, ["Hello.<|im_end|>", "<think>\nsix\ntimes seven\n</think>\n\n42<|im_end|>"]),
        ("qwen3", THINKING_INSIDE, ["Hello.<|im_end|>", "<think>\nsix\n</think>\n\n42<|im_end|>"]),
        ("qwen3", THINKING_CALLING[:2], [f"<think>\nadd\n</think>\n\nLet me\n{ADD}<|im_end|>"]),
        # The template inserts empty thinking, which the model must write after the prompt.
        ("qwen3", TALK[2:], ["<think>\n\n</think>\n\n42\n\nWhat is the question?<|im_end|>"]),
        ("qwen3_marked", TALK[2:], ["<think>\n\n</think>\n\n42\n\nWhat is the question?<|im_end|>"]),
        # The prompt begins with a thinking tag that the rendered turn does not have.
        ("deepseek_r1", THINKING_INSIDE, ["\n\nHello.<｜end▁of▁sentence｜>", "\n\n42<｜end▁of▁sentence｜>"]),
        # the token of its header includes the following space
        ("phi3", TALK, ["I am fine.\n<|end|>", "42\n\nWhat is the question?<|end|>"]),
        # The end of a turn in the history has weight 0 if another token ends the last turn; thinking and answer are two
        # messages.
        ("harmony", TALK, [f"{FINAL} I am fine.\n", f"{FINAL}42\n\nWhat is the question?<|return|>"]),
        ("harmony", THINKING,
         [f"{FINAL}Hello.", f"{ANALYSIS}six\ntimes seven<|end|><|start|>assistant{FINAL}42<|return|>"]),
        ("harmony", CALLING_AGAIN,
         [f'{TO_ADD}{{"x": 1}}<|call|>', f"{FINAL}3.", f'{TO_ADD}{{"x": 5}}<|call|>', f"{FINAL}6.<|return|>"]),
        # The first token of the next message ends a turn; the token <|assistant|> includes the newline after it.
        ("glm4_moe", TALK,
         ["<think></think>\n I am fine.\n<|user|>", "<think></think>\n42\n\nWhat is the question?<|user|>"]),
        ("glm4_moe", CALLING, [f"<think></think>{GLM_CALL}<|observation|>", "<think></think>\n3.<|user|>"]),
        ("glm4_moe", CALLING[:2], [f"<think></think>{GLM_CALL}<|observation|>"]),
        ("glm4_moe", THINKING_CALLING,
         [f"<think>add</think>\nLet me{GLM_CALL}<|observation|>", "<think>so</think>\n3.<|user|>"]),
        # Results stand before the content beside their call, so one message has two spans.
        ("gemma4", [user("1 + 2?"), assistant("I did.", tool_calls=[call()]), tool("3"), assistant("3.")],
         ["<|tool_call>call:add{x:1}<tool_call|><|tool_response>", "I did.<turn|>", "3.<turn|>"]),
        ("gemma4", CALLING, ["<|tool_call>call:add{x:1}<tool_call|><|tool_response>", "3.<turn|>"]),
        ("gemma4", CALLING[:2], ["<|tool_call>call:add{x:1}<tool_call|><|tool_response>"]),
        ("deepseek_v3_text", CALLING, [DEEP_CALL, "3.<｜end▁of▁sentence｜>"]),
        ("ministral", SUM, ["[THINK]sum[/THINK]4</s>"]),
        ("ministral", CALLING, ['[TOOL_CALLS]add[ARGS]{"x": 1}</s>', "3.</s>"]),
        ("minimax", THINKING, ["Hello.[e~[", "six\ntimes seven\n</think>\n\n42[e~["]),
        ("minimax", THINKING_CALLING, [f"add\n</think>\n\nLet me\n{MINIMAX_CALL}[e~[", "so\n</think>\n\n3.[e~["]),
        ("minimax", CALLING_TWICE[:1] + CALLING_TWICE[-1:], ["3 and 4.[e~["]),
        ("command_r_tools", CALLING, [f"{ACTION}<|END_OF_TURN_TOKEN|>", "3.<|END_OF_TURN_TOKEN|>"]),
        # No prompt asks for an answer that comes first: it begins after the header of an answer.
        ("command_r_tools", ASSISTANT_FIRST, ["Hi<|END_OF_TURN_TOKEN|>", "Bye<|END_OF_TURN_TOKEN|>"]),
        ("mistral", ASSISTANT_FIRST, [" Hi</s>", " Bye</s>"]),
        ("llama31", ASSISTANT_FIRST, ["Hi<|eot_id|>", "Bye<|eot_id|>"]),
    ],
)  # fmt: skip
def test_what_is_supervised(tokenizers: Tokenizers, name: str, messages: Messages, expected: list[str]) -> None:
    assert runs(chat_of(messages, TOOLS if name == "command_r_tools" else None), tokenizers(name)) == expected


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        ("qwen3", TALK[2:], ["42\n\nWhat is the question?<|im_end|>"]),
        ("qwen3", THINKING[2:], ["<think>\nsix\ntimes seven\n</think>\n\n42<|im_end|>"]),  # the row has the thinking
        ("qwen3", THINKING_INSIDE[2:], ["<think>\nsix\n</think>\n\n42<|im_end|>"]),
        # the template has {% generation %} marks
        ("qwen3_marked", TALK[2:], ["<think>\n\n</think>\n\n42\n\nWhat is the question?<|im_end|>"]),
        ("harmony", TALK[2:], ["42\n\nWhat is the question?<|return|>"]),
        ("harmony", CALLING, [f'{TO_ADD}{{"x": 1}}<|call|>', "3.<|return|>"]),
        ("glm4_moe", TALK, [" I am fine.\n<|user|>", "42\n\nWhat is the question?<|user|>"]),
        ("llama31", THINKING_CALLING[:2], ['<|python_tag|>Let me{"name": "add", "parameters": {"x": 1}}<|eom_id|>']),
        ("ministral", SUM, ["[THINK]sum[/THINK]4</s>"]),
        ("mistral", ASSISTANT_FIRST, ["Hi</s>", " Bye</s>"]),
    ],
)
def test_without_the_text_that_a_template_inserts(
    tokenizers: Tokenizers, name: str, messages: Messages, expected: list[str]
) -> None:
    assert runs(chat_of(messages), tokenizers(name), inserted=False) == expected


IN_A_ROW = [user("Hi"), assistant("One."), assistant("Two."), user("And?"), assistant("Three.")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", ["One.<|im_end|>", "Two.<|im_end|>", "Three.<|im_end|>"]),
        ("mistral", [" One.</s> Two.</s>", " Three.</s>"]),
        ("harmony", [f"{FINAL}One.", f"{FINAL}Two.", f"{FINAL}Three.<|return|>"]),
        ("gemma4", ["One.<turn|>", "Two.<turn|>", "Three.<turn|>"]),
    ],
)
def test_two_answers_in_a_row(tokenizers: Tokenizers, name: str, expected: list[str]) -> None:
    assert runs(chat_of(IN_A_ROW), tokenizers(name)) == expected


def test_an_answer_that_nothing_ends_before_another_one_has_no_end(tokenizers: Tokenizers) -> None:
    """In GLM, <|assistant|> does not end a turn, because the model must not write it."""
    think = "<think></think>\n"
    expected = [f"{think}One.", f"{think}Two.<|user|>", f"{think}Three.<|user|>"]
    assert runs(chat_of(IN_A_ROW), tokenizers("glm4_moe")) == expected


# --- the end of the last turn ---

GLM = [user("a"), assistant("b")]


@pytest.mark.parametrize(
    ("final_end", "ends", "expected"),
    [
        ("auto", ["<|endoftext|>", "<|user|>"], ["<think></think>\nb<|user|>"]),
        ("<|endoftext|>", [], ["<think></think>\nb<|endoftext|>"]),
        ("<|endoftext|>", ["<|user|>"], ["<think></think>\nb<|endoftext|>"]),
        (None, ["<|user|>"], ["<think></think>\nb"]),
    ],
)
def test_the_token_after_a_last_answer(
    tmp_path: Path, final_end: str | None, ends: list[str], expected: list[str]
) -> None:
    tokenizer = load_folder(tmp_path, template("glm4_moe"), ends=ends, final_end=final_end)
    assert runs(Chat(GLM, None), tokenizer) == expected
    ids, weights, *_ = encode_chat(Chat(GLM, None), tokenizer, "all")
    assert tokenizer.decode(ids).endswith(expected[0].removeprefix("<think></think>")), "with data.supervise = all, too"
    assert weights[-1] == 1
    asked = [*GLM, user("c")]
    assert tokenizer.decode(encode_chat(Chat(asked, None), tokenizer).tokens).endswith("<|user|>c"), "no answer ends"


def test_a_token_that_nobody_names_is_not_appended(tmp_path: Path) -> None:
    tokenizer = load_folder(tmp_path, template("glm4_moe"), ends=["<|endoftext|>"])
    with pytest.raises(DataError) as error:
        runs(Chat(GLM, None), tokenizer)
    assert str(error.value) == (
        f"chat template of {tmp_path} writes no token after the last answer, so the model would not learn to stop, and "
        "generation_config.json names no token with which its turns end.  Set data.final_end to a control token, or to "
        "null for none.  Tokens that end turns of this template: <|user|>, <|endoftext|>, <|observation|>."
    )
    with pytest.raises(DataError, match="data.final_end names <.nope.>, which is no control token of the tokenizer of"):
        load_folder(tmp_path, template("glm4_moe"), final_end="<|nope|>")


def test_a_template_that_ends_its_last_turn_appends_nothing(tmp_path: Path) -> None:
    tokenizer = load_folder(tmp_path, template("chatml"), ends=["<|endoftext|>"], final_end="<|endoftext|>")
    assert runs(Chat(GLM, None), tokenizer) == ["b<|im_end|>"]


# --- templates that were made for tests ---

TURN = "<|im_start|>{{ m.content }}<|im_end|>"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}"
LAST = "{{ 'x' if loop.last else 'y' }}"  # used in every message, so no prompt is a prefix of the whole chat
HEADER = "<|im_start|>{{ m.role }}\n"
MESSAGE = HEADER + "{{ m.content }}<|im_end|>"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def for_messages(asked: str, answered: str) -> str:
    body = "{% if m.role == 'user' %}" + asked + "{% else %}" + answered + "{% endif %}"
    return "{% for m in messages %}" + body + "{% endfor %}"


def block(text: str) -> str:
    return "{% generation %}" + text + "{% endgeneration %}"


FINE, QUESTION = " I am fine.\n<|im_end|>", "42\n\nWhat is the question?<|im_end|>"
THOUGHTS = ["<think>\nhm\n</think>\n\nHello.<|im_end|>", "<think>\nsix\ntimes seven\n</think>\n\n42<|im_end|>"]
THOUGHT = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
THINK = THOUGHT + "{{ m.content }}"


@pytest.mark.parametrize(
    ("jinja", "messages", "expected"),
    [
        # Text before the last message differs between the chat and its prompt.
        (for_messages(LAST + MESSAGE, LAST + MESSAGE) + ASK, TALK, [FINE, QUESTION]),
        (for_messages(LAST + MESSAGE, LAST + HEADER + THINK + "<|im_end|>") + ASK, THINKING, THOUGHTS),
        # The template changes the answer.
        ("{% for m in messages %}" + HEADER + "{{ m.content | replace('42', '24') }}<|im_end|>{% endfor %}" + ASK,
         TALK, [FINE, QUESTION.replace("42", "24")]),
        # Only the chat has an end, not its turns: <|im_start|> of the next message ends the first turn.
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}<|im_end|>", TALK[2:], [QUESTION]),
        # The prompt has no header, so the model writes the whole message.
        (PLAIN, TALK, [f"<|im_start|>{FINE}", f"<|im_start|>{QUESTION}"]),
        # Later text depends on the text of the assistant.
        (PLAIN + "{{ messages[1].content | length }}", TALK[:2], [FINE]),
        # {% generation %} marks do not change a mask, wherever they stand.
        (block(PLAIN), TALK, [f"<|im_start|>{FINE}", f"<|im_start|>{QUESTION}"]),
        (for_messages(MESSAGE, HEADER + block("{{ m.content }}<|im_end|>")) + ASK, TALK, [FINE, QUESTION]),
        (for_messages(HEADER + block("{{ m.content }}") + "<|im_end|>", MESSAGE) + ASK, TALK, [FINE, QUESTION]),
        # Thinking before the marked block, and more words after the end of the turn.
        (for_messages(MESSAGE, HEADER + THOUGHT + block("{{ m.content }}<|im_end|> more")) + ASK, THINKING, THOUGHTS),
        # transformers#47325: a marked block that ends at token 0.  Nothing predicts token 0, so it has weight 0.
        (for_messages("{{ m.content }}<|im_end|>", block("{{ m.content }}") + "<|im_end|>"),
         [assistant("a"), user("Hello there"), assistant("b")], ["<|im_end|>", "b<|im_end|>"]),
        # Texts that are written by macros, set blocks and joins keep their sources.
        ("{% macro turn(m) %}{% set text %}{{ [m.content, ''] | join('') }}{% endset %}" + HEADER
         + "{{ text }}<|im_end|>{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}" + ASK,
         TALK, [FINE, QUESTION]),
    ],
)  # fmt: skip
def test_templates_of_other_shapes(tmp_path: Path, jinja: str, messages: Messages, expected: list[str]) -> None:
    assert runs(Chat(messages, None), load_folder(tmp_path, jinja)) == expected


CENTER = "the filter center hides where text comes from"


@pytest.mark.parametrize(
    ("jinja", "complaint"),
    [
        # Text of the assistant, text of a user before it, and text after it.
        (for_messages(TURN, "<|im_start|>{{ m.content | center(50) }}<|im_end|>"), CENTER),
        (for_messages("<|im_start|>{{ m.content | center(50) }}<|im_end|>", TURN), CENTER),
        (for_messages(TURN, "<|im_start|>{{ m.content }}{{ 'x' | center(3) }}<|im_end|>"), CENTER),
        (for_messages(TURN, "<|im_start|>{{ m.content }}{{ ' ' | center(3) }}<|im_end|>"), CENTER),
        (for_messages(TURN, "<|im_start|>{{ m.content | reverse }}<|im_end|>"), "the filter reverse hides where text"),
        (for_messages(TURN, "<|im_start|>{{ m.content.zfill(50) }}<|im_end|>"), "zfill hides where text comes from"),
        # A part of the answer is not found, and could stand anywhere.
        (for_messages(TURN, "<|im_start|>{{ m.content[:3] }}<|im_end|>") + "{{ messages[1].content[3:] | center(50) }}",
         'its text " I am fine.\\n" is not found, and the filter center hides text'),
        # Text of another role stands in the turn.
        (for_messages(TURN, "<|im_start|>{{ m.content[:2] }}{{ messages[0].content }}{{ m.content[2:] }}<|im_end|>"),
         "no token ends it"),
        # Text outside of any loop over messages quotes the assistant outside of its turn.
        ("{{ messages[1].content[3:] }}<|im_end|>{{ messages[0].content }}<|im_end|>{{ messages[1].content[:3] }}"
         "<|im_end|>",
         "its text is written in several places, outside a loop over messages"),
        # The template writes nothing of the assistant.
        (for_messages(TURN, "<|im_start|>answer<|im_end|>"), "the template writes nothing of it, so the model"),
    ],
)  # fmt: skip
def test_chats_that_are_refused(tmp_path: Path, jinja: str, complaint: str) -> None:
    tokenizer = load_folder(tmp_path, jinja)
    with pytest.raises(DataError) as error:
        runs(Chat(TALK[:2], None), tokenizer)
    assert f"chat template of {tmp_path}: the assistant's turn of message 2 cannot be located: " in str(error.value)
    assert complaint in str(error.value)


def test_answers_before_their_questions(tmp_path: Path) -> None:
    """A template that writes the last message first would train answers that attend to later turns."""
    tokenizer = load_folder(tmp_path, for_messages(TURN, TURN).replace("in messages", "in messages[::-1]"))
    with pytest.raises(DataError, match="turn of message 2 cannot be .* the template writes it after a later turn"):
        runs(Chat([*TALK[:2], *TALK[:2]], None), tokenizer)


def test_unknown_text_that_can_be_nobodys_is_no_reason_to_refuse_a_chat(tmp_path: Path) -> None:
    jinja = "{{ 'x' | center(3) }}" + for_messages(MESSAGE, MESSAGE)
    assert runs(Chat(TALK, None), load_folder(tmp_path, jinja + ASK)) == [FINE, QUESTION]


SEARCH = {"type": "function", "function": {"name": "search", "arguments": {"q": "x"}}}
NAMED = [user("q"), assistant("I will search for it.", tool_calls=[SEARCH]), user("r"), assistant("ok")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemma", ["I will search for it.<end_of_turn>", "ok<end_of_turn>"]),
        ("phi3", ["I will search for it.<|end|>", "ok<|end|>"]),
        ("chatml_marked", ["I will search for it.<|im_end|>", "ok<|im_end|>"]),
    ],
)
def test_a_call_that_is_left_out_is_reported_though_the_content_names_it(
    tokenizers: Tokenizers, name: str, expected: list[str]
) -> None:
    from sft.data.chat.omitted import find_omitted

    encoding = encode_chat(chat_of(NAMED), tokenizers(name))
    assert encoding.rendered is not None
    assert (2, "assistant", "tool call") in {text[:3] for text in find_omitted(encoding.rendered)}
    assert runs(chat_of(NAMED), tokenizers(name)) == expected


def test_a_mask_does_not_depend_on_other_chats(tmp_path: Path) -> None:
    """A word of the first message decides whether the prompt closes thinking.  Processes encode rows in any order."""
    jinja = (
        "{% set empty = '<think>\n\n</think>\n\n' if '/no_think' in messages[0].content else '' %}"
        + for_messages(MESSAGE, "{{ '<|im_start|>assistant\n' + empty + m.content }}<|im_end|>")
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + empty }}{% endif %}"
    )
    tokenizer = load_folder(tmp_path, jinja)
    for question in ("a", "/no_think", "a"):
        assert runs(Chat([user(question), assistant("b")], None), tokenizer) == ["b<|im_end|>"]


def test_prompts_are_rendered_once_for_each_state(tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 turns need two prompts: one after a question, and one after results of calls."""
    tokenizer = tokenizers("qwen3")
    asked: list[int] = []
    rendered = type(tokenizer.template).rendered

    def counted(self: Any, given: Any, *, prompt: bool = False, **options: Any) -> Any:
        asked.append(prompt)
        return rendered(self, given, prompt=prompt, **options)

    monkeypatch.setattr(type(tokenizer.template), "rendered", counted)
    messages = [message for i in range(50) for message in (user(f"q{i}"), assistant(f"a{i}"))] + CALLING
    assert len(runs(chat_of(messages), tokenizer)) == 52
    assert asked.count(False) == 1 and asked.count(True) <= 2
