"""What a checked message is, and under which names an assistant's thinking stands in it."""

import re
from typing import Any

Message = dict[str, Any]  # role, content, and what else the row gave
Tools = list[dict[str, Any]] | None

THINKING = ("reasoning_content", "thinking", "reasoning")  # keys of a message; templates read the first
# Thinking at the head of a content, in four parts: what opens it, the thinking, what closes it, the answer.
THOUGHT = re.compile(r"(\s*(?:<think>)?\s*)(.*?)(\s*</think>\s*)(.*)", re.DOTALL)
