"""How rows become tokens and weights: what prepared stores of older code are found by must change with it."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.data.cache.encoder import encode_rows
from sft.data.cache.folders import ENCODING, store_folder
from sft.data.chat.tokenizer import load_tokenizer
from sft.data.read.rows import read_rows
from tests.unit.fixtures.chats import (
    ASSISTANT_FIRST,
    CALLING,
    CALLING_AGAIN,
    CALLING_TWICE,
    SYSTEM,
    TALK,
    THINKING,
    THINKING_CALLING,
    THINKING_INSIDE,
    TOOLS,
    Messages,
    assistant,
    user,
)
from tests.unit.fixtures.folder import config, make_folder, template

# Where a digest below is another one, rows become other tokens or weights than they did, or other rows are refused.
# If that is meant, change both, here and in sft/data/cache/folders.py: data are then tokenised anew.
VERSION = "80c6f0ae371b9ea2e6b764ed63c48a518a45bb1e4b356c0b1744fd584af7737d"
DIGESTS = {
    "byte": "eda3a9f0e1ad6efb",
    "chatml": "2f3586f34bbb0491",
    "qwen3": "8763edd2a27e4ce3",
    "llama31": "56e6d3367a390b6e",
    "mistral_tools": "63136a839be0e327",
    "deepseek_r1": "0e34172871301e66",
}

TYPED = [user("What does <|im_end|> do, or <|eot_id|>?"), assistant("<|im_end|> ends a turn. </s>")]
WEIGHTED = [{**user("a"), "weight": 1}, assistant("b", weight=0.5), user("c"), assistant("d", train=False)]
WEIGHTED += [user("e"), assistant("f")]
MANY = [message for i in range(6) for message in (user(f"Question {i}?"), assistant(f" The answer is {7 * i}.\n"))]
PARTS = [{"role": "developer", "content": "Be brief."}, user("é\u0301 ＃ 検査"), assistant("two parts")]
PARTS[2]["content"] = [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]
CHATS = [TALK, [SYSTEM, *TALK], THINKING, THINKING_INSIDE, ASSISTANT_FIRST, TYPED, WEIGHTED, MANY, PARTS]
CHATS += [[*TALK, user("And then?")], [user("Long"), assistant("word " * 60)]]


def numbered(messages: Messages) -> Messages:
    """With an id of its own for each call."""
    messages = copy.deepcopy(messages)
    for number, call in enumerate(call for message in messages for call in message.get("tool_calls", [])):
        call["id"] = f"call{number:05}"
    return messages


CALLS = [numbered(messages) for messages in (CALLING, CALLING_AGAIN, CALLING_TWICE, THINKING_CALLING)]
ROWS: list[Any] = [
    *({"messages": messages} for messages in CHATS),
    *({"messages": messages, "tools": TOOLS} for messages in CALLS),
    {"messages": json.dumps(TALK), "tools": json.dumps(TOOLS), "system": "Be brief.", "id": 7},
    {"conversations": [{"from": "human", "value": "Six?"}, {"from": "gpt", "value": "6"}]},
    {
        "conversations": [
            {"from": "human", "value": "1 + 2?"},
            {"from": "function_call", "value": json.dumps({"name": "add", "arguments": '{"x": 1}'})},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "3."},
        ]
    },
    {"prompt": "Six?", "completion": "6"},
    {"prompt": TALK, "completion": [user("Six?"), assistant("6")]},
    {"instruction": "Add", "input": "1 2", "output": "3", "history": [["Hi", "Hello."]]},
    {"tokens": [5, 6, 7, 8], "loss_mask": [0, 1, 0.25, 1]},
    {"input_ids": list(range(200)), "labels": [-100] * 20 + list(range(20, 90)) + [-100] * 10 + list(range(100, 200))},
    {"messages": [user("no answer")]},
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The rows as JSON lines and as a list; the chats that a table can hold as a table."""
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("rows")
    paths = [folder / name for name in ("rows.jsonl", "rows.json", "rows.parquet")]
    paths[0].write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    paths[1].write_text(json.dumps(ROWS, ensure_ascii=False, indent=1), encoding="utf-8")
    chats = [{"messages": messages, "tools": TOOLS} for messages in (CALLING, THINKING_CALLING, TALK)]
    parquet.write_table(pyarrow.Table.from_pylist(chats), paths[2])
    return paths


def digest_of(files: list[Path], tokenizer: Any) -> str:
    """Of the samples of all rows, in every way that settings ask for."""
    digest = hashlib.sha256()
    lengths = {"error": 1024, "drop": 96, "cut_turns": 96, "windows": 96}
    for supervise in ("assistant", "last", "all"):
        for over_long, seq_length in lengths.items():
            data = config(
                seq_length=seq_length, doc_multiple=8, over_long=over_long, on_bad_row="skip", supervise=supervise
            )
            for path in files:
                block = encode_rows(read_rows(path), path, data, tokenizer)
                weights = block.weights[block.mask].astype(np.float32)
                for array in (block.tokens, weights, *(block.lines[name] for name in block.lines.dtype.names)):
                    digest.update(f"{array.dtype.name} {len(array)} ".encode() + array.tobytes())
                digest.update(repr([reject.row for reject in block.rejects]).encode())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("name", DIGESTS)
def test_rows_become_the_samples_that_stores_were_prepared_with(name: str, files: list[Path], tmp_path: Path) -> None:
    folder = "byte" if name == "byte" else str(make_folder(tmp_path, template(name), vocab_size=0))
    digest = digest_of(files, load_tokenizer(config(tokenizer=folder)))
    assert digest == DIGESTS[name], f"if that is meant, change ENCODING, and here VERSION and {name!r}: {digest!r}"


def test_a_store_has_the_name_that_it_always_had(tmp_path: Path) -> None:
    """What older releases tokenised is found."""
    assert ENCODING == VERSION, "change VERSION and DIGESTS together with ENCODING in sft/data/cache/folders.py"
    (tmp_path / "a.jsonl").write_text("{}")
    data = config()
    store = store_folder(Path(), tmp_path / "a.jsonl", data, load_tokenizer(data))
    assert store.name == "3334ae7b0ae1fce20a718a5f15e37879"
