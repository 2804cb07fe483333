"""Finds the assistant's turns in a rendering by the sources of its characters.

A turn is the text that the model writes when it is asked for a message:

    start   the end of the header that a prompt at inference has (`headers.py`).  The text between the previous text of
            the chat and the turn is compared with the text that the template writes at this position when it asks for
            the answer.  Usually, the turn begins after their longest common prefix.
    text    the message's own texts, and all texts that the template writes between them
    end     the token that ends the turn, or begins the next message: <|im_end|>, <|return|>, <|call|>, <|user|>

<|im_start|>user\\nHi<|im_end|>\\n <|im_start|>assistant\\n <think>\\n\\n</think>\\n\\n Hello <|im_end|> \\n
                                   the prompt's header       the template's own text   the turn's text, and its end

An error is raised if text of another message, or text without a source, could be mistaken for text of the assistant.  A
message has several turns if texts of other messages lie between its texts (Gemma 4 writes results of calls before the
content).  `habits.py` finds the tokens that end turns; `tokens.py` finds the tokens of each turn.
"""

import re
from typing import NamedTuple

from sft.data.chat.headers import start_of
from sft.data.chat.reading import is_in, is_text
from sft.data.chat.render import RenderedChat
from sft.data.rows.messages import THINKING, quoted
from sft.data.template.rendering import Run
from sft.data.template.sources import Field, Unknown
from sft.errors import DataError

_TAGS = re.compile(r"<think>")


class Turn(NamedTuple):
    """The characters text[start:end] that the model writes for a message.

    inserted      position after the text that the template adds at the start of the turn
    text_end      position of the end token; `end` if there is none
    is_end_usual  whether the end token is the one that ends such a turn at the end of a chat
    """

    message: int
    start: int
    inserted: int
    text_end: int
    end: int
    is_end_usual: bool = True


def find_turns(rendered: RenderedChat, wanted: list[int]) -> list[Turn]:
    """The turns of the messages with the indices `wanted`, in the order of the text.

    Raises DataError if one cannot be located, or if text without a source may belong to one.
    """
    finder = _Finder(rendered)
    turns = sorted((turn for i in wanted for turn in finder.turns_of(i)), key=lambda turn: turn.start)
    for turn, following in zip(turns, turns[1:], strict=False):
        if following.start < turn.end:
            raise finder.error(following.message, "the template writes it inside another turn", following.start)
        if following.message < turn.message:
            raise finder.error(following.message, "the template writes it after a later turn", following.start)
    if turns and wanted:
        finder.check_unknown(wanted)
    return turns


class _Finder:
    """Finds the turns of one rendering."""

    def __init__(self, rendered: RenderedChat) -> None:
        self.rendered, self.reading, self.messages = rendered, rendered.reading, rendered.chat.messages
        self.habits, self.template = rendered.tokenizer.habits, rendered.tokenizer.template

    def turns_of(self, index: int) -> list[Turn]:
        """The turns of message `index`.  Raises DataError if one cannot be located."""
        groups = self._without_repetitions(self._groups(index))
        if not groups:
            for run in self.reading.unknown:
                if run.writer in (index, None):
                    self._refuse_unknown(index, run)
            raise self.error(
                index,
                "the template writes nothing of it, so the model would learn to end a turn without any text",
                None,
            )
        if len(groups) > 1 and groups[1][0].writer is None:
            raise self.error(index, "its text is written in several places, outside a loop over messages", None)
        turns = []
        for number, group in enumerate(groups):
            is_last = number == len(groups) - 1
            start, inserted = self._start(index, group[0], first=number == 0)
            text_end, end = self._end(index, group[-1], is_last)
            self._check_inside(index, start, text_end)
            usual = self.habits.last_ends[any(_is_of_call(run) for run in group)]
            is_usual = not is_last or usual is None or self.reading.text[text_end:end] in ("", usual)
            turns.append(Turn(index, start, inserted, text_end, end, is_usual or end == len(self.reading.text)))
        self._check_complete(index, turns, [group[0].start for group in groups])
        return turns

    def _groups(self, index: int) -> list[list[Run]]:
        """The own texts of a message, in groups.  Texts of other messages separate groups.

        A group ends at the token that ends the message, if this token begins another message: texts after it belong to
        the other message (Gemma 4 repeats the name of a function in its result).
        """
        reading, handed = self.reading, self.habits.hands_over(self.messages[index])
        groups: list[list[Run]] = []
        is_over, previous = False, -2
        for position in reading.own.get(index, ()):
            run = reading.marks[position]
            if position != previous + 1 or not groups:
                groups.append([run])
                is_over = False
            elif not is_over:
                is_over = handed is not None and handed in reading.text[reading.marks[previous].end : run.start]
                if not is_over:
                    groups[-1].append(run)
            previous = position
        return groups

    def _without_repetitions(self, groups: list[list[Run]]) -> list[list[Run]]:
        """Removes groups that only repeat texts of earlier groups, such as the name of a function in a call's
        result."""
        if len(groups) < 2:
            return groups
        kept: list[list[Run]] = []
        for group in groups:
            earlier = [run for other in kept for run in other]
            if not all(is_in(run, earlier) for run in group):
                kept.append(group)
        return kept

    def _start(self, index: int, run: Run, *, first: bool) -> tuple[int, int]:
        """The start of the turn whose first own text is `run`, and the end of the template's text there
        (`start_of`)."""
        before = self.reading.before(run)
        if before is not None and isinstance(before.source, Unknown):
            self._refuse_unknown(index, before)
        asked = index if first else 0  # a prompt after texts of other messages would contain the rest of this message
        return start_of(self.rendered, run, self.messages[index], asked)

    def _end(self, index: int, run: Run, is_last: bool) -> tuple[int, int]:
        """Start and end of the end token of the turn whose last own text is `run`; both are equal if there is none.

        Raises DataError if the turn has no end.
        """
        reading = self.reading
        following = reading.after(run)
        stop = following.start if following else len(reading.text)
        tail = reading.text[run.end : stop]
        starts, control = self.habits.starts, self.habits.control
        end_token = self.habits.first_end(tail)
        if end_token is not None:
            begin, end = run.end + end_token[0], run.end + end_token[1]
            if starts.isdisjoint(control.findall(tail, 0, end_token[0])) and reading.is_constant(begin, end):
                return begin, end
        if following is None and starts.isdisjoint(control.findall(tail)):
            return len(reading.text), len(reading.text)  # `encode_chat` appends data.final_end
        if following is not None and isinstance(following.source, Unknown) and following.writer in (index, None):
            self._refuse_unknown(index, following)
        goes_on = following is not None and isinstance(following.source, Field) and following.source.role == "assistant"
        if goes_on and not control.search(tail):
            return run.end, run.end  # the next answer continues the turn (Gemma 4)
        if following is not None and self.habits.last_ends[_is_of_call(run)] is None and self._begins(tail):
            return run.end, run.end  # the next message begins, but no end token of a last turn is known (GLM)
        raise self.error(
            index,
            f"no token ends it.  Tokens that end a turn of this template: {', '.join(self.habits.ends) or 'none'}",
            run.end,
        )

    def _begins(self, text: str) -> bool:
        """Whether the template wrote a text that begins with a token that starts messages."""
        first = self.habits.control.match(text.lstrip())
        return first is not None and first.group() in self.habits.handed

    def _check_inside(self, index: int, start: int, end: int) -> None:
        for run in self.reading.over(start, end):
            if isinstance(run.source, Unknown):
                self._refuse_unknown(index, run)
            if isinstance(run.source, Field) and run.source.message != index and run.source.path != ("role",):
                raise self.error(index, "text of another message lies in it", run.start)

    def _check_complete(self, index: int, turns: list[Turn], begins: list[int]) -> None:
        """Raises DataError if own text of the message is in none of its turns, and is no repetition of text of a turn.

        begins  position of the first own text of each turn.  This text may begin with a <think> of the prompt, before
                the turn
        """
        runs = [self.reading.marks[position] for position in self.reading.own[index]]
        inside = [run for run in runs if any(turn.start < run.end <= turn.end for turn in turns)]
        if len(inside) == len(runs):
            return
        shown = [
            (begin, turn.start)
            for begin, turn in zip(begins, turns, strict=True)
            if not _TAGS.sub("", self.reading.text[begin : turn.start]).strip()
        ]
        for run in runs:
            is_shown = any(begin <= run.start and run.end <= end for begin, end in shown)
            if run not in inside and not is_shown and not is_in(run, inside):
                raise self.error(index, "a part of its text lies outside of its turn", run.start)

    def check_unknown(self, wanted: list[int]) -> None:
        """Raises DataError if text without a source may belong to a message of `wanted`."""
        unknown = self.reading.unknown
        if not unknown:
            return
        for index in wanted:
            for run in unknown:
                if run.writer == index:
                    self._refuse_unknown(index, run)
            missing = next(
                (field for field, _ in self.reading.unwritten if is_text(field, index) and self._is_read(field)), None
            )
            if missing is not None:
                source = unknown[0].source
                assert isinstance(source, Unknown)
                why = f"its text {quoted(missing.text)} is not found, and {source.operation} hides text"
                raise self.error(index, why, unknown[0].start)

    def _is_read(self, field: Field) -> bool:
        """Whether the template reads the key of a field."""
        names = THINKING if field.path[0] in THINKING else (str(field.path[0]),)
        return any(name in self.template.code for name in names)

    def _refuse_unknown(self, index: int, run: Run) -> None:
        assert isinstance(run.source, Unknown)
        raise self.error(index, f"{run.source.operation} hides where text comes from", run.start)

    def error(self, index: int, why: str, at: int | None) -> DataError:
        text = self.reading.text
        wrote = "" if at is None else f"  The template writes {quoted(text[max(0, at - 40) : at + 80], 120)}."
        content = quoted(str(self.messages[index].get("content") or ""))
        return DataError(
            f"chat template {self.template.name}: the assistant's turn of message {index + 1} cannot be located: "
            f"{why}.{wrote}  The content is {content}.  Give a template that writes each turn as one text "
            "(data.chat_template)."
        )


def _is_of_call(run: Run) -> bool:
    return isinstance(run.source, Field) and run.source.path[0] == "tool_calls"
