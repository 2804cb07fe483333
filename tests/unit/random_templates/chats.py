"""Random chats that a random template accepts."""

from random import Random
from typing import Any

from tests.unit.random_templates.expressions import Message
from tests.unit.random_templates.whole import Draw

_CONSTANTS = (
    *("user", "assistant", "model", "<think>", "</think>", "Bot:", "1", "42", "null", "tool", "True"),
    *("</tool_call>", "x"),
)
_CONSTANTS_OF_OTHERS = (
    *("<|end|>", "<|user|>", "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"),
    *("\n\n.", " ", "\n"),
)
_MIXED = (
    *("WORD", "WORD", "\nWORD ", "  WORD\n\nWORD\n", '"WORD"\\\n\t', "<think>\nWORD\n</think>\n\nWORDb"),
    *("WORD é 雨 🙂", "user\nWORD", "{'a': WORD} % {} %s", "WORD</think>WORDc", "WORD\r\nWORD", "<b>&WORD'"),
)


class Texts:
    """Texts of a chat: unique words; repeated, empty, escaped and typed texts; and constants of the template."""

    def __init__(self, rng: Random):
        self.rng, self.number = rng, 0
        self.kind = rng.choice(("unique", "unique", "mixed", "mixed", "repeated", "constants"))

    def word(self, letter: str) -> str:
        self.number += 1
        return f"{letter}q{self.number}{self.rng.choice('abcdef')}"

    def text(self, letter: str, *, empty: bool = False) -> str:
        rng, word = self.rng, self.word(letter)
        if self.kind == "repeated" and rng.random() < 0.8:
            return rng.choice(("yes", "yes", "no"))
        if self.kind == "constants" and rng.random() < 0.7:
            return rng.choice(_CONSTANTS + _CONSTANTS_OF_OTHERS * empty)
        if self.kind == "mixed":
            form = rng.randrange(12)
            if form == 0 and empty:
                return ""
            if form == 1 and empty:
                return rng.choice(("\n", " ", "<|eos|>", f"<|assistant|>{word}", f"{word}<|end|>\n<|im_start|>user\n"))
            return _MIXED[form].replace("WORD", word)
        return f"{word} {word}"

    def value(self, depth: int = 0) -> Any:
        rng = self.rng
        form = rng.randrange(9 if depth < 2 else 6)
        if form < 3:
            return self.text("v", empty=True)
        if form == 3:
            return rng.choice((0, 1, -7, rng.randrange(10**6), 10**20))
        if form == 4:
            return rng.choice((1.5, -0.25, 1e-7, 2.0, 1e30))
        if form == 5:
            return rng.choice((True, False, None))
        if form == 6:
            return [self.value(depth + 1) for _ in range(rng.randrange(3))]
        return {self.word("k"): self.value(depth + 1) for _ in range(rng.randrange(3))}


def make_chat(rng: Random, draw: Draw) -> tuple[list[Message], list[dict] | None]:
    """A random chat that the template accepts."""
    texts = Texts(rng)
    messages: list[Message] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": texts.text("y")})

    def said() -> str:
        """A content that is not empty, because an answer without text is refused; it contains </think> only if the
        template allows it."""
        while (text := texts.text("a")).strip() in ("", "</think>"):
            pass
        return text

    def answer(calls: int = 0) -> Message:
        content: str | None = said()
        if calls and rng.random() < 0.5:
            content = None if draw.nullable and rng.random() < 0.5 else ""
        message = {"role": "assistant", "content": content}
        if draw.reasoning and rng.random() < 0.6:
            message[draw.key] = texts.text("h")
            # a template that splits at </think> would write nothing of the chat
            while message[draw.key].strip() == "</think>":
                message[draw.key] = texts.text("h")
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"c{len(messages)}{number}",
                    "type": "function",
                    "function": {
                        "name": texts.word("n"),
                        "arguments": {texts.word("k"): texts.value() for _ in range(rng.randrange(4))},
                    },
                }
                for number in range(calls)
            ]
        return message

    if rng.random() < 0.1:
        messages.append(answer())
    for _ in range(rng.randint(1, 3)):
        for _ in range(1 if rng.random() < 0.9 else 2):
            messages.append({"role": "user", "content": texts.text("u", empty=True)})
        while draw.calls and rng.random() < 0.5:
            message = answer(rng.randint(1, 2))
            messages.append(message)
            for call in message["tool_calls"]:
                messages.append({"role": "tool", "content": texts.text("t", empty=True), "tool_call_id": call["id"]})
        for _ in range(1 if rng.random() < 0.9 else 2):
            messages.append(answer())
    if rng.random() < 0.1:
        messages.append({"role": "user", "content": texts.text("u", empty=True)})
    tools = None
    if draw.tools and rng.random() < 0.7:
        tools = [
            {
                "type": "function",
                "function": {
                    "name": texts.word("f"),
                    "description": texts.text("f"),
                    "parameters": {
                        "type": "object",
                        "properties": {texts.word("f"): {"type": "string", "default": texts.value()}},
                    },
                },
            }
            for _ in range(rng.randint(1, 2))
        ]
    return messages, tools
