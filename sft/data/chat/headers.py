"""Finds the start of a turn, which is the end of the header in the prompt that asks for this turn at inference.

Decides which part of the template's text before a turn belongs to the header.  Compares this text with the text that
the template writes at the same position of a prompt.  If the two differ, the module also searches for the header that
the template writes in small chats (`Habits.header`).

    the chat    ...<|im_end|>\\n<|im_start|>assistant\\n4<|im_end|>
    the prompt  ...<|im_end|>\\n<|im_start|>assistant\\n<think>\\n            the turn begins before the 4
"""

import re

from sft.data.chat.habits import Habits
from sft.data.chat.reading import Reading, after_header, after_header_end, common_length
from sft.data.chat.render import RenderedChat
from sft.data.rows.messages import THINKING, Message
from sft.data.template.rendering import Run
from sft.data.template.sources import MARKED, Field

_PART = re.compile(r"[<|｜\w]*\Z")  # the beginning of a word or of a token


def start_of(rendered: RenderedChat, run: Run, message: Message, asked: int) -> tuple[int, int]:
    """The positions in the text at which a turn starts, and at which the template's own text at this start ends.

    run    the turn's first own text
    asked  the number of messages before the turn; 0: compare with no prompt
    """
    reading, habits = rendered.reading, rendered.tokenizer.habits
    before, control = reading.before(run), habits.control
    begin = before.end if before else 0
    between = reading.text[begin : run.start]
    shown = rendered.prompt_after(asked, begin, run.start) if asked else None
    common = 0 if shown is None else common_length(reading.text[begin : begin + len(shown)], shown)
    if shown is None or common < len(shown):
        whole = reading.text[begin : run.start + len(habits.header)]
        header = after_header(whole, len(between), habits.header, control)
        if shown is not None and common >= len(between):
            common = max(len(between), header)  # the prompt continues at the beginning of this message's text
        else:
            end = after_header_end(between, shown or habits.header, control)
            common = max(_whole_tokens(between, common, habits), header, end)
    if common < len(between):
        end_before = habits.first_end(between)
        if common < (end_before[1] if end_before else int(shown is None and bool(between.strip()))):
            # Without this prompt and the usual header, the turn begins after the last token that starts messages.
            common = max((match.end() for match in control.finditer(between)), default=0)
    start = begin + common
    return start, _inserted(reading, run, message, start, asked, habits)


def _whole_tokens(text: str, at: int, habits: Habits) -> int:
    """The last position up to `at` that splits no token.

    `<think>` and `<tool_call>` begin with the same `<t`; a common prefix that ends there would split both.
    """
    at -= len(_PART.search(text[:at]).group())  # type: ignore[union-attr]  # also matches the empty string
    return next((m.start() for m in habits.control.finditer(text) if m.start() < at < m.end()), at)


def _inserted(reading: Reading, run: Run, message: Message, start: int, asked: int, habits: Habits) -> int:
    """The position after the text that the template adds by itself at the start of a turn.

    `<think>` before thinking of the row, and `<tool_call>` before a call of the row, do not count as added.
    """
    lead = reading.text[start : run.start]
    if not lead.strip():
        # No prompt shows whether the model writes the spaces before a first answer.
        return start if asked else max(start, run.start)
    marked = next((mark.start for mark in reading.over(start, run.start) if mark.source is MARKED), None)
    if marked is not None:
        return max(start, marked)
    assert isinstance(run.source, Field)
    key, part = run.source.path[0], run.source.path[-1]
    if key in THINKING or part == "thinking" or (key == "content" and _opens_thinking(message, run)):
        return start
    if habits.lead.strip() and lead.startswith(habits.lead):
        return start + len(habits.lead)
    return start if message.get("tool_calls") else run.start


def _opens_thinking(message: Message, run: Run) -> bool:
    """Whether `run` is in thinking at the start of a content that lacks <think>, so that the template writes it."""
    content = str(message.get("content") or "")
    return 0 <= run.first < content.find("</think>") and not content.startswith("<think>", run.first)
