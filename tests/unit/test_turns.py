"""The ladder: which proof proves which turn of which template, and what is refused because none does."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sft.data.chat.tokenizer import FolderTokenizer
from sft.data.chat.turns import MANY_TURNS
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
    Messages,
    assistant,
    chat_of,
    proofs,
    runs,
    user,
)
from tests.unit.fixtures.folder import load_folder, template

Tokenizers = Callable[[str], FolderTokenizer]
MANY = [m for i in range(MANY_TURNS + 1) for m in (user(f"q{i}"), assistant(f"a{i}"))]

CHATS: dict[str, Messages] = {
    "talk": TALK,
    "many": MANY,
    "first": ASSISTANT_FIRST,
    "thinking": THINKING,
    "inside": THINKING_INSIDE,
    "calling": CALLING,
    "twice": CALLING_TWICE,
    "again": CALLING_AGAIN,
    "both": THINKING_CALLING,
}
# A letter for each assistant turn: Marks, Prefix, Blank; - where the chat is refused: by the template, which does not
# know tools or wants roles to alternate, or by us, since it is not proven.
RUNGS = """
                 talk  many  first  thinking  inside  calling  twice  again  both
chatml           PP    BBBB  BP     PP        PP      PP       PP     PPPP   PP
chatml_marked    MM    MMMM  MM     MM        MM      -        -      -      -
llama31          PP    BBBB  BP     PP        PP      PP       -      PPPP   PP
llama31_marked   MM    MMMM  MM     MM        MM      MM       -      MMMM   MM
mistral          PP    BBBB  BP     PP        PP      -        -      -      -
mistral_tools    PP    BBBB  BP     PP        PP      PP       -      -      -
gemma            PP    BBBB  -      PP        PP      -        -      -      -
deepseek_v3      PP    BBBB  BP     PP        PP      PP       PP     PPPP   PP
deepseek_r1      BB    BBBB  BB     BB        BB      -        -      -      -
qwen25           PP    BBBB  BP     PP        PP      PP       PP     PPPP   PP
qwen3            BB    BBBB  BB     BP        BP      BB       BB     BPBB   PP
qwen3_marked     MM    MMMM  MM     MM        MM      MM       MM     MMMM   MM
phi3             PP    BBBB  BP     PP        PP      -        -      -      -
cohere           PP    BBBB  BP     PP        PP      -        -      -      -
plain_header     PP    BBBB  BP     PP        PP      -        -      -      -
"""
_HEADER, *_LINES = [line.split() for line in RUNGS.strip().splitlines()]
TABLE = [(line[0], kind, proof) for line in _LINES for kind, proof in zip(_HEADER, line[1:], strict=True)]


@pytest.mark.parametrize(("name", "kind", "expected"), TABLE)
def test_rungs(tokenizers: Tokenizers, name: str, kind: str, expected: str) -> None:
    try:
        proof = "".join(proof[0].upper() for proof in proofs(chat_of(CHATS[kind]), tokenizers(name)))
    except DataError:
        proof = "-"
    assert proof == expected


ADD = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
DEEP = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>'


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        ("llama31", CALLING, ['<|python_tag|>{"name": "add", "parameters": {"x": 1}}<|eom_id|>', "3.<|eot_id|>"]),
        ("mistral_tools", CALLING, ['[TOOL_CALLS] [{"name": "add", "arguments": {"x": 1}}]</s>', " 3.</s>"]),
        ("qwen25", CALLING_TWICE, [f"Let me\n{ADD}\n{ADD.replace('1', '2')}<|im_end|>", "3 and 4.<|im_end|>"]),
        ("deepseek_v3", CALLING[:2], [f"<｜tool▁calls▁begin｜>{DEEP}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"]),
        # Thinking is left out of the first turn by the template, and learned where it is written.
        ("qwen3", THINKING, ["Hello.<|im_end|>", "<think>\nsix\ntimes seven\n</think>\n\n42<|im_end|>"]),
        ("qwen3", THINKING_INSIDE, ["Hello.<|im_end|>", "<think>\nsix\n</think>\n\n42<|im_end|>"]),
        # The empty thinking that the template inserts is nobody's, unless marks say that it is the assistant's.
        ("qwen3", TALK[2:], ["42\n\nWhat is the question?<|im_end|>"]),
        ("qwen3_marked", TALK[2:], ["<think>\n\n</think>\n\n42\n\nWhat is the question?<|im_end|>"]),
        ("qwen3", THINKING_CALLING[:2], [f"<think>\nadd\n</think>\n\nLet me\n{ADD}<|im_end|>"]),
        ("deepseek_r1", THINKING_INSIDE, ["\n\nHello.<｜end▁of▁sentence｜>", "\n\n42<｜end▁of▁sentence｜>"]),
        ("phi3", TALK, ["I am fine.\n<|end|>", "42\n\nWhat is the question?<|end|>"]),  # its header swallows the space
    ],
)
def test_what_is_supervised(tokenizers: Tokenizers, name: str, messages: Messages, expected: list[str]) -> None:
    assert runs(chat_of(messages), tokenizers(name)) == expected


def test_an_unproven_turn_shows_both_renderings(tmp_path: Path) -> None:
    """The answer is written backwards: no text of the template is the content."""
    jinja = (
        "{% for m in messages %}<|im_start|>{{ m.content | reverse if m.role == 'assistant' and m.content != 'ANSWER' "
        "else m.content }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(DataError) as error:
        runs(Chat([user("Hi"), assistant("Hello")], None), load_folder(tmp_path, jinja))
    assert str(error.value) == (
        f"chat template of {tmp_path}: the assistant's text of message 2 cannot be located.  "
        'The template writes "<|im_start|>Hi<|im_end|><|im_start|>olleH<|im_end|>".  '
        "If ... replaces the assistant's text, the template writes "
        '"<|im_start|>Hi<|im_end|><|im_start|>...<|im_end|>".  '
        'The content is "Hello" and a turn ends with <|im_end|>.  '
        "Give a template (data.chat_template) with {% generation %} around the content and the end of turn."
    )


CONTENT = "{{ m.content }}"
TURN = "<|im_start|>{{ m.content }}<|im_end|>"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}"
LAST = "{{ 'x' if loop.last else 'y' }}"  # in every message: no prompt is how the whole chat begins
HEADER = "<|im_start|>{{ m.role }}\n"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def test_a_prompt_of_the_same_length_is_not_a_prefix(tmp_path: Path) -> None:
    jinja = "{% for m in messages %}" + LAST + HEADER + "{{ m.content }}<|im_end|>{% endfor %}" + ASK
    tokenizer = load_folder(tmp_path, jinja)
    assert proofs(Chat(TALK, None), tokenizer) == ["blank", "blank"]
    assert runs(Chat(TALK, None), tokenizer)[1] == "42\n\nWhat is the question?<|im_end|>"


def test_thinking_between_two_insertions(tmp_path: Path) -> None:
    """The blanked turn has an empty thinking where this one has its own, so both are replaced; <think> is learned."""
    turn = "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{{ m.content }}"
    written = "{% if m.role == 'user' %}{{ m.content }}{% else %}" + turn + "{% endif %}<|im_end|>"
    tokenizer = load_folder(tmp_path, "{% for m in messages %}" + LAST + HEADER + written + "{% endfor %}" + ASK)
    assert proofs(Chat(THINKING, None), tokenizer) == ["blank", "blank"]
    assert runs(Chat(THINKING, None), tokenizer) == [
        "<think>\nhm\n</think>\n\nHello.<|im_end|>",
        "<think>\nsix\ntimes seven\n</think>\n\n42<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("jinja", "complaint"),
    [
        # What follows the prompt is as long as the content, and is not the content.
        (
            "{% for m in messages %}" + HEADER + "{{ m.content | replace('42', '24') }}<|im_end|>{% endfor %}" + ASK,
            "message 4 cannot be located",
        ),
        # Only the chat ends, not its turns.
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}<|im_end|>", "message 2 cannot be located"),
        # Later text depends on what the assistant said.
        (PLAIN + "{{ messages[1].content | length }}", "message 2 cannot be located"),
        # The assistant is quoted.
        (PLAIN + "{{ messages[1].content }}", "ends an assistant's turn with nothing"),
        # The last turn comes first.
        (PLAIN.replace("messages", "messages[::-1]"), "writes it before an earlier"),
    ],
)
def test_templates_that_cannot_be_proven(tmp_path: Path, jinja: str, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        runs(Chat(TALK, None), load_folder(tmp_path, jinja))


def block(text: str) -> str:
    return "{% generation %}" + text + "{% endgeneration %}"


def by_role(asked: str, answered: str) -> str:
    body = "{% if m.role == 'user' %}" + asked + "{% else %}" + answered + "{% endif %}"
    return "{% for m in messages %}" + body + "{% endfor %}"


@pytest.mark.parametrize(
    ("jinja", "complaint"),
    [
        # One block around everything: it would supervise the user.
        (block(PLAIN), "marks 1 generation blocks for 2 assistant turns"),
        # The header is in the block: it would be supervised.
        (by_role(CONTENT, block(TURN)), "The template marks as the assistant's \"<|im_start|> I am fine"),
        # The plain words of a header are.
        (
            by_role(CONTENT, block("assistant\n{{ m.content }}<|im_end|>"))
            + "{% if add_generation_prompt %}assistant\n{% endif %}",
            "The template marks as the assistant's \"assistant\\n I am fine",
        ),
        # Blocks around the wrong turns.
        (
            by_role("<|im_start|>" + block(CONTENT) + "<|im_end|>", TURN),
            'The template marks as the assistant\'s "Hello there".  The content is " I am fine',
        ),
        # No end of turn after the block: text follows instead.
        (
            by_role(TURN, "<|im_start|>" + block(CONTENT) + "{{ '' if loop.last else '...' }}<|im_end|>"),
            "and a turn ends with <|im_end|>",
        ),
    ],
)
def test_wrong_markers_are_refused(tmp_path: Path, jinja: str, complaint: str) -> None:
    with pytest.raises(DataError) as error:
        runs(Chat(TALK, None), load_folder(tmp_path, jinja))
    assert complaint in str(error.value)


SEARCH = {"type": "function", "function": {"name": "search", "arguments": {"q": "x"}}}
NAMED = [user("q"), {**assistant("I will search for it."), "tool_calls": [SEARCH]}, user("r"), assistant("ok")]


@pytest.mark.parametrize("name", ["gemma", "phi3", "mistral", "chatml_marked"])
def test_a_call_that_is_left_out_is_missed_though_the_content_names_it(tokenizers: Tokenizers, name: str) -> None:
    with pytest.raises(DataError, match="message 2"):
        runs(chat_of(NAMED), tokenizers(name))
    assert runs(chat_of(NAMED), tokenizers(name), "last")[-1].startswith("ok" if name != "mistral" else " ok")


OUTSIDE = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}
{%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{%- generation %}{{ m.content + '<|im_end|>' }}TAIL{% endgeneration %}{{ '\n' }}
{%- else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_what_stands_around_a_mark(tmp_path: Path) -> None:
    """Thinking before the block, or more words behind the end of turn, would not be learnt."""
    thought = {**assistant("42"), "reasoning_content": "six seven"}
    tokenizer = load_folder(tmp_path / "a", OUTSIDE.replace("TAIL", ""))
    assert runs(Chat([user("q"), assistant("42")], None), tokenizer) == ["42<|im_end|>"]
    with pytest.raises(DataError, match="message 2 cannot be located"):
        runs(Chat([user("q"), thought], None), tokenizer)
    tokenizer = load_folder(tmp_path / "b", OUTSIDE.replace("TAIL", "{{ ' and more' if m.content == '42' }}"))
    with pytest.raises(DataError, match="message 2 cannot be located"):
        runs(Chat([user("q"), assistant("42")], None), tokenizer)


def test_marks_in_a_comment_are_none(tmp_path: Path) -> None:
    tokenizer = load_folder(tmp_path, "{# no {% generation %} here #}" + template("chatml"))
    assert runs(Chat([user("q"), assistant("a")], None), tokenizer) == ["a<|im_end|>"]


def test_a_block_that_ends_at_token_0(tmp_path: Path) -> None:
    """transformers#47325: its own mask then covers the rest of the chat, the user's words too."""
    jinja = by_role(CONTENT + "<|im_end|>", block(CONTENT) + "<|im_end|>")
    messages = [assistant("a"), user("Hello there"), assistant("b")]
    # Nothing stands before token 0 to predict it from, so it weighs nothing.
    assert runs(Chat(messages, None), load_folder(tmp_path, jinja)) == ["<|im_end|>", "b<|im_end|>"]
