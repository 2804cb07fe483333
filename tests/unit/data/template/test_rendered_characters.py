"""The number of characters that a template writes for a file of chats: at most 2.2 times the chats' text.

Prompts that locate the starts of turns are rendered too, but only once for each state, however long the chat is.
"""

from pathlib import Path
from typing import Any

import pytest

from sft.data.chat.encode_chat import encode_row
from sft.data.rows.formats import read_row
from sft.data.template.chat_template import ChatTemplate
from sft.data.template.rendering import Rendering
from tests.unit.fixtures.folder import config
from tests.unit.released_templates import FAMILIES, NAMES, Model

MOST = 2.2
MOST_IN_LONG_CHATS = 1.2
SIZES = (2, 10, 50, 200, 1500)
TOOL = {"type": "function", "function": {"name": "run", "description": "Runs a command.", "parameters": {}}}


def chat_of(kind: str, num_messages: int) -> dict[str, Any]:
    """A chat of about `num_messages` messages: plain turns, turns with reasoning, calls of tools with reasoning, or all
    of these in turn."""
    if kind == "mixed":
        parts = [chat_of(part, 4)["messages"] for part in ("plain", "agent", "reasoning", "plain", "agent")]
        messages = [message for part in parts for message in part] * (num_messages // 20 + 1)
        return {"messages": messages[: max(num_messages, 2)], "tools": [TOOL]}
    if kind != "agent":
        more = {"reasoning_content": "Let me think about this question. " * 2} if kind == "reasoning" else {}
        turn = [
            {"role": "user", "content": "What is the answer to this question? "},
            {"role": "assistant", "content": "The answer is the following one. ", **more},
        ]
        return {"messages": turn * (num_messages // 2)}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find out why the tests fail. " * 3}]
    for number in range(max(1, num_messages // 2 - 1)):
        function = {"name": "run", "arguments": {"command": f"pytest tests/test_{number}.py" * 2, "timeout": number}}
        call = {"id": f"c{number}", "type": "function", "function": function}
        thinking = "Let me run the next test. " * 2
        messages.append({"role": "assistant", "content": "", "reasoning_content": thinking, "tool_calls": [call]})
        messages.append({"role": "tool", "content": "1 passed in 0.1 s\n" * 5, "tool_call_id": f"c{number}"})
    messages.append({"role": "assistant", "content": "None of them fails.", "reasoning_content": "So none does."})
    return {"messages": messages, "tools": [TOOL]}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of characters of each rendering."""
    lengths: list[int] = []
    plain = ChatTemplate.rendered

    def rendered(self: ChatTemplate, *arguments: Any, **keywords: Any) -> Rendering:
        rendering = plain(self, *arguments, **keywords)
        lengths.append(len(rendering.text))
        return rendering

    monkeypatch.setattr(ChatTemplate, "rendered", rendered)
    return lengths


@pytest.mark.parametrize("name", ["qwen3_6", "glm4moe", "gptoss", "gemma4_v5"])
def test_characters(counted: list[int], tmp_path: Path, name: str) -> None:
    model = Model(tmp_path, name, FAMILIES[NAMES.index(name)])
    model.ours.habits  # found once per template
    sizes = SIZES[:-1] if name == "gemma4_v5" else SIZES  # it takes ten times as long as the others
    for kind in ("plain", "reasoning", "agent", "mixed"):
        for size in sizes:
            counted.clear()
            chats = 0
            for first in ("Hello. ", "Well. "):  # two chats: the smallest file with more than one
                row = chat_of(kind, size)
                row["messages"][0] = {"role": "user", "content": first * 5}
                rendered = encode_row(read_row(row), model.ours, config()).rendered
                assert rendered is not None
                chats += len(rendered.reading.text)
            assert sum(counted) <= (MOST_IN_LONG_CHATS if size >= 200 else MOST) * chats, (kind, size)
