"""Traces of agents: rounds of thinking, a call and its result, for tests of data.turns = each."""

from typing import Any

from tests.unit.released_chats import Message

# Thinking is dropped wherever a later message follows, and each message has two control tokens.
DROPPING = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{- m.content + '<|im_end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string", "description": "It."}}},
        },
    }
]


def round_of(number: int, thinking: int = 60) -> list[Message]:
    """A call with `thinking` words of reasoning, and its result."""
    call = {"name": "shell", "arguments": {"command": f"sed -n {number}p a.txt"}}
    return [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": f"Line {number} " * thinking,
            "tool_calls": [{"id": f"call{number:05}", "type": "function", "function": call}],
        },
        {"role": "tool", "name": "shell", "tool_call_id": f"call{number:05}", "content": f"it says {number} " * 20},
    ]


def trace(num_users: int, num_rounds: int = 3) -> list[Message]:
    """Questions of a user, each with `num_rounds` rounds and an answer."""
    messages: list[Message] = []
    for user in range(num_users):
        messages.append({"role": "user", "content": f"What does part {user} of the file say? " * 4})
        for number in range(num_rounds):
            messages += round_of(10 * user + number)
        messages.append({"role": "assistant", "content": f"Part {user} is fine.", "reasoning_content": "So " * 80})
    return messages


def synthetic(num_turns: int) -> list[Message]:
    """One letter is one token: a system message of 3,000 tokens, and turns of 600 tokens of thinking, 200 of action and
    600 of observation.  No two texts are equal."""

    def text(kind: str, number: int, length: int) -> str:
        return (f"{kind}{number}." * length)[:length]

    messages: list[Message] = [{"role": "system", "content": text("s", 0, 3000)}]
    for turn in range(num_turns):
        thinking, action = text("t", turn, 600), text("a", turn, 200)
        messages.append({"role": "assistant", "content": action, "reasoning_content": thinking})
        messages.append({"role": "user", "content": text("o", turn, 600)})
    return messages[:-1]


def as_row(messages: list[Message]) -> dict[str, Any]:
    has_calls = any("tool_calls" in message for message in messages)
    return {"messages": messages, **({"tools": TOOLS} if has_calls else {})}
