"""Learns the behaviour of a template around an assistant's turns, from its renderings of small chats.

    ChatML    ends <|im_end|>; header <|im_start|>assistant\\n
    harmony   ends <|return|>, <|end|>, <|call|>; the usual end of a last answer is <|return|>, after a call <|call|>
    GLM       ends <|user|>, <|observation|>: tokens that hand a turn over; nothing follows a last answer

Decides which tokens end a turn, which token ends the last turn of a chat, which control tokens an assistant's text may
contain, and in which form the template takes tool calls.  Small chats that the template refuses are ignored.
`turns.py` applies the result to the chats of the data.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from sft.data.chat.reading import Reading, after_header, after_header_end, is_in, shared_length
from sft.data.rows.messages import Message
from sft.data.template.chat_template import ChatTemplate, Refused
from sft.data.template.sources import Field

_SYSTEM: Message = {"role": "system", "content": "INSTRUCTION"}
_USER: Message = {"role": "user", "content": "QUESTION"}
_ANSWER: Message = {"role": "assistant", "content": "ANSWER"}
_THINKING: Message = {**_ANSWER, "reasoning_content": "REASON", "thinking": "REASON"}
_TAGGED: Message = {"role": "assistant", "content": "<think>\nREASON\n</think>\n\nANSWER"}
_ARGUMENTS = {"NAME": "VALUE"}
_RESULT: Message = {"role": "tool", "name": "FUNCTION", "content": "RESULT", "tool_call_id": "abcdefghi"}
_PARTS = [{"type": "thinking", "thinking": "REASON"}, {"type": "text", "text": "ANSWER"}]
_SCHEMA = {"type": "object", "properties": {"NAME": {"type": "string", "description": "NAME"}}, "required": ["NAME"]}
_TOOLS = [{"type": "function", "function": {"name": "FUNCTION", "description": "TOOL", "parameters": _SCHEMA}}]
_FORMS: tuple[dict[str, Any], ...] = ({}, {"content": None}, {"content": ""})


@dataclass(frozen=True, kw_only=True)
class Habits:
    """The behaviour of a template.

    control      matches control tokens
    ends         tokens that end a turn, or that hand it over to the next message
    last_ends    {whether a turn has calls: the token that ends the last turn of a chat; None: the template writes none}
    stops        the tokens of `ends` after which the template never continues the same message
    starts       tokens that start a message
    handed       tokens that start or end a message
    inside       control tokens that assistant turns may contain: tokens that the template writes inside turns, and
                 added tokens that are not special.  Tokens of `handed` are excluded.
    following    {whether a turn has calls: the token that the template writes between the turn and the next message}
    header       the text that add_generation_prompt adds: the template asks for an answer with it
    lead         the text that the template inserts between the header and a last answer, such as empty thinking
    calls_as_text  whether the template takes arguments of calls as JSON texts, not as objects
    empty_content  the content that the template takes for a message that has only calls: {} for no key `content`,
                   {"content": None} or {"content": ""}
    takes_parts  whether the template takes thinking as a part of the content
    """

    control: re.Pattern[str]
    ends: tuple[str, ...]
    last_ends: Mapping[bool, str | None]
    stops: tuple[str, ...]
    starts: frozenset[str]
    handed: frozenset[str]
    inside: frozenset[str]
    following: Mapping[bool, str | None]
    header: str
    lead: str
    calls_as_text: bool
    empty_content: Mapping[str, Any]
    takes_parts: bool

    def first_end(self, text: str) -> tuple[int, int] | None:
        """Start and end of the first token in a text that ends a turn; None if there is none."""
        spans = [(at, at + len(end)) for end in self.ends if (at := text.find(end)) >= 0]
        return min(spans, key=lambda span: (span[0], -span[1]), default=None)

    def hands_over(self, message: Message) -> str | None:
        """The token that ends this message at the end of a chat, if this token starts or ends messages; else None."""
        end = self.last_ends[bool(message.get("tool_calls"))]
        return end if end in self.handed else None


class Vocabulary(NamedTuple):
    """The control tokens in a tokenizer's files.

    control          matches control tokens
    added, special   all added tokens, and the special ones among them
    generation_ends  tokens at which generation ends
    eos              the token that ends a plain text
    """

    control: re.Pattern[str]
    added: frozenset[str]
    special: frozenset[str]
    generation_ends: tuple[str, ...]
    eos: str | None


def learn(template: ChatTemplate, vocabulary: Vocabulary) -> Habits:
    """The behaviour of a template with the control tokens of a tokenizer."""
    return _Learner(template, vocabulary).habits()


class _Learner:
    """Renders small chats with a template, and compares the renderings."""

    def __init__(self, template: ChatTemplate, vocabulary: Vocabulary) -> None:
        self.template = template
        self.control, self.added, self.special, self.generation_ends, self.eos = vocabulary
        self.opening: list[Message] = []  # messages that the template requires before the first question
        self.tools: list[dict[str, Any]] | None = None

    def habits(self) -> Habits:
        answer = self._answer()
        as_text, empty, calling = self._calling()
        last_answer = None if answer is None else self._first(self._tail(answer, 1))
        history = self._read([_USER, _ANSWER, _USER])
        handed_answer = None if history is None else self._first(self._tail(history, 1))
        ends_of_files = (*self.generation_ends, self.eos)
        known = tuple(dict.fromkeys(end for end in (last_answer, handed_answer, *ends_of_files) if end))
        last_call = last_answer if calling is None else self._end_of_call(self._tail(calling, 1), known)
        asked = self._read([_USER, calling_message(as_text, empty), _RESULT], tools=_TOOLS) if calling else None
        handed_call = None
        if asked is not None and last_call is None:
            tail = self._tail(asked, 1)
            handed_call = first_of(self.control, tail, known) or next(iter(self._special(tail)), None)
        ends = tuple(dict.fromkeys(end for end in (*known, last_call, handed_call) if end))
        edges, written = self._tokens(ends, as_text, empty, calling is not None)
        # Added tokens that are not special may be in contents: <think>, even if the template does not write it.
        ordinary = self.added - self.special
        return Habits(
            control=self.control,
            ends=ends,
            last_ends={False: last_answer, True: last_call},
            starts=self._starts(ends),
            stops=tuple(end for end in ends if end not in written),
            handed=edges,
            inside=(written | ordinary) - edges,
            following={False: handed_answer, True: handed_call},
            header=self._header,
            lead="" if answer is None else self._lead(answer),
            calls_as_text=as_text,
            empty_content=empty,
            takes_parts=self._takes_parts(),
        )

    def _read(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, prompt: bool = False
    ) -> Reading | None:
        """The rendering of `messages` after `opening`; None if the template refuses the chat."""
        chat = [*self.opening, *messages]
        try:
            return Reading(self.template.render(chat, tools or self.tools, prompt=prompt))
        except Refused:
            return None

    def _answer(self) -> Reading | None:
        """The rendering of a question and an answer, or None.  Sets `opening` and `tools` to what the template
        requires."""
        for opening, tools in (([], None), ([_SYSTEM], None), ([], _TOOLS), ([_SYSTEM], _TOOLS)):
            self.opening, self.tools = opening, tools
            if (reading := self._read([_USER, _ANSWER])) is not None:
                return reading
        self.opening, self.tools = [], None
        return None

    def _calling(self) -> tuple[bool, Mapping[str, Any], Reading | None]:
        """Finds the form in which the template takes a call, by rendering all forms.

        Returns whether arguments are text, the content of a message that has only calls (`Habits.empty_content`), and a
        rendering with a call, or None if the template writes no call.
        """
        written: list[tuple[bool, Mapping[str, Any], Reading]] = []  # forms whose arguments are quoted twice or missing
        for as_text in (False, True):
            for empty in _FORMS:
                reading = self._read([_USER, calling_message(as_text, empty)], tools=_TOOLS)
                after = "" if reading is None else reading.text[reading.text.rfind("QUESTION") :]
                if reading is not None and "FUNCTION" in after and "None" not in after:
                    if "VALUE" in after and '\\"' not in after:
                        return as_text, empty, reading
                    written.append((as_text, empty, reading))
        return max(written, key=lambda form: "VALUE" in form[2].text, default=(False, {}, None))

    def _tail(self, reading: Reading, message: int) -> str:
        """The text between the last own text of an assistant's message and the next text of the chat."""
        own = reading.own.get(len(self.opening) + message)
        if own is None:
            return ""
        last = reading.marks[own[-1]]
        following = reading.after(last)
        return reading.text[last.end : following.start if following else len(reading.text)]

    def _first(self, tail: str) -> str | None:
        """The first of `generation_ends` in `tail`, else the first special token, else the first control token."""
        end = first_of(self.control, tail, self.generation_ends)
        return end or next(iter([*self._special(tail), *self.control.findall(tail)]), None)

    def _end_of_call(self, tail: str, known: tuple[str, ...]) -> str | None:
        """The token that ends a last turn with a call: the first token of `known`, else the last special token."""
        return first_of(self.control, tail, known) or next(reversed(self._special(tail)), None)

    def _special(self, tail: str) -> list[str]:
        return [token for token in self.control.findall(tail) if token in self.special]

    @cached_property
    def _header(self) -> str:
        with_prompt, without = self._read([_USER], prompt=True), self._read([_USER])
        if with_prompt is None or without is None:
            return ""
        return with_prompt.after_all[shared_length(with_prompt.after_all, without.after_all, self.control) :]

    def _lead(self, answer: Reading) -> str:
        prompt = self._read([_USER], prompt=True)
        own = answer.own.get(len(self.opening) + 1)
        if prompt is None or not own:
            return ""
        run = answer.marks[own[0]]
        before = answer.before(run)
        between = answer.text[before.end if before else 0 : run.start]
        return between[self._header_length(between, prompt.after_all) :]

    def _header_length(self, between: str, shown: str) -> int:
        """The length of the header at the beginning of `between`, the text before an answer.

        shown: the text that the template writes at this position when it asks for an answer
        """
        shared = shared_length(between, shown, self.control)
        if shared == len(shown):
            return shared
        usual = after_header(between, len(between), self._header, self.control)
        return max(shared, usual, after_header_end(between, shown, self.control))

    def _takes_parts(self) -> bool:
        reading = self._read([_USER, {"role": "assistant", "content": _PARTS}])
        return reading is not None and "REASON" in reading.text and "ANSWER" in reading.text and "{" not in reading.text

    def _tokens(
        self, ends: tuple[str, ...], as_text: bool, empty: Mapping[str, Any], has_calls: bool
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Two sets of control tokens: those that start or end messages, and those that the template writes inside
        assistant turns."""
        edges, inside = set(ends), set()
        call = calling_message(as_text, empty)
        chats: list[tuple[list[Message], list[dict[str, Any]] | None]] = [
            ([_USER, _ANSWER, _USER, _ANSWER], None),
            ([_SYSTEM, _USER, _ANSWER], None),
            ([_USER, _THINKING], None),
            ([_USER, _TAGGED], None),
            ([_USER, {"role": "assistant", "content": _PARTS}], None),
        ]
        if has_calls:
            chats += [([_USER, call], _TOOLS), ([_USER, call, _RESULT, _ANSWER], _TOOLS)]
        for messages, tools in chats:
            reading = self._read(messages, tools=tools)
            if reading is None or len(reading.own) < sum(message["role"] == "assistant" for message in messages):
                continue  # the template leaves out an assistant's turn
            spans = list(self._spans(reading, messages, tools, ends))
            users = (run.start for run in reading.marks if isinstance(run.source, Field) and run.source.role == "user")
            at = next(users, 0)  # instructions before the first user message may mention any token
            headers: set[int] = set()
            for match in self.control.finditer(reading.text, at):
                if not reading.is_constant(match.start(), match.end()):
                    continue
                header = next((begin for begin, start, _ in spans if begin <= match.start() < start), None)
                if any(start <= match.start() and match.end() <= end for _, start, end in spans):
                    inside.add(match.group())
                elif header is None or header not in headers or match.group() in self.special:
                    edges.add(match.group())  # a header may end with <think>, which starts no message
                if header is not None:
                    headers.add(header)
        return frozenset(edges), frozenset(inside)

    def _starts(self, ends: tuple[str, ...]) -> frozenset[str]:
        """The control tokens that follow the end of a message, in chats without calls."""
        starts = set()
        for chat in ([_USER, _ANSWER, _USER, _ANSWER], [_SYSTEM, _USER, _ANSWER]):
            reading = self._read(chat)
            for mark, following in zip(reading.marks, reading.marks[1:], strict=False) if reading else ():
                tokens = self.control.findall(reading.text[mark.end : following.start]) if reading else []
                last = max((i for i, token in enumerate(tokens) if token in ends), default=len(tokens))
                starts |= {*tokens[last + 1 : last + 2]}
        return frozenset(starts)

    def _spans(
        self, reading: Reading, messages: list[Message], tools: list[dict[str, Any]] | None, ends: tuple[str, ...]
    ) -> Iterator[tuple[int, int, int]]:
        """Yields for each assistant turn the start and end of its header, and the position of its end token."""
        for index, positions in reading.own.items():
            runs = [reading.marks[position] for position in positions]
            last = runs[0]
            for number, run in enumerate(runs):  # the result of a call may repeat the name of the function
                last = last if run.first < run.last and is_in(run, runs[:number]) else run
            before = reading.before(runs[0])
            begin = before.end if before else 0
            between = reading.text[begin : runs[0].start]
            prompt = self._read(messages[: index - len(self.opening)], tools=tools, prompt=True)
            shown = "" if prompt is None else prompt.after_all
            at = begin + self._header_length(between, shown)
            following = reading.after(last)
            stop = following.start if following else len(reading.text)
            reached = [position for end in ends if (position := reading.text.find(end, last.end, stop)) >= 0]
            yield begin, at, min(reached, default=last.end if following else stop)


def first_of(control: re.Pattern[str], text: str, tokens: Sequence[str]) -> str | None:
    """The first control token of a text that is one of `tokens`; None if there is none."""
    return next((token for token in control.findall(text) if token in tokens), None)


def small_chat(role: str, habits: Habits, *, has_tools: bool) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """A small chat whose last message has this role, in the form that the template takes, and its tools or None."""
    call = calling_message(habits.calls_as_text, habits.empty_content)
    before = {"assistant": [_USER, _ANSWER], "tool": [_USER, call, _RESULT], "system": [_SYSTEM]}
    return before.get(role, [_USER]), _TOOLS if has_tools else None


def calling_message(as_text: bool, empty: Mapping[str, Any]) -> Message:
    """An assistant's message with one call.  as_text: whether arguments are JSON text; empty: its content or no key"""
    function = {"name": "FUNCTION", "arguments": json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS}
    return {"role": "assistant", **empty, "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}]}
