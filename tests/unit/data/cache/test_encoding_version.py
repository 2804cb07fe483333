"""The encoding version identifies how rows become tokens and weights; it must change whenever this changes."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.data.cache.encoder import encode_rows
from sft.data.cache.folders import ENCODING, store_folder
from sft.data.chat.encode_chat import encode_row
from sft.data.chat.tokenizer import load_tokenizer
from sft.data.read.rows import read_rows
from sft.data.rows.formats import read_row
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
from tests.unit.fixtures.folder import ENDS_OF_TEMPLATE, OF_TEMPLATE, config, load_folder, make_folder, template

# If a digest below changes, rows become other tokens or weights than before, or other rows are refused.  If this is
# intended, change the digest here and the version in sft/data/cache/folders.py: then data are tokenised again.
VERSION = "2: the sources of characters decide masks, and text that a template inserts is supervised"
DIGESTS: dict[str, str] = {
    "byte": "eda3a9f0e1ad6efb",
    "chatml": "2f3586f34bbb0491",
    "qwen3": "70020e3fc9f89dbf",
    "llama31": "56e6d3367a390b6e",
    "mistral_tools": "590d3d4b9f7d9c36",
    "deepseek_r1": "05c71cd03884fe5b",
    "glm4_moe": "cc818aaac98c9a18",
    "harmony": "d3c640280448e552",
}
# Digests of the release before data.supervise_inserted, and numbers of rows that are not compared with it: that release
# refused calls that a template writes without the content beside them; and where the system message or the tools stand
# in the last question (Mistral), it did not supervise the space at the start of earlier answers.
WITHOUT_INSERTED = {
    "byte": "eda3a9f0e1ad6efb",
    "chatml": "2f3586f34bbb0491",
    "qwen3": "8763edd2a27e4ce3",
    "llama31": "56e6d3367a390b6e",
    "mistral_tools": "b7175a614001e2c8",
    "deepseek_r1": "0e34172871301e66",
}
NOT_COMPARED = {"mistral_tools": ({2, 13, 14, 15, 16}, {2, 3}), "deepseek_r1": ({14, 15}, {2})}

TYPED = [user("What does <|im_end|> do, or <|eot_id|>?"), assistant("<|im_end|> ends a turn. </s>")]
WEIGHTED = [{**user("a"), "weight": 1}, assistant("b", weight=0.5), user("c"), assistant("d", train=False)]
WEIGHTED += [user("e"), assistant("f")]
MANY = [message for i in range(6) for message in (user(f"Question {i}?"), assistant(f" The answer is {7 * i}.\n"))]
PARTS = [{"role": "developer", "content": "Be brief."}, user("é\u0301 ＃ 検査"), assistant("two parts")]
PARTS[2]["content"] = [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]
CHATS = [TALK, [SYSTEM, *TALK], THINKING, THINKING_INSIDE, ASSISTANT_FIRST, TYPED, WEIGHTED, MANY, PARTS]
CHATS += [[*TALK, user("And then?")], [user("Long"), assistant("word " * 60)]]


def numbered(messages: Messages) -> Messages:
    """The messages, with a different id for each call."""
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
    """The rows as JSON lines and as a list, and the chats that fit into a table as a table."""
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("rows")
    paths = [folder / name for name in ("rows.jsonl", "rows.json", "rows.parquet")]
    paths[0].write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    paths[1].write_text(json.dumps(ROWS, ensure_ascii=False, indent=1), encoding="utf-8")
    chats = [{"messages": messages, "tools": TOOLS} for messages in (CALLING, THINKING_CALLING, TALK)]
    parquet.write_table(pyarrow.Table.from_pylist(chats), paths[2])
    return paths


def digest_of(
    files: list[Path], tokenizer: Any, inserted: bool = True, left_out: tuple[set[int], set[int]] = (set(), set())
) -> str:
    """The digest of the samples of all rows, with every combination of settings.  With data.supervise = assistant, the
    rows `left_out` of list and table, numbered from 1, count as unusable."""
    digest = hashlib.sha256()
    lengths = {"error": 1024, "drop": 96, "cut_turns": 96, "windows": 96}
    settings: dict[str, Any] = {"doc_multiple": 8, "on_bad_row": "skip", "supervise_inserted": inserted}
    for supervise in ("assistant", "last", "all"):
        for over_long, seq_length in lengths.items():
            data = config(seq_length=seq_length, over_long=over_long, supervise=supervise, **settings)
            for path in files:
                others = left_out[path.suffix == ".parquet"] if supervise == "assistant" else set()
                rows = [row for row in read_rows(path) if row[0] not in others]
                block = encode_rows(rows, path, data, tokenizer)
                weights = block.weights[block.mask].astype(np.float32)
                for array in (block.tokens, weights, *(block.lines[name] for name in block.lines.dtype.names)):
                    digest.update(f"{array.dtype.name} {len(array)} ".encode() + array.tobytes())
                digest.update(repr(sorted({*others, *(reject.row for reject in block.rejects)})).encode())
    return digest.hexdigest()[:16]


def loaded(name: str, folder: Path, **data: Any) -> Any:
    """The tokenizer with this template; it has no merges of letters."""
    if name == "byte":
        return load_tokenizer(config())
    more, ends = OF_TEMPLATE.get(name, ()), ENDS_OF_TEMPLATE.get(name, ())
    path = make_folder(folder, template(name), vocab_size=0, more=more, ends=ends)
    return load_tokenizer(config(tokenizer=str(path), **data))


@pytest.mark.parametrize("name", DIGESTS)
def test_rows_become_the_samples_that_stores_were_prepared_with(name: str, files: list[Path], tmp_path: Path) -> None:
    digest = digest_of(files, loaded(name, tmp_path))
    assert digest == DIGESTS[name], f"if that is meant, change ENCODING, and here VERSION and {name!r}: {digest!r}"


@pytest.mark.parametrize("name", WITHOUT_INSERTED)
def test_without_inserted_text_tokens_and_weights_are_those_of_older_releases(
    name: str, files: list[Path], tmp_path: Path
) -> None:
    """A run of an older release continues with data.supervise_inserted = false."""
    digest = digest_of(files, loaded(name, tmp_path), inserted=False, left_out=NOT_COMPARED.get(name, (set(), set())))
    assert digest == WITHOUT_INSERTED[name]


def folder_of(tmp_path: Path, tokenizer: Any, **data: Any) -> str:
    """The name of the store of one row."""
    (tmp_path / "a.jsonl").write_text("{}")
    return store_folder(Path(), tmp_path / "a.jsonl", config(**data), tokenizer).name


def test_the_name_of_a_store_changes_with_the_version_only(tmp_path: Path) -> None:
    """Stores that this release prepared are found again."""
    assert ENCODING == VERSION, "change VERSION and DIGESTS together with ENCODING in sft/data/cache/folders.py"
    assert folder_of(tmp_path, load_tokenizer(config())) == "ed51daf14aea620ec2846cc92f39fc0a"


DATED = "{{- '[' + strftime_now('%Y-%m-%d') + ']' }}"
BEGINS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.mark.parametrize(
    ("jinja", "settings"),
    [
        (DATED + BEGINS + ASKS, {"date": "2026-01-02"}),
        (BEGINS + ASKS, {"supervise_inserted": False}),
        (BEGINS + ASKS, {"final_end": "<|endoftext|>"}),
        (BEGINS + ASKS, {"final_end": None}),
        (BEGINS + ASKS, {"assistant_control_tokens": ["<|python_tag|>"]}),
    ],
)
def test_each_setting_that_changes_samples_gives_another_store(
    tmp_path: Path, jinja: str, settings: dict[str, Any]
) -> None:
    """The tokens or weights of a chat on which the setting has an effect differ, too."""
    names, samples = set(), set()
    for data in ({}, settings):
        tokenizer = load_folder(tmp_path / "tokenizer", jinja, ends=["<|user|>"], **data)
        names.add(folder_of(tmp_path, tokenizer, **data))
        chat = [user("a"), assistant("<|python_tag|>b", reasoning_content="c")]
        if "supervise_inserted" in settings:
            tokenizer = loaded("qwen3", tmp_path / "qwen3")
            chat = [user("a"), assistant("b")]
        encoded = encode_row(read_row({"messages": chat}), tokenizer, config(**data))
        samples.add((encoded.tokens.tobytes(), encoded.weights.tobytes()))
    assert len(names) == len(samples) == 2


def test_a_store_depends_on_the_date_only_if_the_template_asks_for_it(tmp_path: Path) -> None:
    def names(jinja: str, folder: Path) -> set[str]:
        dates: list[dict[str, Any]] = [{}, {"date": "2026-01-01"}, {"date": "2026-01-02"}]
        return {folder_of(tmp_path, load_folder(folder, jinja, **data), **data) for data in dates}

    assert len(names("{# no strftime_now #}" + template("chatml"), tmp_path / "undated")) == 1
    assert len(names(DATED + template("chatml"), tmp_path / "dated")) == 2, "the default is 2026-01-01"
