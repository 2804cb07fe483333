"""Which texts of a chat its template leaves out: for every message its content, reasoning, tool calls and results, and
for every tool its schema.

Qwen2.5, an answer with reasoning_content "six times seven" and content "42"
...<|im_start|>assistant\\n42<|im_end|>\\n                          left out: assistant reasoning of message 2

Decides by two renderings of the same chat.  What the template is known to write between texts is followed through the
rendering that is there anyway (`between.py`): if nothing else stands in it, each text is there or not.  Otherwise the
chat is rendered once more with a word in each text, and a text is left out if its word is; that rendering also teaches
what stands between texts, so that further chats of the template need none of their own.

A text that stands elsewhere than its message (Mistral: system in the last question), without the spaces around it, or
as JSON is not left out.  Does not decide what becomes of such chats (`data.on_omitted`).
"""

import json
import re
from typing import Any, NamedTuple

from sft.data.chat.message_types import Message
from sft.data.chat.render import RenderedChat
from sft.data.chat.texts import COMPOSITE, ChatText, Marked, asides_of, texts_of
from sft.errors import DataError

_NOT_WORDS = re.compile(r"[\W_]+")
_MOST_FORMS = 12  # each label's ways of writing, whole times


class OmittedText(NamedTuple):
    """Texts of one message and kind that are left out.

    number  of the message or tool, from 1
    text    the first of them
    """

    number: int
    role: str
    kind: str
    text: str


def find_omitted(chat: RenderedChat) -> list[OmittedText]:
    """What the template leaves out of a chat, in the order of the messages."""
    between = chat.tokenizer.template.between
    texts, asides = texts_of(chat.messages, chat.tools, between.forms), asides_of(chat.messages)
    lost = between.left_out(chat.text, texts, asides)
    if lost is None:
        lost = _by_words(chat, asides)
    return _by_message(lost) if lost else []


def omitted_with(chat: RenderedChat, switches: dict[str, Any]) -> list[OmittedText] | None:
    """The same with other variables for the template; None where it refuses the chat then."""
    return _omitted_of(chat, chat.messages, switches=switches)


def is_written(chat: RenderedChat, omitted: OmittedText, num_messages: int, *, prompt: bool) -> bool:
    """Whether the template writes a text where the chat has its first `num_messages` messages only."""
    lost = _omitted_of(chat, chat.messages[:num_messages], prompt=prompt)
    return lost is not None and omitted[:3] not in {text[:3] for text in lost}


def _omitted_of(
    chat: RenderedChat, messages: list[Message], *, prompt: bool = False, switches: dict[str, Any] | None = None
) -> list[OmittedText] | None:
    """What is left out of these messages, by their words; None where the template refuses them."""
    chat = chat._replace(escaped=chat.escaped._replace(messages=messages))
    marked = Marked(messages, chat.tools, chat.escaped.everything)
    probe = _render_marked(chat, marked, prompt=prompt, switches=switches)
    return None if probe is None else _by_message(_without_word(chat, marked, probe))


def _by_words(chat: RenderedChat, asides: list[str]) -> list[ChatText]:
    """The texts whose words the template does not write; it is learnt from that what it writes between texts."""
    marked = Marked(chat.messages, chat.tools, chat.escaped.everything)
    probe = _render_marked(chat, marked)
    if probe is None:
        return _by_searching(chat)
    between, present = chat.tokenizer.template.between, set(marked.words(probe))
    for _ in range(_MOST_FORMS):
        texts = texts_of(marked.messages, marked.tools, between.forms)
        written = [text for text in texts if (words := marked.words(text.written)) and present.issuperset(words)]
        unlike = {text.label for text in written if text.written not in probe}
        for label in sorted(unlike):
            between.next_form(label)
        if not unlike:
            break
    between.learn(probe, written, asides, marked.stem)
    return _without_word(chat, marked, probe, chat.text)


def _without_word(chat: RenderedChat, marked: Marked, probe: str, rendering: str | None = None) -> list[ChatText]:
    """The texts of which `probe`, the rendering of the marked chat, lacks a word; with `rendering`, that of the chat
    itself, also those of which not all stands there."""
    forms, present = chat.tokenizer.template.between.forms, set(marked.words(probe))
    with_words = texts_of(marked.messages, marked.tools, forms)
    lost = []
    for text, with_word in zip(texts_of(chat.messages, chat.tools, forms), with_words, strict=True):
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
    """Whether all letters and digits of a text stand in a rendering, however it writes spaces, quotes and escapes."""
    bare = _NOT_WORDS.sub("", rendering)
    forms = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1])
    return any(_NOT_WORDS.sub("", form) in bare for form in forms)


def _by_searching(chat: RenderedChat) -> list[ChatText]:
    """Where the template refuses the words: a text is left out if it stands nowhere, longer ones taken first."""
    rest, lost = chat.text, []
    texts = texts_of(chat.messages, chat.tools, chat.tokenizer.template.between.forms)
    for text in sorted(texts, key=lambda text: -len(text.written)):
        if text.written in rest:
            rest = rest.replace(text.written, "\0", 1)
        elif text.label in COMPOSITE or not _is_like(text.written, rest):
            lost.append(text)
    return lost


def _render_marked(
    chat: RenderedChat, marked: Marked, *, prompt: bool = False, switches: dict[str, Any] | None = None
) -> str | None:
    """The marked chat; None where the template refuses it."""
    try:
        return chat.tokenizer.template.render(marked.messages, marked.tools, prompt=prompt, switches=switches)
    except DataError:
        return None


def _by_message(texts: list[ChatText]) -> list[OmittedText]:
    """One for each message and kind, tools first."""
    firsts: dict[tuple[bool, int, str, str], str] = {}
    for text in texts:
        role, kind, _ = text.label.split("/")
        firsts.setdefault((role != "tools", text.position, role, kind), text.written)
    return [OmittedText(index + 1, role, kind, text) for (_, index, role, kind), text in sorted(firsts.items())]
