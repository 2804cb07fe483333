"""Chats of the kinds that users of released models have; every text contains a word of its own.

The first letter of a word shows the text to which it belongs:

    u user   y system   t tool   f schema      a answer   h its reasoning   n name, k key, v value of a call
"""

import json
import re
from copy import deepcopy
from itertools import count
from typing import Any

Message = dict[str, Any]
WORD = re.compile(r"[uytfahnkv]q\d+x")
OF_ASSISTANT = "ahnkv"
_numbers = count(1)


def word(letter: str) -> str:
    return f"{letter}q{next(_numbers)}x"


def _user() -> Message:
    return {"role": "user", "content": f"What is {word('u')}? {word('u')}"}


def _answer(**more: Any) -> Message:
    return {"role": "assistant", "content": f"It is {word('a')}, {word('a')}.", **more}


def _reasoning() -> str:
    return f"So {word('h')}.\nThen {word('h')}"


def _inside() -> Message:
    answer = _answer()
    return {**answer, "content": f"<think>\n{_reasoning()}\n</think>\n\n{answer['content']}"}


def _round(num_calls: int = 1, **more: Any) -> list[Message]:
    """A message with calls, and their results."""
    calls = [
        {
            "id": f"call{next(_numbers):05}",
            "type": "function",
            "function": {"name": word("n"), "arguments": {word("k"): word("v"), word("k"): [word("v"), 7, True]}},
        }
        for _ in range(num_calls)
    ]
    results = [
        {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": f"It is {word('t')}"}
        for call in calls
    ]
    return [{"role": "assistant", "content": "", "tool_calls": calls, **more}, *results]


def _schema() -> Message:
    properties = {word("f"): {"type": "string", "description": f"A {word('f')}"}}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": word("f"), "description": f"Finds {word('f')}.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [_schema()]
CHATS: dict[str, list[Message]] = {
    "turns": [_user(), _answer(), _user(), _answer(), _user(), _answer()],
    "system": [{"role": "system", "content": f"Be {word('y')}"}, _user(), _answer(), _user(), _answer()],
    "key": [_user(), _answer(reasoning_content=_reasoning()), _user(), _answer(reasoning_content=_reasoning())],
    "inside": [_user(), _inside(), _user(), _inside()],
    "call": [_user(), _round()[0]],
    "parallel": [_user(), _round(2)[0]],
    "result": [_user(), *_round(), _answer(), _user(), *_round(), _answer()],
    "results": [_user(), *_round(2), _answer()],
    "rounds": [
        _user(),
        *_round(reasoning_content=_reasoning()),
        *_round(reasoning_content=_reasoning()),
        _answer(reasoning_content=_reasoning()),
    ],
}


def tools_of(chat: str) -> list[Message] | None:
    return TOOLS if any("tool_calls" in message for message in CHATS[chat]) else None


def for_transformers(messages: list[Message], *, as_text: bool) -> list[Message]:
    """The messages in the form for apply_chat_template: reasoning under both keys, and arguments in the form that the
    template takes."""
    messages = deepcopy(messages)
    for message in messages:
        if "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]
        for call in message.get("tool_calls", []):
            function = call["function"]
            function["arguments"] = json.dumps(function["arguments"]) if as_text else function["arguments"]
    return messages


def words_of(value: Any) -> list[str]:
    return list(dict.fromkeys(WORD.findall(json.dumps(value))))
