"""Prepares corpora of a few rows for tests."""

import io
import json
from pathlib import Path
from typing import Any

from sft.console import Console
from sft.data.cache.corpus import Corpus
from sft.data.cache.prepare import prepare
from sft.data.chat.tokenizer import load_tokenizer
from tests.unit.fixtures.folder import config

# Bytes: 1 + "user
# " + 14 + 2 = 22 and 1 + "assistant
# " + 4 + 2 = 17, together 39 tokens, 5 of them supervised. LONG adds 1 + 5 + 53 + 2 = 61 and 1 + 10 + 3 + 2 = 16: 116
# tokens, 9 of them supervised.
ROW = {"messages": [{"role": "user", "content": "Hello, friend!"}, {"role": "assistant", "content": "Fine"}]}
LONG = {"messages": ROW["messages"] + [{"role": "user", "content": "x" * 53}, {"role": "assistant", "content": "Yes"}]}


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def save(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def corpus_of(
    *paths: str,
    cache: Path | None = None,
    log: list[str] | None = None,
    verify: bool = False,
    **overrides: Any,
) -> Corpus:
    """A corpus of the data files, prepared.  `log` gets the lines that `prepare` prints."""
    data, said = config(**overrides), io.StringIO()
    cache_dir = cache or Path(paths[0]).parent / "cache"
    try:
        return prepare(paths, data, load_tokenizer(data), cache_dir, Console(0, said), verify=verify)
    finally:
        if log is not None:
            log.extend(said.getvalue().splitlines())
