"""What a chat template leaves out: found whatever the text is, wherever the template puts the rest of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft.data.chat import omitted as module
from sft.data.chat.encode_chat import encode_chat
from sft.data.chat.formats import Chat
from sft.data.chat.omitted import Marked, find_omitted, why_omitted
from sft.data.chat.render import prepared, render_chat
from sft.data.chat.template_pattern import ChatText, TemplatePattern
from sft.data.chat.tokenizer import ByteTokenizer, FolderTokenizer, load_tokenizer
from sft.errors import DataError
from tests.unit.fixtures.chats import CALLING, SYSTEM, TALK, THINKING, TOOLS, Messages, assistant, tool, user
from tests.unit.fixtures.folder import config, make_folder, template

Load = Callable[..., FolderTokenizer]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a town",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "description": "Which one"},
                "when": {"type": "object", "properties": {"day": {"type": "string", "description": "Weekday"}}},
            },
            "required": ["town"],
        },
    },
}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A tokenizer with one of the templates, or with the text of one; new each time, so that it knows nothing yet."""
    folder = make_folder(tmp_path_factory.mktemp("folder"), None)

    def new(name: str = "", source: str | None = None) -> FolderTokenizer:
        file = tmp_path_factory.mktemp("template") / "chat.jinja"
        file.write_text(template(name) if source is None else source, encoding="utf-8")
        loaded = load_tokenizer(config(tokenizer=str(folder), chat_template=str(file)))
        assert isinstance(loaded, FolderTokenizer)
        return loaded

    return new


def found(messages: Messages, tokenizer: Any, tools: Any = None, supervise: Any = "all") -> list[str]:
    """ "1 system content": number of the message or tool, role, kind."""
    rendered = encode_chat(Chat(messages, tools), tokenizer, supervise).rendered
    assert rendered is not None
    return [f"{one.number} {one.role} {one.kind}" for one in find_omitted(rendered)]


def calling(name: str = "add", **arguments: object) -> dict[str, Any]:
    return assistant(None, tool_calls=[{"type": "function", "function": {"name": name, "arguments": arguments}}])


def reads(key: str, words: str = "") -> str:
    """A ChatML template that writes what the Jinja expression `key` gives, and `words` in front of the chat."""
    return (
        words + "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ " + key + " }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def why(messages: Messages, tokenizer: FolderTokenizer, tools: Any = None) -> str:
    rendered = render_chat(Chat(messages, tools), tokenizer)
    return why_omitted(rendered, find_omitted(rendered)[0])


# --- the three cases that somebody met ---


def test_nemo_writes_the_system_message_only_when_it_is_asked(load: Load) -> None:
    nemo = load("mistral_nemo")
    assert found([SYSTEM, *TALK], nemo, supervise="assistant") == ["1 system content"]
    assert found([SYSTEM, *TALK, user("And?")], nemo) == []
    assert found([SYSTEM, *TALK], nemo, TOOLS) == ["1 tools tool schema", "1 system content"]
    assert why([SYSTEM, *TALK], nemo) == (
        "The template writes it in the prompt that asks for the last answer, and leaves it out once the answer "
        "follows: the model is trained without it, and used with it.  Give a template that keeps it "
        "(data.chat_template)."
    )


def test_qwen25_knows_no_reasoning(load: Load) -> None:
    qwen = load("qwen25")
    assert found(THINKING, qwen) == ["2 assistant reasoning", "4 assistant reasoning"]
    assert why(THINKING, qwen) == "The template never reads reasoning_content: give one that does (data.chat_template)."
    inside = [user("Hi"), assistant("<think>\nhm\n</think>\n\nHello.")]
    assert found(inside, qwen) == []


def test_qwen3_leaves_out_earlier_reasoning(load: Load) -> None:
    qwen = load("qwen3")
    assert found(THINKING, qwen) == ["2 assistant reasoning"]
    assert found(THINKING[:2], qwen) == []
    inside = [user("Hi"), assistant("<think>\nhm\n</think>\n\nHello."), user("More?"), assistant("42")]
    assert found(inside, qwen) == ["2 assistant reasoning"]
    assert (
        why(THINKING, qwen)
        == why(inside, qwen)
        == (
            "The template writes it as long as no later message follows.  Give a template that keeps it "
            "(data.chat_template), or make rows that end with that message."
        )
    )


# --- every kind of text ---

CALL = "2 assistant tool call"
LONG = assistant("An answer that goes on and on, and ends")


@pytest.mark.parametrize(
    ("key", "messages", "tools", "expected"),
    [
        ("message.content or message.tool_calls[0].function.arguments | tojson", CALLING, None, [CALL]),
        ("message.content or message.tool_calls[0].function.name", CALLING, None, [CALL]),
        ("message.content or message.tool_calls[0].function | tojson", CALLING, None, []),
        ("message.content or message.tool_calls[0].function | string", CALLING, None, []),
        ("message.content or message.tool_calls[0].function | tojson(indent=4)", CALLING, None, []),
        ("(message.content if message.role != 'tool') or 'f'", [*TALK, tool("3")], None, ["5 tool tool result"]),
        ("message.content | tojson | trim('\"')", [user('a "b"\nc'), assistant("é\n")], None, []),
        ("message.content[:35]", [user("Hi"), LONG], None, ["2 assistant content"]),
    ],
)  # fmt: skip
def test_contents_calls_and_results(load: Load, key: str, messages: Messages, tools: Any, expected: list[str]) -> None:
    tokenizer = load(source=reads(key))
    assert found(messages, tokenizer, tools) == expected
    assert found(messages, tokenizer, tools) == expected  # by what was learnt


@pytest.mark.parametrize(
    ("written", "tools", "expected"),
    [
        ("tools[0].function | tojson", [WEATHER], []),
        ("tools | tojson(indent=2)", [WEATHER, TOOLS[0]], []),
        ("tools[0].function.name", [WEATHER], ["1 tools tool schema"]),
        ("tools[0] | tojson", [WEATHER, TOOLS[0]], ["2 tools tool schema"]),
        ("(tools[0] | tojson)[:200]", [WEATHER], ["1 tools tool schema"]),
        ("'no ' + messages[0].content", [WEATHER, TOOLS[0]], ["1 tools tool schema", "2 tools tool schema"]),
    ],
)
def test_schemas(load: Load, written: str, tools: Any, expected: list[str]) -> None:
    tokenizer = load(source=reads("message.content", "{% if tools %}{{ " + written + " }}{% endif %}"))
    assert found(TALK, tokenizer, tools) == expected
    assert found(TALK, tokenizer, tools) == expected


def test_parameters_of_parameters(load: Load) -> None:
    tokenizer = load("switches")
    assert found(TALK, tokenizer, [WEATHER]) == ["1 tools tool schema"]  # it does not write `day`
    flat = {"type": "function", "function": {**TOOLS[0]["function"], "description": "Adds", "parameters": {
        "properties": {"x": {"type": "integer", "description": "A number"}}}}}  # fmt: skip
    assert found(TALK, tokenizer, [flat]) == []


def test_a_chat_without_an_answer_is_explained_too(load: Load) -> None:
    """data.supervise = all takes chats that hold questions only; a template may still leave out their tools."""
    tokenizer = load(source=reads("message.content"))
    messages = [user("Rome?")]
    [omitted] = find_omitted(render_chat(Chat(messages, [WEATHER]), tokenizer))
    assert (omitted.number, omitted.role, omitted.kind) == (1, "tools", "tool schema")
    why_not = "The template never reads tools: give one that does (data.chat_template)."
    assert why(messages, tokenizer, [WEATHER]) == why_not
    tokenizer = load(source=reads("message.content", "{% if tools and 0 %}{{ tools }}{% endif %}"))
    assert why(messages, tokenizer, [WEATHER]) == "Give a template that writes it (data.chat_template)."


def test_the_byte_tokenizer_leaves_out_nothing() -> None:
    everything = [SYSTEM, user("1 + 2?"), assistant("Let me", reasoning_content="hm", tool_calls=[
        {"type": "function", "function": {"name": "weather", "arguments": {"town": "Rome"}}}]), tool("warm"),
        assistant("Warm.")]  # fmt: skip
    chat = Chat(everything, [WEATHER])
    encoded = encode_chat(chat, ByteTokenizer())
    written = ByteTokenizer().decode(encoded.tokens)
    assert encoded.rendered is None
    for text in ("Be brief.", "1 + 2?", "hm", "Let me", "Rome", "town", "warm", "Warm.", "Weekday", "Which one"):
        assert text in written


# --- texts that stand elsewhere, or stand there by chance ---


def test_what_is_moved_trimmed_or_written_as_json_is_there(load: Load) -> None:
    assert found([SYSTEM, *TALK], load("mistral_tools"), TOOLS) == []
    spaces = [user("  Hello \n"), assistant("\n 42 ")]
    assert found(spaces, load("llama3")) == found(spaces, load("gemma")) == found(spaces, load("cohere")) == []


SHORT = "{% for message in messages %}{% if message.role != 'system' %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"  # noqa: E501  # fmt: skip


@pytest.mark.parametrize("text", ["user", "assistant", "ok", "a", "im_start", "Hello", "5", "fine.", "You are helpful"])
@pytest.mark.parametrize("learnt", [False, True])
def test_a_short_text_is_not_taken_for_another(load: Load, text: str, learnt: bool) -> None:
    """It stands in headers, in what the template says itself, and in other messages."""
    tokenizer = load(source="<|im_start|>system\nYou are helpful, ok?<|im_end|>\n" + SHORT)
    talk = [user("Hello, user. You are helpful?"), assistant("a 5 is ok and fine.")]
    if learnt:
        assert found(talk, tokenizer) == [] and found([SYSTEM, *talk], tokenizer) == ["1 system content"]
    assert found([{"role": "system", "content": text}, *talk], tokenizer) == ["1 system content"]


def test_what_is_known_to_stand_between_decides() -> None:
    """One chat was written as U one A two E, another one, whose answer is thinking alone, as U one A six E."""
    asked, thought, answer = "user/content/", "assistant/reasoning/", "assistant/content/"
    pattern = TemplatePattern()
    pattern.learn("U one A two E", [ChatText(asked, "one", 0), ChatText(answer, "two", 1)], [], "7")
    pattern.learn("U one A six E", [ChatText(asked, "one", 0), ChatText(thought, "six", 1)], [], "7")
    question, ok, so = ChatText(asked, "x", 0), ChatText(answer, "ok", 1), ChatText(thought, "so", 1)
    assert pattern.left_out("U x A ok E", [question, ok], []) == []
    assert pattern.left_out("U x A ok E", [question, so, ok], []) == [so]
    assert pattern.left_out("U x A so E", [question, so, ok], []) == [ok]
    assert pattern.left_out("U x A ok E", [question, ChatText(thought, "ok", 1), ok], []) is None  # which of them?
    assert pattern.left_out("U x B ok E", [question, ok], []) is None  # what is B?
    assert pattern.left_out("U x A ok E!", [question, ok], []) is None
    assert pattern.left_out("Something else", [question, ok], []) is None
    assert pattern.left_out("U Bob: x A ok E", [question, ok], ["Bob:"]) is None
    pattern.learn("U Eve: one A two E", [ChatText(asked, "one", 0), ChatText(answer, "two", 1)], ["Eve:"], "7")
    assert pattern.left_out("U Bob: x A ok E", [question, ok], ["Bob:"]) == []


@pytest.mark.parametrize("text", ["user", "assistant", "think", "six", "42"])
def test_short_reasoning(load: Load, text: str) -> None:
    talk = [user("six"), assistant("six 42", reasoning_content=text), user("think"), assistant("42")]
    for tokenizer in (load("qwen25"), load("qwen3")):
        found(THINKING, tokenizer)
        assert found(talk, tokenizer) == ["2 assistant reasoning"]


def test_a_text_that_is_said_twice_is_written_twice(load: Load) -> None:
    """The template leaves out all that comes before the last question."""
    last = load(source=reads("message.content if loop.index > messages | length - 2 else 'x'"))
    same = [user("a"), assistant("b"), user("a"), assistant("b")]
    assert found(same, last) == ["1 user content", "2 assistant content"]
    assert found(same, load("chatml")) == []


def test_a_template_that_refuses_the_words(load: Load) -> None:
    strict = "{% for m in messages if m.content | length > 20 %}{{ raise_exception('too long') }}{% endfor %}"
    tokenizer = load(source=strict + SHORT)
    assert found([SYSTEM, *TALK[:2]], tokenizer) == ["1 system content"]
    assert found(TALK[:2], tokenizer) == []
    # What another message says is taken first.
    assert found([{"role": "system", "content": "fine"}, *TALK[:2]], tokenizer) == ["1 system content"]


def test_typed_control_strings_are_told_as_typed(load: Load) -> None:
    system = {"role": "system", "content": "Say <|im_end|>."}
    [missing] = find_omitted(render_chat(Chat([system, *TALK], None), load("mistral_nemo")))
    assert missing == (1, "system", "content", "Say <|im_end|>.")


def test_words_of_a_marked_chat() -> None:
    marked = Marked([user("Be 711111 brief."), calling("add", x=1, y=["7"], z=True)], TOOLS, "Be 711111 brief.")
    assert marked.stem == "7111111"
    assert marked.messages[0]["content"] == "Be 71111" + "7111111000001" + "1 brief."
    arguments = marked.messages[1]["tool_calls"][0]["function"]["arguments"]
    assert list(arguments.values()) == [7111111000004, ["7" + "7111111000006"], True]
    assert marked.words(str(arguments)) == [f"7111111{n:06}" for n in (3, 4, 5, 6, 7)]


# --- switches ---


def test_a_switch_that_keeps_it_is_named(load: Load) -> None:
    tokenizer = load("switches")
    assert found(THINKING, tokenizer) == ["2 assistant reasoning"]
    assert why(THINKING, tokenizer) == "data.chat_template_kwargs: {preserve_thinking: true} keeps it."
    assert tokenizer.template.free_switches == ["preserve_thinking", "quiet"]


@pytest.mark.parametrize(("written", "switch"), [("not clear_thinking", "false"), ("keep", "true")])
def test_a_switch_may_have_to_be_off(load: Load, written: str, switch: str) -> None:
    source = reads(f"(message.reasoning_content if {written} is true) ~ message.content").replace(" is true", "")
    source = "{% set clear_thinking = clear_thinking | default(true) %}" + source
    name = "clear_thinking" if "clear" in written else "keep"
    talk = [user("Hi"), assistant("Hello.", reasoning_content="hm")]
    assert why(talk, load(source=source)) == f"data.chat_template_kwargs: {{{name}: {switch}}} keeps it."


# --- by chance ---

NAMES = """chatml cohere deepseek_r1 deepseek_v3 gemma llama3 llama31 mistral_nemo mistral_tools phi3 qwen25 qwen3
qwen3_marked switches""".split()
SAID = st.sampled_from(
    ["ok", "user", "a", "Hello there", "assistant\n", " 42 ", "<b>x</b>", 'It\'s "so"', "six\nseven"]
)


@st.composite
def chats(draw: st.DrawFn) -> tuple[Messages, Any, int]:
    """A chat, its tools, and which of its texts shall be a word that nothing else holds."""
    messages: Messages = [{"role": "system", "content": draw(SAID)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(SAID)))
        if draw(st.booleans()):
            messages += [calling("add", x=draw(SAID | st.integers(0, 99)), y=draw(SAID)), tool(draw(SAID))]
        thinks = draw(st.sampled_from(["", "inside", "beside"]))
        thought, answer = draw(SAID), draw(SAID)
        beside = {"reasoning_content": thought} if thinks == "beside" else {}
        messages.append(assistant(f"<think>{thought}</think>{answer}" if thinks == "inside" else answer, **beside))
    return messages, draw(st.none() | st.just([WEATHER])), draw(st.integers(0, 30))


WORD = "xylograph"


def with_word(messages: Messages, which: int) -> tuple[Messages, str]:
    """One text of one message replaced by a word; and what it is called."""
    spots: list[tuple[int, str, str]] = []
    for i, message in enumerate(messages):
        role = message["role"]
        if message.get("tool_calls"):
            spots.append((i, "call", f"{i + 1} assistant tool call"))
        elif "</think>" not in message["content"]:
            kind = "tool result" if role == "tool" else "content"
            spots.append((i, "content", f"{i + 1} {role} {kind}"))
        else:
            spots.append((i, "inside", f"{i + 1} assistant reasoning"))
        if message.get("reasoning_content"):
            spots.append((i, "reasoning_content", f"{i + 1} assistant reasoning"))
    i, where, name = spots[which % len(spots)]
    changed = dict(messages[i])
    match where:
        case "call":
            changed = calling("add", **{**changed["tool_calls"][0]["function"]["arguments"], "y": WORD})
        case "inside":
            changed["content"] = f"<think>{WORD}</think>" + changed["content"].split("</think>")[1]
        case _:
            changed[where] = WORD
    return [*messages[:i], changed, *messages[i + 1 :]], name


@pytest.mark.parametrize("name", NAMES)
def test_a_word_is_left_out_where_the_rendering_lacks_it(load: Load, name: str) -> None:
    """Whatever was learnt before; and what is found does not depend on that."""
    warm = load(name)

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(chats())
    def check(drawn: tuple[Messages, Any, int]) -> None:
        messages, tools, which = drawn
        messages, called = with_word(messages, which)
        try:
            rendering = warm.template.render(prepared(messages), tools)
            missing = found(messages, warm, tools)
        except DataError:
            return  # it knows no tools, or wants roles to alternate
        assert (called in missing) == (WORD not in rendering)
        fresh = replace(warm.template, name="fresh")
        assert found(messages, replace(warm, template=fresh), tools) == missing

    check()


# --- what it costs ---


def test_one_more_rendering_teaches_a_template(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the same kind, of other texts and numbers of turns, need no rendering of their own."""
    taught = []
    by_words = module._by_words
    monkeypatch.setattr(module, "_by_words", lambda *args: taught.append(1) or by_words(*args))

    def rows(n: int) -> Messages:
        turns = [(user(f"Question {i}?"), assistant(f"Answer {n}.", reasoning_content=f"Let me see {i}: {'x' * n}"))
                 for i in range(n)]  # fmt: skip
        return [{"role": "system", "content": f"Be number {n}."}, *(message for turn in turns for message in turn)]

    for name in ("qwen3", "qwen25", "mistral_nemo", "mistral_tools"):
        tokenizer = load(name)
        for n in range(2, 12):
            found(rows(n), tokenizer)
        assert len(taught) <= 3, name
        taught.clear()
    tokenizer = load("switches")
    for n in range(12):
        found([user("Add"), calling("add", x=n, why=f"since {n}"), tool(str(n)), assistant("So.")], tokenizer)
    assert len(taught) <= 2


def test_templates_are_handed_to_processes_without_what_they_learnt(load: Load, tmp_path: Path) -> None:
    import pickle

    tokenizer = load("qwen3")
    found(THINKING, tokenizer)
    assert found(THINKING, pickle.loads(pickle.dumps(tokenizer))) == ["2 assistant reasoning"]
