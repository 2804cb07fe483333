"""Where in a rendered chat the assistant's turns stand: a ladder of proofs, and an error where none holds.

1. marks    the template has {% generation %} blocks, one per assistant turn.
2. prefix   what stands before the turn is exactly the prompt that the template writes to ask for it, so the turn is
            what the text has beyond that prompt: content and end of turn at once, or with thinking or tool calls
            what the template adds for this message.
3. blank    the chat is rendered again with a private character in place of what the assistant said; what differs is
            the turn, if all that stands before and behind it is the same.
4. error    naming the template, with both renderings.

A turn is the content, tool calls and thinking as the template writes them, and the token that ends the turn.  What
the template inserts by itself is not part of it: header, the newline after the turn, an empty <think></think>.
Every rung compares characters; that the tokens say the same is proven in `cover.py`.

The chats given here hold no control string in any message (`typed.py`), so that each one found is the template's.
"""

import json
import re
from typing import Literal, NamedTuple

from sft.data.chat.assistant_text import THOUGHT, content_of, is_plain, says, thinking_of
from sft.data.chat.escaping import free_characters
from sft.data.chat.template import THINKING, Message, Refused, Tools
from sft.data.chat.tokenizer import FolderTokenizer
from sft.errors import DataError

Rung = Literal["marks", "prefix", "blank"]
# Rung 2 renders once for each turn.  Longer chats, and chats of templates that put text of their own before an answer
# (so that rung 2 does not prove their last turn), are first tried with all turns blanked in one rendering.
MANY_TURNS = 3
_SPACES = re.compile(r"\s*")


class Turn(NamedTuple):
    """One assistant turn: text[start:end] of the rendered chat, its end of turn included."""

    message: int  # index in the chat
    start: int
    end: int
    rung: Rung


class Rendered(NamedTuple):
    """A chat and what its template writes for it."""

    text: str
    marks: list[tuple[int, int]]  # characters inside each {% generation %} block
    messages: list[Message]
    tools: Tools
    everything: str  # all texts in the messages and tools
    tokenizer: FolderTokenizer

    def again(self, messages: list[Message], *, prompt: bool = False) -> str | None:
        """Another chat by the same template; None where the template refuses it."""
        try:
            return self.tokenizer.template.render(messages, self.tools, prompt=prompt)
        except Refused:
            return None


def find_turns(chat: Rendered, wanted: list[int]) -> list[Turn]:
    """The turns of the messages `wanted`, in order.  Raises DataError where one cannot be proven.

    "<|im_start|>user\\na<|im_end|>\\n<|im_start|>assistant\\nb<|im_end|>\\n", [1]  ->  the characters of b<|im_end|>
    """
    if chat.tokenizer.template.has_markers:
        turns = _marked(chat, wanted) if wanted else []
    else:
        at_once = len(wanted) > MANY_TURNS or chat.tokenizer.frame.lead.strip()
        together = _all_blanked(chat, wanted) if at_once else None
        turns = together or [_prefix(chat, i) or _blanked(chat, i) for i in wanted]
    for turn, following in zip(turns, turns[1:], strict=False):
        if following.start < turn.end:
            raise _error(chat, following.message, "writes it before an earlier one", chat.text[following.start :])
    return turns


def _marked(chat: Rendered, wanted: list[int]) -> list[Turn]:
    """Rung 1: one {% generation %} block per assistant turn; its end of turn stands in it or right after, and nothing
    that the assistant said before or behind it."""
    template, frame, text = chat.tokenizer.template, chat.tokenizer.frame, chat.text
    written = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if len(chat.marks) != len(written):
        raise DataError(
            f"chat template {template.name} marks {len(chat.marks)} generation blocks for {len(written)} assistant "
            "turns.  Put {% generation %} around what the assistant writes, once per turn."
        )
    inserted = frame.lead.strip() if frame.header and not chat.tokenizer.control.search(frame.lead) else ""
    turns = []
    before = 0  # the end of the block before
    for i, (start, stop) in zip(written, chat.marks, strict=True):
        ahead, before = text[max(before, text.rfind(frame.header, 0, start) if frame.header else 0) : start], stop
        if i not in wanted:
            continue
        end = frame.first_end(text, start)
        after = _after_spaces(text, stop)
        inside = end is not None and (end[1] <= stop or end[0] == after)
        said = end is not None and says(chat.messages[i], text[start : end[0]], chat.tokenizer, inserted=inserted)
        thinking = thinking_of(chat.messages[i])
        outside = bool(thinking) and thinking in ahead
        rest = "" if end is None else chat.tokenizer.control.sub("", text[end[1] : stop]).strip()
        if end is None or not inside or not said or outside or rest:
            raise _error(chat, i, "marks as the assistant's", text[start:stop])
        turns.append(Turn(i, start, end[1], "marks"))
    return turns


def _prefix(chat: Rendered, i: int) -> Turn | None:
    """Rung 2: what the text has beyond the prompt for this turn."""
    frame, text, message = chat.tokenizer.frame, chat.text, chat.messages[i]
    prompt = chat.again(chat.messages[:i], prompt=True) if i else None
    if prompt is None or not text.startswith(prompt):
        return None
    start = len(prompt)
    if is_plain(message):
        return _plain_turn(chat, i, start)
    upto = text if i + 1 == len(chat.messages) else chat.again(chat.messages[: i + 1])
    end = frame.first_end(text, start)
    if end is None or upto is None or upto[: end[1]] != text[: end[1]]:
        return None
    rest = chat.tokenizer.control.sub("", upto[end[1] :])  # some templates end a chat with one more token
    # The lead may be a header that the prompt lacks, or thinking that nobody gave: not the assistant's.
    inserted = frame.lead.strip() and (not frame.header or text.startswith(frame.lead, start))
    if rest.strip() or inserted or not says(message, text[start : end[0]], chat.tokenizer):
        return None
    return Turn(i, start, end[1], "prefix")


def _plain_turn(chat: Rendered, i: int, start: int) -> Turn | None:
    """Content and end of turn, and nothing but spaces around them."""
    content = content_of(chat.messages[i])
    said = _after_spaces(chat.text, start)
    after = _after_spaces(chat.text, said + len(content))
    end = chat.tokenizer.frame.end_at(chat.text, after)
    if end is None or not chat.text.startswith(content, said):
        return None
    return Turn(i, start, after + len(end), "prefix")


def _blanked(chat: Rendered, i: int) -> Turn:
    """Rung 3: the difference to a rendering in which the assistant said something else."""
    message = chat.messages[i]
    mark, thought = free_characters(chat.everything, 2)
    bare = {key: value for key, value in message.items() if key not in ("tool_calls", *THINKING)}
    blanks = [({**bare, "content": mark}, False)]
    thinking, content = thinking_of(message), str(message.get("content") or "")
    inside = THOUGHT.match(content)
    if any(message.get(key) for key in THINKING):
        blanks.append(({**bare, "content": mark, **{key: thought for key in THINKING if key in message}}, True))
    elif inside and thinking:
        blanks.append(({**bare, "content": inside[1] + thought + inside[3] + mark}, True))
    seen = ""
    for blank, with_thinking in blanks:
        blanked = chat.again([*chat.messages[:i], blank, *chat.messages[i + 1 :]])
        if blanked is None or blanked.count(mark) != 1 or blanked.count(thought) != int(with_thinking):
            continue
        turn = _difference(chat, i, blanked, mark, thought if with_thinking else None)
        if turn is not None:
            return turn
        seen = seen or blanked.replace(mark, "...").replace(thought, "...")
    raise _unproven(chat, i, seen)


def _difference(chat: Rendered, i: int, blanked: str, mark: str, thought: str | None) -> Turn | None:
    """The turn between what both renderings begin with and what both end with."""
    frame, text, message = chat.tokenizer.frame, chat.text, chat.messages[i]
    before, after = blanked.split(mark)
    before, _, between = before.partition(thought) if thought else (before, "", "")
    at = _after_spaces(after, 0)
    blank_end = frame.end_at(after, at)
    if blank_end is None or not text.startswith(before):
        return None
    # A turn with a tool call may end with another token than one with text.
    rest = after[at + len(blank_end) :]
    end = frame.first_end(text, len(before))
    if end is None or text[end[1] :] != rest:
        return None
    said, start = text[len(before) : end[0]], len(before)
    if thought:
        thinking = thinking_of(message)
        opened = before.rfind(frame.header) + len(frame.header) if frame.header in before else -1
        if not frame.header or opened < 0 or chat.tokenizer.control.search(before, opened):
            return None  # it is not clear where the turn begins
        if not said.strip().startswith(thinking) or between.strip() not in said[len(thinking) :]:
            return None
        start = opened  # <think> is written by the assistant as well
    return Turn(i, start, end[1], "blank") if says(message, said, chat.tokenizer) else None


def _all_blanked(chat: Rendered, wanted: list[int]) -> list[Turn] | None:
    """Rung 3 for many turns of plain text at once; None where that proves nothing."""
    frame, text = chat.tokenizer.frame, chat.text
    if not all(is_plain(chat.messages[i]) for i in wanted):
        return None
    spans = _locate(chat, wanted)
    lead = "" if frame.lead.strip() else frame.lead
    turns = []
    for i in wanted:
        if i not in spans:
            return None
        start, stop = spans[i]
        after = _after_spaces(text, stop)
        end = frame.end_at(text, after)
        opening = text[max(0, start - 200) : start].removesuffix(frame.lead)
        if end is None or not opening.endswith(frame.header):
            return None
        turns.append(Turn(i, start - len(lead), after + len(end), "blank"))
    return turns


def _locate(chat: Rendered, wanted: list[int]) -> dict[int, tuple[int, int]]:
    """Where the contents of some messages stand, by one rendering with a private character for each; {} where the
    template writes something else then."""
    marks = dict(zip(free_characters(chat.everything, len(wanted)), wanted, strict=True))
    messages = list(chat.messages)
    for mark, i in marks.items():
        messages[i] = {**messages[i], "content": mark}
    blanked = chat.again(messages)
    if blanked is None or not marks:
        return {}
    places, after = [], 0
    for mark in marks:
        place = blanked.find(mark, after)  # most templates write messages in order
        after = place + 1 if place >= 0 else after
        places.append((place if place >= 0 else blanked.find(mark), mark))
    places.sort()
    opening = blanked[: places[0][0]]
    if places[0][0] < 0 or not chat.text.startswith(opening):
        return {}
    spans, at = {}, len(opening)
    for (place, mark), following in zip(places, [*(place for place, _ in places[1:]), len(blanked)], strict=True):
        content, piece = str(chat.messages[marks[mark]].get("content") or ""), blanked[place + 1 : following]
        forms = (content, content.rstrip(), content.lstrip(), content.strip())
        # A mark that is written twice stands in a piece, and is not in the text.
        form = next((form for form in forms if chat.text.startswith(form + piece, at)), None)
        if form is None:
            return {}
        spans[marks[mark]] = (at, at + len(form))
        at += len(form) + len(piece)
    return spans if at == len(chat.text) else {}


def _after_spaces(text: str, start: int) -> int:
    return _SPACES.match(text, start).end()  # type: ignore[union-attr]  # matches the empty string too


def _unproven(chat: Rendered, i: int, blanked: str) -> DataError:
    """Both renderings, from a little before the first character in which they differ."""
    text = chat.text
    differs = next((k for k, (a, b) in enumerate(zip(text, blanked, strict=False)) if a != b), len(blanked))
    begin = max(0, differs - 40)
    other = (
        f"With ... in place of what the assistant said it writes {quoted(blanked[begin:], 120)}.  "
        if blanked
        else "With another text in place of what the assistant said it refuses the chat, or leaves the text out.  "
    )
    return _error(chat, i, "writes", text[begin:], other)


def _error(chat: Rendered, i: int, does: str, wrote: str, other: str = "") -> DataError:
    tokenizer, content = chat.tokenizer, quoted(str(chat.messages[i].get("content") or ""))
    return DataError(
        f"chat template {tokenizer.template.name}: what the assistant wrote in message {i + 1} cannot be told apart.  "
        f"The template {does} {quoted(wrote, 120)}.  {other}The content is {content} and a turn ends with "
        f"{' or '.join(tokenizer.frame.ends)}.  "
        "Give a template (data.chat_template) with {% generation %} around the content and the end of turn."
    )


def quoted(text: str, limit: int = 80) -> str:
    """`text` for an error: quoted, its end left out where it is long."""
    return json.dumps(text if len(text) <= limit else text[: limit - 3] + "...", ensure_ascii=False)
