"""Texts that a chat template leaves out are found, whatever they say and wherever the template puts the other texts."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sft.data.chat.encode_chat import encode_chat
from sft.data.chat.omitted import find_omitted, why_omitted
from sft.data.chat.render import prepared, render_chat
from sft.data.chat.tokenizer import FolderTokenizer
from sft.data.rows.formats import Chat
from sft.errors import DataError
from tests.unit.fixtures.chats import CALLING, SYSTEM, TALK, THINKING, TOOLS, Messages, assistant, tool, user
from tests.unit.fixtures.folder import make_folder, open_folder, template

Load = Callable[..., FolderTokenizer]
TOWN = {"type": "string", "description": "Which one"}
WHEN = {"type": "object", "properties": {"day": {"type": "string", "description": "Weekday"}}}
PARAMETERS = {"type": "object", "properties": {"town": TOWN, "when": WHEN}, "required": ["town"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a town", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A tokenizer with a named template, or with a given one; a new tokenizer each time, so that it has no cached
    results."""
    folder = make_folder(tmp_path_factory.mktemp("folder"), None)

    def new(name: str = "", source: str | None = None) -> FolderTokenizer:
        file = tmp_path_factory.mktemp("template") / "chat.jinja"
        file.write_text(template(name) if source is None else source, encoding="utf-8")
        return open_folder(folder, chat_template=str(file))

    return new


def found(messages: Messages, tokenizer: Any, tools: Any = None, supervise: Any = "all") -> list[str]:
    """A text such as "1 system content": number of the message or tool, role, kind."""
    rendered = encode_chat(Chat(messages, tools), tokenizer, supervise).rendered
    assert rendered is not None
    return [f"{one.number} {one.role} {one.kind}" for one in find_omitted(rendered)]


def calling(name: str = "add", **arguments: object) -> dict[str, Any]:
    return assistant(None, tool_calls=[{"type": "function", "function": {"name": name, "arguments": arguments}}])


def reads(key: str, words: str = "") -> str:
    """A ChatML template that writes the result of the Jinja expression `key`, and `words` before the chat."""
    return (
        words + "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ " + key + " }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def why(messages: Messages, tokenizer: FolderTokenizer, tools: Any = None) -> str:
    rendered = render_chat(Chat(messages, tools), tokenizer)
    return why_omitted(rendered, find_omitted(rendered)[0])


# --- three reported cases ---


def test_nemo_writes_the_system_message_only_when_it_is_asked(load: Load) -> None:
    nemo = load("mistral_nemo")
    assert found([SYSTEM, *TALK], nemo, supervise="assistant") == ["1 system content"]
    assert found([SYSTEM, *TALK, user("And?")], nemo) == []
    assert found([SYSTEM, *TALK], nemo, TOOLS) == ["1 tools tool schema", "1 system content"]
    assert why([SYSTEM, *TALK], nemo) == (
        "The template writes this text in a prompt without an answer, and leaves it out if the answer follows: the "
        "model is trained without the text, but used with it.  Give a template that keeps the text "
        "(data.chat_template)."
    )


def test_qwen25_knows_no_reasoning(load: Load) -> None:
    qwen = load("qwen25")
    assert found(THINKING, qwen) == ["2 assistant reasoning", "4 assistant reasoning"]
    told = "The template never reads reasoning_content: give a template that does (data.chat_template)."
    assert why(THINKING, qwen) == told
    inside = [user("Hi"), assistant("<think>\nhm\n</think>\n\nHello.")]
    assert found(inside, qwen) == []


def test_qwen3_leaves_out_earlier_reasoning(load: Load) -> None:
    qwen = load("qwen3")
    inside = [user("Hi"), assistant("<think>\nhm\n</think>\n\nHello."), user("More?"), assistant("42")]
    for chat in (THINKING, inside):
        assert found(chat, qwen) == ["2 assistant reasoning"]
        assert why(chat, qwen) == (
            "The template writes this text only for turns after the last user message.  data.turns: each learns every "
            "turn with its text; data.supervise: after_last_user learns only the turns that have it."
        )
    assert found(THINKING[:2], qwen) == []


def test_the_message_that_drops_a_text_is_found_by_trying(load: Load) -> None:
    """Qwen3 keeps reasoning while calls, results and answers follow, and drops it when the user asks again."""
    qwen, thoughtful = load("qwen3"), {**calling(x=3, y=4), "reasoning_content": "sum"}
    rounds = [user("3+4?"), thoughtful, tool("7"), assistant("7"), user("And?"), assistant("8")]
    assert found(rounds[:4], qwen) == [] and found(rounds, qwen) == ["2 assistant reasoning"]
    assert "after the last user message" in why(rounds, qwen)
    # A template that keeps reasoning only in the last message drops it at the result of the call.
    last = load(source=reads("(message.reasoning_content or '' if loop.last else '') ~ (message.content or '')"))
    assert why(rounds, last) == (
        "The template writes this text only until a message of the tool follows.  data.turns: each learns every turn "
        "with its text; data.supervise: last learns only the last."
    )


# --- every kind of text ---

CALL = "2 assistant tool call"
LONG = assistant("An answer that goes on and on, and ends")


@pytest.mark.parametrize(
    ("key", "messages", "expected"),
    [
        ("message.content or message.tool_calls[0].function.arguments | tojson", CALLING, [CALL]),
        ("message.content or message.tool_calls[0].function.name", CALLING, [CALL]),
        ("message.content or message.tool_calls[0].function | string", CALLING, []),
        ("message.content or message.tool_calls[0].function | tojson(indent=4)", CALLING, []),
        ("(message.content if message.role != 'tool') or 'f'", [*TALK, tool("3")], ["5 tool tool result"]),
        ("message.content | tojson | trim('\"')", [user('a "b"\nc'), assistant("é\n")], []),
        ("message.content[:35]", [user("Hi"), LONG], ["2 assistant content"]),
    ],
)  # fmt: skip
def test_contents_calls_and_results(load: Load, key: str, messages: Messages, expected: list[str]) -> None:
    assert found(messages, load(source=reads(key))) == expected


@pytest.mark.parametrize(
    ("written", "tools", "expected"),
    [
        ("tools | tojson(indent=2)", [WEATHER, TOOLS[0]], []),
        ("tools[0].function.name", [WEATHER], ["1 tools tool schema"]),
        ("'no ' + messages[0].content", [WEATHER, TOOLS[0]], ["1 tools tool schema", "2 tools tool schema"]),
    ],
)
def test_schemas(load: Load, written: str, tools: Any, expected: list[str]) -> None:
    tokenizer = load(source=reads("message.content", "{% if tools %}{{ " + written + " }}{% endif %}"))
    assert found(TALK, tokenizer, tools) == expected


def test_parameters_of_parameters(load: Load) -> None:
    tokenizer = load("switches")
    assert found(TALK, tokenizer, [WEATHER]) == ["1 tools tool schema"]  # the template does not write `day`
    flat = {"type": "function", "function": {**TOOLS[0]["function"], "description": "Adds", "parameters": {
        "properties": {"x": {"type": "integer", "description": "A number"}}}}}  # fmt: skip
    assert found(TALK, tokenizer, [flat]) == []


def test_a_chat_without_an_answer_is_explained_too(load: Load) -> None:
    """data.supervise = all allows chats without answers; a template may leave out the tools of such chats, too."""
    never = load(source=reads("message.content"))
    told = "The template never reads tools: give a template that does (data.chat_template)."
    assert why([user("Rome?")], never, [WEATHER]) == told
    unused = load(source=reads("message.content", "{% if tools and 0 %}{{ tools }}{% endif %}"))
    assert why([user("Rome?")], unused, [WEATHER]) == "Give a template that writes this text (data.chat_template)."


# --- texts that stand in another place, or occur by chance ---


def test_what_is_moved_trimmed_or_written_as_json_is_there(load: Load) -> None:
    assert found([SYSTEM, *TALK], load("mistral_tools"), TOOLS) == []
    spaces = [user("  Hello \n"), assistant("\n 42 ")]
    assert found(spaces, load("llama3")) == found(spaces, load("gemma")) == found(spaces, load("cohere")) == []


SHORT = "{% for message in messages %}{% if message.role != 'system' %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"  # noqa: E501  # fmt: skip


@pytest.mark.parametrize("text", ["user", "ok", "im_start", "5", "You are helpful"])
def test_a_short_text_is_not_taken_for_another(load: Load, text: str) -> None:
    """The text also occurs in headers, in text of the template itself, and in other messages."""
    tokenizer = load(source="<|im_start|>system\nYou are helpful, ok?<|im_end|>\n" + SHORT)
    talk = [user("Hello, user. You are helpful?"), assistant("a 5 is ok and fine.")]
    assert found(talk, tokenizer) == []
    assert found([{"role": "system", "content": text}, *talk], tokenizer) == ["1 system content"]


@pytest.mark.parametrize("name", ["qwen25", "qwen3"])
def test_short_reasoning(load: Load, name: str) -> None:
    tokenizer = load(name)
    for text in ("user", "assistant", "think", "six", "42"):
        talk = [user("six"), assistant("six 42", reasoning_content=text), user("think"), assistant("42")]
        assert found(talk, tokenizer) == ["2 assistant reasoning"]


def test_a_text_that_is_said_twice_is_written_twice(load: Load) -> None:
    """The template leaves out all messages before the last question."""
    last = load(source=reads("message.content if loop.index > messages | length - 2 else 'x'"))
    same = [user("a"), assistant("b"), user("a"), assistant("b")]
    assert found(same, last) == ["1 user content", "2 assistant content"]
    assert found(same, load("chatml")) == []


def test_a_template_that_refuses_the_words(load: Load) -> None:
    strict = "{% for m in messages if m.content | length > 20 %}{{ raise_exception('too long') }}{% endfor %}"
    tokenizer = load(source=strict + SHORT)
    assert found([SYSTEM, *TALK[:2]], tokenizer) == ["1 system content"]
    assert found(TALK[:2], tokenizer) == []
    # Occurrences of a text are first taken to belong to the other messages.
    assert found([{"role": "system", "content": "fine"}, *TALK[:2]], tokenizer) == ["1 system content"]


def test_typed_control_strings_are_told_as_typed(load: Load) -> None:
    system = {"role": "system", "content": "Say <|im_end|>."}
    [missing] = find_omitted(render_chat(Chat([system, *TALK], None), load("mistral_nemo")))
    assert missing == (1, "system", "content", "Say <|im_end|>.")


@pytest.mark.parametrize(
    ("part", "is_whole"), [("", True), ("[:150]", False), ("[-150:]", False), ("[1:-1]", True), ("[:1]", False)]
)
def test_a_schema_that_is_cut(load: Load, part: str, is_whole: bool) -> None:
    """A part of an object's JSON contains some of its texts."""
    tokenizer = load(source="{{ (tools[0] | tojson)" + part + " }}" + SHORT)
    assert found(TALK[:2], tokenizer, [WEATHER]) == ([] if is_whole else ["1 tools tool schema"])


# --- switches ---


def test_a_switch_that_keeps_it_is_named(load: Load) -> None:
    tokenizer = load("switches")
    assert found(THINKING, tokenizer) == ["2 assistant reasoning"]
    assert why(THINKING, tokenizer) == "data.chat_template_kwargs: {preserve_thinking: true} keeps it."
    assert tokenizer.template.free_switches == ["preserve_thinking", "quiet"]


def test_a_switch_may_have_to_be_off(load: Load) -> None:
    source = reads("(message.reasoning_content if not clear) ~ message.content")
    source = "{% set clear = clear | default(true) %}" + source
    talk = [user("Hi"), assistant("Hello.", reasoning_content="hm")]
    assert why(talk, load(source=source)) == "data.chat_template_kwargs: {clear: false} keeps it."


# --- by chance ---

NAMES = "chatml cohere deepseek_r1 llama31 mistral_nemo mistral_tools qwen25 qwen3 switches".split()
SAID = st.sampled_from(["ok", "user", "Hello there", "assistant\n", " 42 ", "<b>x</b>", 'It\'s "so"', "six\nseven"])


WORD = "xylograph"


@st.composite
def chats(draw: st.DrawFn) -> tuple[Messages, Any, str]:
    """A chat, its tools, and the name of one of its texts, which is a word that occurs nowhere else."""
    which = draw(st.integers(0, 8))
    labels: list[str] = []
    messages: Messages = []

    def said(kind: str) -> str:
        labels.append(f"{len(messages) + 1} {kind}")
        return WORD if len(labels) - 1 == which else draw(SAID)

    if draw(st.booleans()):
        messages.append({"role": "system", "content": said("system content")})
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(said("user content")))
        if draw(st.booleans()):
            messages.append(calling("add", x=draw(SAID | st.integers(0, 99)), y=said("assistant tool call")))
            messages.append(tool(said("tool tool result")))
        match draw(st.sampled_from(["", "inside", "beside"])):
            case "inside":
                messages.append(assistant(f"<think>{said('assistant reasoning')}</think>{draw(SAID)}"))
            case "beside":
                thought = said("assistant reasoning")
                messages.append(assistant(said("assistant content"), reasoning_content=thought))
            case _:
                messages.append(assistant(said("assistant content")))
    assume(which < len(labels))
    return messages, draw(st.none() | st.just([WEATHER])), labels[which]


@pytest.mark.parametrize("name", NAMES)
def test_a_word_is_left_out_where_the_rendering_lacks_it(load: Load, name: str) -> None:
    tokenizer = load(name)

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(chats())
    def check(drawn: tuple[Messages, Any, str]) -> None:
        messages, tools, called = drawn
        try:
            rendering = tokenizer.template.render(prepared(messages, tokenizer.habits), tools).text
            missing = found(messages, tokenizer, tools)
        except DataError:
            return  # the template does not support tools, or requires alternating roles
        assert (called in missing) == (WORD not in rendering)

    check()
