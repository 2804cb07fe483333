"""Locates the assistant's turns in a rendered chat.  Tries three proofs in order, and raises an error if none holds.

1. marks    The template has {% generation %} blocks, one per assistant turn.
2. prefix   The text before the turn is exactly the prompt with which the template asks for the turn.  The turn begins
            after that prompt: with content and end of turn, or, if the message has thinking or tool calls, with the
            text that the template adds for this message.
3. blank    The chat is rendered again with a private character in place of the assistant's text.  The turn is the part
            that differs, if both renderings are equal before and after this part.
4. error    The error names the template and shows both renderings.

A turn is the content, tool calls and thinking as the template writes them, and the token that ends the turn.  Text that
the template inserts is not part of the turn: the header, the newline after the turn, an empty <think></think>.
Every proof compares characters; `tokens.py` proves that the tokens of a turn decode to these characters.
"""

import re
from typing import Literal, NamedTuple

from sft.data.chat.messages import THINKING, THOUGHT, Message, quoted
from sft.data.chat.render import RenderedChat, free_characters
from sft.data.chat.template import Refused
from sft.data.chat.tokenizer import FolderTokenizer
from sft.errors import DataError

Proof = Literal["marks", "prefix", "blank"]
# Proof 2 renders once for each turn.  It fails for the last turn if the template puts its own text before an answer.
# For such chats, and for chats with more than MANY_TURNS turns, one rendering with all turns blanked is tried first.
MANY_TURNS = 3
_SPACES = re.compile(r"\s*")


class Turn(NamedTuple):
    """One assistant turn: text[start:end] of the rendered chat, including the end-of-turn token."""

    message: int  # index of the message in the chat
    start: int
    end: int
    proof: Proof


def find_turns(chat: RenderedChat, wanted: list[int]) -> list[Turn]:
    """The turns of the messages `wanted`, in order.  Raises DataError if a turn cannot be proven.

    "<|im_start|>user\\na<|im_end|>\\n<|im_start|>assistant\\nb<|im_end|>\\n", [1]  ->  the characters of b<|im_end|>
    """
    if chat.tokenizer.template.has_markers:
        turns = _marked(chat, wanted) if wanted else []
    else:
        at_once = len(wanted) > MANY_TURNS or chat.tokenizer.delimiters.lead.strip()
        together = _all_blanked(chat, wanted) if at_once else None
        turns = together or [_prefix(chat, i) or _blanked(chat, i) for i in wanted]
    for turn, following in zip(turns, turns[1:], strict=False):
        if following.start < turn.end:
            raise _error(chat, following.message, "writes it before an earlier one", chat.text[following.start :])
    return turns


def _marked(chat: RenderedChat, wanted: list[int]) -> list[Turn]:
    """Proof 1: one {% generation %} block per assistant turn.  The block contains all text of the assistant.  The end
    of turn is in the block or directly after it."""
    template, delimiters, text = chat.tokenizer.template, chat.tokenizer.delimiters, chat.text
    answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if len(chat.marks) != len(answers):
        raise DataError(
            f"chat template {template.name} marks {len(chat.marks)} generation blocks for {len(answers)} assistant "
            "turns.  Put {% generation %} around the assistant's text of each turn."
        )
    has_plain_lead = delimiters.header and not chat.tokenizer.control.search(delimiters.lead)
    inserted = delimiters.lead.strip() if has_plain_lead else ""
    turns, previous_stop = [], 0
    for i, (start, stop) in zip(answers, chat.marks, strict=True):
        header = text.rfind(delimiters.header, 0, start) if delimiters.header else 0
        before, previous_stop = text[max(previous_stop, header) : start], stop
        if i not in wanted:
            continue
        end, thinking = delimiters.first_end(text, start), _thinking_of(chat.messages[i])
        if (
            end is None
            or (end[1] > stop and end[0] != _after_spaces(text, stop))
            or not _is_assistant_text(chat.messages[i], text[start : end[0]], chat.tokenizer, inserted=inserted)
            or (thinking and thinking in before)
            or chat.tokenizer.control.sub("", text[end[1] : stop]).strip()
        ):
            raise _error(chat, i, "marks as the assistant's", text[start:stop])
        turns.append(Turn(i, start, end[1], "marks"))
    return turns


def _prefix(chat: RenderedChat, i: int) -> Turn | None:
    """Proof 2: the turn is the text after the prompt that asks for the turn."""
    delimiters, text, message = chat.tokenizer.delimiters, chat.text, chat.messages[i]
    prompt = _render(chat, chat.messages[:i], prompt=True) if i else None
    if prompt is None or not text.startswith(prompt):
        return None
    start = len(prompt)
    if _is_plain(message):  # the turn is content, end of turn, and spaces around them
        content, content_start = _content_of(message), _after_spaces(text, start)
        stop = _after_spaces(text, content_start + len(content))
        token = delimiters.end_at(text, stop)
        if token is None or not text.startswith(content, content_start):
            return None
        return Turn(i, start, stop + len(token), "prefix")
    upto = text if i + 1 == len(chat.messages) else _render(chat, chat.messages[: i + 1])
    end = delimiters.first_end(text, start)
    if end is None or upto is None or upto[: end[1]] != text[: end[1]]:
        return None
    rest = chat.tokenizer.control.sub("", upto[end[1] :])  # some templates write a further token at the end of a chat
    # The lead is not the assistant's text: it is a header that the prompt lacks, or thinking that the row lacks.
    inserted = delimiters.lead.strip() and (not delimiters.header or text.startswith(delimiters.lead, start))
    if rest.strip() or inserted or not _is_assistant_text(message, text[start : end[0]], chat.tokenizer):
        return None
    return Turn(i, start, end[1], "prefix")


def _blanked(chat: RenderedChat, i: int) -> Turn:
    """Proof 3: the turn is the difference from a rendering in which the assistant wrote another text."""
    message = chat.messages[i]
    mark, thought = free_characters(chat.everything, 2)
    bare = {key: value for key, value in message.items() if key not in ("tool_calls", *THINKING)}
    blanks = [({**bare, "content": mark}, False)]
    thinking, content = _thinking_of(message), str(message.get("content") or "")
    inside = THOUGHT.match(content)
    if any(message.get(key) for key in THINKING):
        blanks.append(({**bare, "content": mark, **{key: thought for key in THINKING if key in message}}, True))
    elif inside and thinking:
        blanks.append(({**bare, "content": inside[1] + thought + inside[3] + mark}, True))
    shown = ""  # the first rendering that proves nothing, shown in the error
    for blank, with_thinking in blanks:
        blanked = _render(chat, [*chat.messages[:i], blank, *chat.messages[i + 1 :]])
        if blanked is None or blanked.count(mark) != 1 or blanked.count(thought) != int(with_thinking):
            continue
        turn = _difference(chat, i, blanked, mark, thought if with_thinking else None)
        if turn is not None:
            return turn
        shown = shown or blanked.replace(mark, "...").replace(thought, "...")
    raise _unproven(chat, i, shown)


def _difference(chat: RenderedChat, i: int, blanked: str, mark: str, thought: str | None) -> Turn | None:
    """The turn: the text between the common beginning and the common end of the two renderings."""
    delimiters, text, message = chat.tokenizer.delimiters, chat.text, chat.messages[i]
    before, after = blanked.split(mark)
    before, _, between = before.partition(thought) if thought else (before, "", "")
    at = _after_spaces(after, 0)
    blank_end = delimiters.end_at(after, at)
    if blank_end is None or not text.startswith(before):
        return None
    # A turn with a tool call and a turn with text may end with different tokens.
    rest = after[at + len(blank_end) :]
    end = delimiters.first_end(text, len(before))
    if end is None or text[end[1] :] != rest:
        return None
    written, start = text[len(before) : end[0]], len(before)
    if thought:
        thinking = _thinking_of(message)
        opened = before.rfind(delimiters.header) + len(delimiters.header) if delimiters.header in before else -1
        if not delimiters.header or opened < 0 or chat.tokenizer.control.search(before, opened):
            return None  # the start of the turn is unknown
        if not written.strip().startswith(thinking) or between.strip() not in written[len(thinking) :]:
            return None
        start = opened  # <think> is a part of the assistant's text
    return Turn(i, start, end[1], "blank") if _is_assistant_text(message, written, chat.tokenizer) else None


def _all_blanked(chat: RenderedChat, wanted: list[int]) -> list[Turn] | None:
    """Proof 3 for many turns of plain text in one rendering; None if the proof fails."""
    delimiters, text = chat.tokenizer.delimiters, chat.text
    if not all(_is_plain(chat.messages[i]) for i in wanted):
        return None
    try:
        marks = free_characters(chat.everything, len(wanted))
    except DataError:  # proof 2 needs no private characters
        return None
    spans = _locate(chat, dict(zip(marks, wanted, strict=True)))
    lead = "" if delimiters.lead.strip() else delimiters.lead
    turns = []
    for i in wanted:
        if i not in spans:
            return None
        start, stop = spans[i]
        after = _after_spaces(text, stop)
        end = delimiters.end_at(text, after)
        opening = text[max(0, start - 200) : start].removesuffix(delimiters.lead)
        if end is None or not opening.endswith(delimiters.header):
            return None
        turns.append(Turn(i, start - len(lead), after + len(end), "blank"))
    return turns


def _locate(chat: RenderedChat, marks: dict[str, int]) -> dict[int, tuple[int, int]]:
    """The spans of some messages' contents, found by one rendering with a private character in place of each content
    (`marks`); {} if the rendering also differs at other places."""
    messages = list(chat.messages)
    for mark, i in marks.items():
        messages[i] = {**messages[i], "content": mark}
    blanked = _render(chat, messages)
    if blanked is None or not marks:
        return {}
    offsets, after = [], 0
    for mark in marks:
        offset = blanked.find(mark, after)  # most templates write messages in order
        after = offset + 1 if offset >= 0 else after
        offsets.append((offset if offset >= 0 else blanked.find(mark), mark))
    offsets.sort()
    opening = blanked[: offsets[0][0]]
    if offsets[0][0] < 0 or not chat.text.startswith(opening):
        return {}
    spans, start = {}, len(opening)
    for (offset, mark), following in zip(offsets, [*(offset for offset, _ in offsets[1:]), len(blanked)], strict=True):
        content, between = str(chat.messages[marks[mark]].get("content") or ""), blanked[offset + 1 : following]
        forms = (content, content.rstrip(), content.lstrip(), content.strip())
        # If the template writes a mark twice, `between` contains it, and the real text does not.
        form = next((form for form in forms if chat.text.startswith(form + between, start)), None)
        if form is None:
            return {}
        spans[marks[mark]] = (start, start + len(form))
        start += len(form) + len(between)
    return spans if start == len(chat.text) else {}


def _render(chat: RenderedChat, messages: list[Message], *, prompt: bool = False) -> str | None:
    """Renders `messages` with the tools and template of `chat`; None if the template refuses the messages."""
    try:
        return chat.tokenizer.template.render(messages, chat.tools, prompt=prompt)
    except Refused:
        return None


def _after_spaces(text: str, start: int) -> int:
    return _SPACES.match(text, start).end()  # type: ignore[union-attr]  # matches the empty string too


# The assistant's text


def _is_assistant_text(message: Message, text: str, tokenizer: FolderTokenizer, *, inserted: str = "") -> bool:
    """Whether `text` is the content of the assistant's message, alone or with its thinking and tool calls.

    inserted  text that the template may have put before the content
    """
    content, answer, thinking = _content_of(message), _answer_of(message), _thinking_of(message)
    text = text.strip().removeprefix(inserted).strip()
    if not message.get("tool_calls"):
        if text in (content, answer):
            return True
        before = text.removesuffix(answer)
        has_thinking = bool(thinking) and text.endswith(answer) and thinking in before
        return has_thinking and not _has_header(text, message, tokenizer)
    names = [str((call.get("function") or call).get("name", "")) for call in message["tool_calls"]]
    prose = next((part for part in (content, answer) if part in text), None)
    if prose is None or _has_header(text, message, tokenizer):
        return False
    calls = text.replace(prose, "", 1) if prose else text  # the content may mention a call's name without a call
    return all(calls.count(name) >= names.count(name) for name in names)


def _has_header(text: str, message: Message, tokenizer: FolderTokenizer) -> bool:
    """Whether text begins with the header that asks for an answer, or with its last plain words: "assistant"."""
    header = tokenizer.delimiters.header.strip()
    if tokenizer.control.search(header) and header in text:
        return True
    words = tokenizer.control.split(header)[-1].strip()
    texts = (_content_of(message), _answer_of(message), _thinking_of(message))
    is_own = any(own and text.startswith(own) for own in texts)
    return bool(words) and not is_own and re.match(re.escape(words) + r"\s", text) is not None


def _is_plain(message: Message) -> bool:
    """Whether a message has content only."""
    return not any(message.get(key) for key in ("tool_calls", *THINKING))


def _content_of(message: Message) -> str:
    return str(message.get("content") or "").strip()


def _thinking_of(message: Message) -> str:
    """The assistant's thinking, from a key of its own or from the start of the content: <think>...</think>."""
    separate = next((str(message[key]) for key in THINKING if message.get(key)), None)
    if separate is not None:
        return separate.strip()
    inside = THOUGHT.match(str(message.get("content") or ""))
    return inside[2] if inside else ""


def _answer_of(message: Message) -> str:
    """The content without thinking at its start, which templates leave out of earlier turns."""
    content = _content_of(message)
    inside = THOUGHT.match(content)
    return inside[4].strip() if inside else content


def _unproven(chat: RenderedChat, i: int, blanked: str) -> DataError:
    """An error with both renderings, from shortly before the first character in which they differ."""
    text = chat.text
    differs = next((k for k, (a, b) in enumerate(zip(text, blanked, strict=False)) if a != b), len(blanked))
    begin = max(0, differs - 40)
    other = (
        f"If ... replaces the assistant's text, the template writes {quoted(blanked[begin:], 120)}.  "
        if blanked
        else "If another text replaces the assistant's text, the template refuses the chat or leaves the text out.  "
    )
    return _error(chat, i, "writes", text[begin:], other)


def _error(chat: RenderedChat, i: int, does: str, wrote: str, other: str = "") -> DataError:
    tokenizer, content = chat.tokenizer, quoted(str(chat.messages[i].get("content") or ""))
    return DataError(
        f"chat template {tokenizer.template.name}: the assistant's text of message {i + 1} cannot be located.  The "
        f"template {does} {quoted(wrote, 120)}.  {other}The content is {content} and a turn ends with "
        f"{' or '.join(tokenizer.delimiters.ends)}.  Give a template (data.chat_template) with {{% generation %}} "
        "around the content and the end of turn."
    )
