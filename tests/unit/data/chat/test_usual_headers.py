"""Where a turn begins if its prompt has other separators than the chat, and if a content begins as the prompt ends."""

from pathlib import Path
from typing import Any

import pytest

from sft.data.chat.encode_chat import Mask, encode_row
from sft.data.chat.tokenizer import FolderTokenizer, load_tokenizer
from sft.data.rows.formats import read_row
from tests.unit.fixtures.folder import config
from tests.unit.fixtures.model_folder import Tokens, marked, write_folder

TOKENS = Tokens(("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"), ("<think>", "</think>"), "<|end|>", "<|bos|>")
# The newline after a turn comes only between turns, so a prompt has none before its header.
BETWEEN = """{%- for m in messages %}{{- '<|' + m.role + '|>' + WRITE + '<|end|>' }}
{%- if not loop.last %}{{- '\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\n' }}{%- endif %}"""
PLAIN, LETTERS = BETWEEN.replace("WRITE", "m.content"), BETWEEN.replace("WRITE", "(m.content | list | join)")
CHAT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nsum</think>4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6"},
]


@pytest.fixture(params=[PLAIN, LETTERS], ids=["plain", "letters"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> FolderTokenizer:
    loaded = load_tokenizer(config(tokenizer=str(write_folder(tmp_path, TOKENS, request.param))))
    assert isinstance(loaded, FolderTokenizer)
    return loaded


def text(tokenizer: FolderTokenizer, messages: list[dict[str, Any]], *, inserted: bool = True) -> str:
    encoding = encode_row(read_row({"messages": messages}), tokenizer, Mask(supervise_inserted=inserted))
    return marked(encoding.tokens.tolist(), encoding.weights.tolist(), TOKENS)


@pytest.mark.parametrize("inserted", [True, False])
def test_a_content_that_begins_as_the_prompt_ends(tokenizer: FolderTokenizer, inserted: bool) -> None:
    assert text(tokenizer, CHAT, inserted=inserted) == (
        "<|user|>2+2?<|end|>\n<|assistant|><think>\n[[sum</think>4<|end|>]]\n"
        "<|user|>3+3?<|end|>\n<|assistant|>[[6<|end|>]]"
    )


@pytest.mark.parametrize("inserted", [True, False])
def test_a_first_answer(tokenizer: FolderTokenizer, inserted: bool) -> None:
    assert text(tokenizer, CHAT[1:], inserted=inserted) == (
        "<|assistant|><think>\n[[sum</think>4<|end|>]]\n<|user|>3+3?<|end|>\n<|assistant|>[[6<|end|>]]"
    )


def test_a_header_is_no_token_that_an_answer_may_contain(tokenizer: FolderTokenizer) -> None:
    assert tokenizer.habits.inside == {"<think>", "</think>"}
    assert tokenizer.habits.lead == ""
    assert encode_row(
        read_row({"messages": [CHAT[0], {"role": "assistant", "content": "<|assistant|>"}]}), tokenizer, Mask()
    ).spelled == (("<|assistant|>", "assistant"),)
