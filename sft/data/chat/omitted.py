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

from sft.data.chat.texts import COMPOSITE, Marked, Text, asides_of, texts_of
from sft.data.chat.turns import Rendered
from sft.errors import DataError

_NOT_WORDS = re.compile(r"[\W_]+")
_MOST_FORMS = 12  # each label's ways of writing, whole times


class Missing(NamedTuple):
    """Texts of one message that are left out.

    number  of the message or tool, from 1
    said    the first of the texts
    """

    number: int
    role: str
    kind: str
    said: str


def omitted(chat: Rendered) -> list[Missing]:
    """What the template leaves out of a chat, in the order of the messages."""
    between = chat.tokenizer.template.between
    texts, asides = texts_of(chat.messages, chat.tools, between.forms), asides_of(chat.messages)
    lost = between.left_out(chat.text, texts, asides)
    if lost is None:
        lost = _by_words(chat, asides)
    return _by_message(lost) if lost else []


def omitted_with(chat: Rendered, switches: dict[str, Any]) -> list[Missing] | None:
    """The same with other variables for the template; None where it refuses the chat then."""
    marked = Marked(chat.messages, chat.tools, chat.everything)
    probe = _rendered(chat, marked, switches=switches)
    return None if probe is None else _by_message(_without_word(chat, marked, probe))


def writes(chat: Rendered, missing: Missing, upto: int, *, prompt: bool) -> bool:
    """Whether the template writes a text in the chat's first `upto` messages."""
    marked = Marked(chat.messages[:upto], chat.tools, chat.everything)
    probe = _rendered(chat, marked, prompt=prompt)
    if probe is None:
        return False
    short = chat._replace(messages=chat.messages[:upto])
    lost = {(one.number, one.role, one.kind) for one in _by_message(_without_word(short, marked, probe))}
    return missing[:3] not in lost


def _by_words(chat: Rendered, asides: list[str]) -> list[Text]:
    """The texts whose words the template does not write; it is learnt from that what it writes between texts."""
    marked = Marked(chat.messages, chat.tools, chat.everything)
    probe = _rendered(chat, marked)
    if probe is None:
        return _by_searching(chat)
    between, found = chat.tokenizer.template.between, set(marked.words(probe))
    for _ in range(_MOST_FORMS):
        texts = texts_of(marked.messages, marked.tools, between.forms)
        written = [one for one in texts if (words := marked.words(one.said)) and found.issuperset(words)]
        unlike = {one.label for one in written if one.said not in probe}
        for label in sorted(unlike):
            between.next_form(label)
        if not unlike:
            break
    between.learn(probe, written, asides, marked.stem)
    return _without_word(chat, marked, probe, chat.text)


def _without_word(chat: Rendered, marked: Marked, probe: str, text: str | None = None) -> list[Text]:
    """The texts of which `probe`, the rendering of the marked chat, lacks a word; with `text`, the rendering of the
    chat itself, also those of which not all stands there."""
    forms, found = chat.tokenizer.template.between.forms, set(marked.words(probe))
    with_words = texts_of(marked.messages, marked.tools, forms)
    lost = []
    for one, other in zip(texts_of(chat.messages, chat.tools, forms), with_words, strict=True):
        is_cut = (
            text is not None and one.label not in COMPOSITE and one.said not in text and not _is_like(one.said, text)
        )
        if is_cut or not found.issuperset(marked.words(other.said)):
            lost.append(one)
    return lost


def _is_like(said: str, text: str) -> bool:
    """Whether all letters and digits of a text stand in another one, however it writes spaces, quotes and escapes."""
    bare = _NOT_WORDS.sub("", text)
    forms = (said, json.dumps(said)[1:-1], json.dumps(said, ensure_ascii=False)[1:-1], repr(said)[1:-1])
    return any(_NOT_WORDS.sub("", form) in bare for form in forms)


def _by_searching(chat: Rendered) -> list[Text]:
    """Where the template refuses the words: a text is left out if it stands nowhere, longer ones taken first."""
    text, lost = chat.text, []
    for one in sorted(texts_of(chat.messages, chat.tools, chat.tokenizer.template.between.forms), key=_by_length):
        if one.said in text:
            text = text.replace(one.said, "\0", 1)
        elif one.label in COMPOSITE or not _is_like(one.said, text):
            lost.append(one)
    return lost


def _by_length(text: Text) -> int:
    return -len(text.said)


def _rendered(
    chat: Rendered, marked: Marked, *, prompt: bool = False, switches: dict[str, Any] | None = None
) -> str | None:
    """The marked chat; None where the template refuses it."""
    try:
        return chat.tokenizer.template.render(marked.messages, marked.tools, prompt=prompt, switches=switches)
    except DataError:
        return None


def _by_message(texts: list[Text]) -> list[Missing]:
    """One for each message and kind, tools first."""
    missing: dict[tuple[bool, int, str, str], str] = {}
    for one in texts:
        role, kind, _ = one.label.split("/")
        missing.setdefault((role != "tools", one.place, role, kind), one.said)
    return [Missing(place + 1, role, kind, said) for (_, place, role, kind), said in sorted(missing.items())]
