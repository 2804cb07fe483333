"""Eight chats for `sft data inspect`, and surveys of them.

With the byte tokenizer, a message of n bytes has n + 8 tokens for a user, n + 10 for the system, and n + 13 for an
assistant (start, role, newline, text, end, newline).  For an assistant, n + 1 of them are supervised.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from sft.console import QUIET
from sft.data.chat.tokenizer import load_tokenizer
from sft.data.inspect.report import survey_lines
from sft.data.inspect.survey import Survey, take_survey
from tests.builders import RECIPE
from tests.unit.fixtures.folder import config


def chat(*texts: str, system: str | None = None) -> dict[str, Any]:
    """A chat in which messages of user and assistant alternate."""
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"messages": ([{"role": "system", "content": system}] if system is not None else []) + messages}


def chat_of(length: int) -> dict[str, Any]:
    """A chat of `length` tokens, of which the user message has 9."""
    return chat("x", "y" * (length - 22))


A = [  # number of tokens, number of supervised tokens
    chat("hi", "hello"),  # 10 + 18 = 28, 6
    chat("hi", "hello"),  # a copy: 28, 6
    chat("hi", "bye"),  # 10 + 16 = 26, 4
    chat("", "x"),  # 8 + 14 = 22, 2
    chat("why?", "no", "ok", system="be brief"),  # 18 + 12 + 15 + 10 = 55, 3
    chat("count", "1" * 100),  # 13 + 113 = 126, 101
]
B = [
    chat("hi", "one", "more", "two"),  # 10 + 16 + 12 + 16 = 54, 8
    chat("z" * 192, "end"),  # 200 + 16 = 216, 4: padded to 224, it does not fit into 128
]
HELD_OUT = [chat("hi", "hello"), chat("hi", "new"), chat("else", "hello")]


def lay_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, two training files and a held-out file, which becomes the working folder; no launcher is
    simulated."""
    monkeypatch.chdir(folder)
    for name, rows in (("a", A), ("b", B), ("h", HELD_OUT)):
        write(name, *rows)
    Path("r.yaml").write_text(RECIPE)
    for variable in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "NO_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    return folder


def write(name: str, *rows: dict[str, Any]) -> None:
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def survey(num_previews: int = 0, **overrides: Any) -> Survey:
    data = config(**{"train": ["a.jsonl", "b.jsonl"], "seq_length": 128, "over_long": "drop", **overrides})
    return take_survey("r.yaml", data, load_tokenizer(data), Path("cache"), num_previews, QUIET)


def printed(taken: Survey, *, color: bool = False) -> str:
    return "\n".join(survey_lines(taken, color=color))
