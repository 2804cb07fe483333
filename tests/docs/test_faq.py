"""Each message that docs/faq.md quotes occurs in the code, word for word; `...` stands for text that differs between
runs."""

import ast
import re
from functools import cache

import pytest

from tests.docs.blocks import ROOT

FAQ = (ROOT / "docs/faq.md").read_text(encoding="utf-8")
FEWEST_LETTERS = 10  # in a quoted line; a shorter line could occur in the code by chance
MESSAGES = [line for block in re.findall(r"```text\n(.*?)```", FAQ, re.DOTALL) for line in block.splitlines()]


@cache
def texts() -> list[str]:
    """All strings of sft.  A NUL replaces each value in an f-string, and a single space replaces several spaces."""
    found = []
    for path in sorted((ROOT / "sft").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append(" ".join("".join(map(str, parts)).split(" ")))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return [re.sub(r" +", " ", text) for text in found]


def is_in_the_code(message: str) -> bool:
    fragments = [fragment.strip() for fragment in message.split("...") if fragment.strip()]
    pattern = re.compile(".*?".join(map(re.escape, fragments)), re.DOTALL)
    return any(pattern.search(text) for text in texts())


@pytest.mark.parametrize("message", MESSAGES)
def test_every_quoted_message_is_in_the_code(message: str) -> None:
    assert len(re.sub(r"[^A-Za-z]", "", message)) >= FEWEST_LETTERS, "too short to be found"
    assert is_in_the_code(message)


def test_a_changed_message_is_not_found() -> None:
    assert is_in_the_code("... exists; nothing was written.")
    assert not is_in_the_code("... exists; nothing has been written.")


def test_the_page_has_twenty_entries_each_with_one_message() -> None:
    entries = FAQ.split("\n### ")[1:]
    assert len(entries) >= 20
    assert all(entry.count("```text\n") == 1 for entry in entries)
