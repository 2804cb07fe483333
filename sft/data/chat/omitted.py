"""Finds the texts of a chat that its template leaves out: contents, reasoning, tool calls and results of messages, and
schemas of tools.

Qwen2.5, an answer with reasoning_content "six times seven" and content "42"
...<|im_start|>assistant\\n42<|im_end|>\\n                          left out: assistant reasoning of message 2

First compares the rendering for training with the known fillers, the template's own text between texts of the chat
(`template_pattern.py`).  If the rendering consists of texts and known fillers, this comparison shows which texts are
missing.  Otherwise the chat is rendered again with a marker word in each text.  A text is left out if its marker word
is missing.  The second rendering also teaches new fillers, so further chats need no second rendering.

A text counts as written if the template moves it (Mistral: system in the last question), strips the spaces around it,
or writes it as JSON.  The reason for an omission is found by rendering variants, never by the name of a model.
`data.on_omitted` decides what happens to chats with omitted texts.
"""

import json
import re
from typing import Any, NamedTuple

from sft.data.chat.messages import THINKING, THOUGHT, Message, Tools
from sft.data.chat.render import RenderedChat, restored
from sft.data.chat.template_pattern import COMPOSITE, ChatText, asides_of, texts_of
from sft.errors import DataError

_NOT_WORDS = re.compile(r"[\W_]+")
_MOST_FORMS = 12  # a common multiple of the numbers of forms of all labels
_NAMES = {"reasoning": THINKING, "tool call": ("tool_calls",), "tool schema": ("tools",)}


class OmittedText(NamedTuple):
    """The texts of one message and kind that are left out."""

    number: int  # number of the message or tool; counts from 1
    role: str
    kind: str
    text: str  # the first omitted text


def find_omitted(chat: RenderedChat) -> list[OmittedText]:
    """The texts that the template leaves out of a chat, in the order of the messages."""
    asides = asides_of(chat.messages)
    lost = chat.tokenizer.template.pattern.left_out(chat.text, _texts(chat, chat), asides)
    if lost is None:
        lost = _by_words(chat, asides)
    return [text._replace(text=restored(text.text, chat.stand_ins)) for text in _by_message(lost)]


def why_omitted(chat: RenderedChat, omitted: OmittedText) -> str:
    """Why the template leaves out a text, and a way to keep the text.  The first of these reasons that holds:

    a switch     true or false keeps the text, for a variable that the template reads and that has no value
    no place     the template does not read the key that holds the text
    the prompt   the template writes the text when it asks for the last answer, but not when the answer follows
    later turns  the template writes the text only if no later message follows

    GLM-4.6, reasoning  ->  data.chat_template_kwargs: {clear_thinking: false} keeps it.
    """
    template = chat.tokenizer.template
    if switch := _switch(chat, omitted):
        name, value = switch
        return f"data.chat_template_kwargs: {{{name}: {str(value).lower()}}} keeps it."
    index = omitted.number - 1 if omitted.role != "tools" else -1
    names = _NAMES.get(omitted.kind, ())
    in_content = omitted.kind == "reasoning" and not any(chat.messages[index].get(name) for name in names)
    if names and not in_content and not any(name in template.code for name in names):
        return f"The template never reads {names[0]}: give a template that does (data.chat_template)."
    last_answer = max((i for i, message in enumerate(chat.messages) if message["role"] == "assistant"), default=None)
    if last_answer is not None and index < last_answer and _is_written(chat, omitted, last_answer, prompt=True):
        return (
            "The template writes this text in a prompt without an answer, and leaves it out if the answer follows: "
            "the model is trained without the text, but used with it.  Give a template that keeps the text "
            "(data.chat_template)."
        )
    if 0 <= index < len(chat.messages) - 1 and _is_written(chat, omitted, index + 1, prompt=False):
        return (
            "The template writes this text only if no later message follows.  Give a template that keeps the text "
            "(data.chat_template), or make rows that end with its message."
        )
    return "Give a template that writes this text (data.chat_template)."


def _switch(chat: RenderedChat, omitted: OmittedText) -> tuple[str, bool] | None:
    """A variable of the template, and a value with which the template writes the text and omits no other text."""
    now = {text[:3] for text in _omitted_of(chat, chat.messages) or []}
    for name in chat.tokenizer.template.free_switches:
        for value in (True, False):
            with_switch = _omitted_of(chat, chat.messages, switches={name: value})
            if with_switch is not None and {text[:3] for text in with_switch} <= now - {omitted[:3]}:
                return name, value
    return None


def _is_written(chat: RenderedChat, omitted: OmittedText, num_messages: int, *, prompt: bool) -> bool:
    """Whether the template writes a text if the chat has only its first `num_messages` messages."""
    lost = _omitted_of(chat, chat.messages[:num_messages], prompt=prompt)
    return lost is not None and omitted[:3] not in {text[:3] for text in lost}


def _omitted_of(
    chat: RenderedChat, messages: list[Message], *, prompt: bool = False, switches: dict[str, Any] | None = None
) -> list[OmittedText] | None:
    """The texts left out of these messages, found by marker words; None if the template refuses the messages."""
    chat = chat._replace(messages=messages)
    marked = Marked(messages, chat.tools, chat.everything)
    probe = _render_marked(chat, marked, prompt=prompt, switches=switches)
    return None if probe is None else _by_message(_without_word(chat, marked, probe))


def _by_words(chat: RenderedChat, asides: list[str]) -> list[ChatText]:
    """The texts whose marker words the template does not write.  Also learns the fillers between texts."""
    marked = Marked(chat.messages, chat.tools, chat.everything)
    probe = _render_marked(chat, marked)
    if probe is None:
        return _by_searching(chat)
    pattern, present = chat.tokenizer.template.pattern, set(marked.words(probe))
    for _ in range(_MOST_FORMS):
        texts = _texts(chat, marked)
        written = [text for text in texts if (words := marked.words(text.written)) and present.issuperset(words)]
        unlike = {text.label for text in written if text.written not in probe}
        for label in sorted(unlike):
            pattern.next_form(label)
        if not unlike:
            break
    pattern.learn(probe, written, asides, marked.stem)
    return _without_word(chat, marked, probe, chat.text)


class Marked:
    """A chat with a different marker word inside each text.  Its rendering shows which texts the template writes.

    content "Be brief."  ->  "Be br711111000001ief."

    A marker word is in the middle of a text, because a template may look for strings at the start and end of a text.
    Marker words consist of digits, which no quoting changes.  In arguments of a call, a word replaces each number.
    """

    def __init__(self, messages: list[Message], tools: Tools, everything: str) -> None:
        # No text of the chat contains the stem, so every marker word in a rendering was inserted by this class.  The
        # stem's beginning differs from its end, so digits before a word cannot be taken for the beginning of the word.
        self.stem = "711111"
        while self.stem in everything:
            self.stem += "1"
        self._count = 0
        self._word = re.compile(self.stem + r"\d{6}")
        self.messages = [self._message(message) for message in messages]
        self.tools = None if tools is None else [self._tool(tool) for tool in tools]

    def words(self, text: str) -> list[str]:
        """The marker words in a text."""
        return self._word.findall(text)

    def _mark(self, text: str) -> str:
        bare = text.strip()
        if not bare:
            return text
        middle = text.index(bare) + (len(bare) + 1) // 2
        return text[:middle] + self._new() + text[middle:]

    def _new(self) -> str:
        self._count += 1
        return f"{self.stem}{self._count:06}"

    def _message(self, message: Message) -> Message:
        marked = dict(message)
        thought = next((message[key] for key in THINKING if message.get(key)), None)
        if thought is not None:
            marked |= dict.fromkeys((key for key in THINKING if key in message), self._mark(thought))
        content = message.get("content") or ""
        inside = THOUGHT.match(content) if message["role"] == "assistant" and "</think>" in content else None
        if inside:
            content = inside[1] + self._mark(inside[2]) + inside[3] + self._mark(inside[4])
        if content:
            marked["content"] = content if inside else self._mark(content)
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return marked

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function") or call
        marked = {**function, "name": self._mark(str(function.get("name", "")))}
        if "arguments" in function:
            marked["arguments"] = self._argument(function["arguments"])
        return {**call, "function": marked} if "function" in call else marked

    def _argument(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._mark(value)
        if isinstance(value, dict):
            return {self._mark(key): self._argument(item) for key, item in value.items()}
        if isinstance(value, int | float) and not isinstance(value, bool):
            return int(self._new())
        return [self._argument(item) for item in value] if isinstance(value, list) else value

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool.get("function", tool)
        marked = {**self._schema(function), "name": self._mark(str(function.get("name", "")))}
        return {**tool, "function": marked} if "function" in tool else marked

    def _schema(self, value: Any) -> Any:
        """Marks descriptions and names of parameters at any depth of a schema."""
        if isinstance(value, list):
            return [self._schema(item) for item in value]
        if not isinstance(value, dict):
            return value
        marked: dict[str, Any] = {}
        properties = value.get("properties")
        names = {name: self._mark(name) for name in properties} if isinstance(properties, dict) else {}
        for key, item in value.items():
            if key == "properties" and names:
                marked[key] = {names[name]: self._schema(schema) for name, schema in item.items()}
            elif key == "required" and isinstance(item, list):
                marked[key] = [names.get(name, name) if isinstance(name, str) else name for name in item]
            elif key == "description" and isinstance(item, str):
                marked[key] = self._mark(item)
            else:
                marked[key] = self._schema(item)
        return marked


def _without_word(chat: RenderedChat, marked: Marked, probe: str, rendering: str | None = None) -> list[ChatText]:
    """The texts whose marker word is missing in `probe`, the rendering of the marked chat.  With `rendering`, the
    rendering of the chat itself, also the texts that `rendering` does not contain completely."""
    present, lost = set(marked.words(probe)), []
    for text, with_word in zip(_texts(chat, chat), _texts(chat, marked), strict=True):
        is_cut = (
            rendering is not None
            and text.label not in COMPOSITE
            and text.written not in rendering
            and not _is_like(text.written, rendering)
        )
        if is_cut or not present.issuperset(marked.words(with_word.written)):
            lost.append(text)
    return lost


def _is_like(text: str, rendering: str) -> bool:
    """Whether a rendering contains all letters and digits of a text in order, with any spaces, quotes and escapes."""
    bare = _NOT_WORDS.sub("", rendering)
    forms = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1])
    return any(_NOT_WORDS.sub("", form) in bare for form in forms)


def _by_searching(chat: RenderedChat) -> list[ChatText]:
    """The texts that are not found in the rendering, longer texts first; for templates that refuse marker words."""
    rest, lost = chat.text, []
    for text in sorted(_texts(chat, chat), key=lambda text: -len(text.written)):
        if text.written in rest:
            rest = rest.replace(text.written, "\0", 1)
        elif text.label in COMPOSITE or not _is_like(text.written, rest):
            lost.append(text)
    return lost


def _render_marked(
    chat: RenderedChat, marked: Marked, *, prompt: bool = False, switches: dict[str, Any] | None = None
) -> str | None:
    """The rendering of the marked chat; None if the template refuses the chat."""
    try:
        return chat.tokenizer.template.render(marked.messages, marked.tools, prompt=prompt, switches=switches)
    except DataError:
        return None


def _texts(chat: RenderedChat, shown: RenderedChat | Marked) -> list[ChatText]:
    """The texts of a chat, or of the marked chat, in the known forms of its template."""
    return texts_of(shown.messages, shown.tools, chat.tokenizer.template.pattern.forms)


def _by_message(texts: list[ChatText]) -> list[OmittedText]:
    """One OmittedText for each message and kind, tools first."""
    firsts: dict[tuple[bool, int, str, str], str] = {}
    for text in texts:
        role, kind, _ = text.label.split("/")
        firsts.setdefault((role != "tools", text.position, role, kind), text.written)
    return [OmittedText(index + 1, role, kind, text) for (_, index, role, kind), text in sorted(firsts.items())]
