"""Traces under released templates that no package ships: each turn is trained as the last one of `apply_chat_template`.

SFT_CHAT_TEMPLATES names a folder with the files, such as models/templates of llama.cpp; without it, they are skipped.
transformers refuses Kimi-K2's template, because it changes a list, so Jinja's other sandbox renders it.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import SandboxedEnvironment
from transformers import AutoTokenizer

from sft.data.chat.encode_chat import encode_chat, encode_turns
from sft.data.chat.tree import Grown, texts_of
from sft.data.rows.formats import Chat, read_row
from tests.unit.data.traces import TOOLS, as_row, trace
from tests.unit.fixtures.folder import open_folder, template
from tests.unit.fixtures.model_folder import Tokens, write_folder
from tests.unit.released_chats import Message, for_transformers
from tests.unit.released_templates import TOKENS, at_the_default_date

FOLDER = os.environ.get("SFT_CHAT_TEMPLATES")
_KIMI = "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|> [EOS] <|media_pad|>"
_KIMI_CALLS = (
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> "
    "<|tool_call_end|>"
)
KIMI = Tokens((*_KIMI.split(), *_KIMI_CALLS.split()), ("<think>", "</think>"), "[EOS]", "", ("<|im_end|>", "[EOS]"))
MINIMAX = Tokens(
    ("]!p~[", "]~b]", "]~!b[", "[e~["),
    ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    *("[e~[", "]~!b[", ("[e~[",)),
)


class Case(NamedTuple):
    tokens: Tokens
    is_plain: bool = False  # whether another sandbox renders it
    end: tuple[str, str] | None = None  # the token that follows the last call, and the last answer


CASES = {
    "GLM-4.7-Flash": Case(TOKENS["glm"], end=("<|observation|>", "<|user|>")),
    "deepseek-ai-DeepSeek-V3.1": Case(TOKENS["deepseek"]),
    "MiniMax-M2": Case(MINIMAX),
    "Kimi-K2-Instruct": Case(KIMI, is_plain=True),
    "Kimi-K2-Thinking": Case(KIMI, is_plain=True),
}
# Own templates of the same structure, which need no files: where thinking is dropped, and what delimits a turn
FIXTURES = {
    "deepseek_v31": Case(TOKENS["deepseek"]),
    "minimax": Case(MINIMAX),
    "kimi": Case(KIMI, is_plain=True),
}


def rendered(source: str, theirs: Any, case: Case, messages: list[Message], *, prompt: bool = False) -> list[int]:
    ours = for_transformers(messages, as_text=False)
    with at_the_default_date():
        if not case.is_plain:
            return list(theirs.apply_chat_template(ours, TOOLS, add_generation_prompt=prompt, return_dict=False))
    environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **keywords: json.dumps(value, ensure_ascii=False)
    text = environment.from_string(source).render(messages=ours, tools=TOOLS, add_generation_prompt=prompt)
    return list(theirs(text, add_special_tokens=False)["input_ids"])


@pytest.mark.skipif(FOLDER is None, reason="SFT_CHAT_TEMPLATES names no folder of released templates")
@pytest.mark.parametrize("messages", [trace(1, 6), trace(3)], ids=["one", "many"])
@pytest.mark.parametrize("name", CASES)
def test_each_turn_is_trained_as_the_last_one(tmp_path: Path, name: str, messages: list[Message]) -> None:
    check_turns(tmp_path, CASES[name], (Path(str(FOLDER)) / f"{name}.jinja").read_text(encoding="utf-8"), messages)


@pytest.mark.parametrize("messages", [trace(1, 6), trace(3)], ids=["one", "many"])
@pytest.mark.parametrize("name", FIXTURES)
def test_so_with_templates_of_the_same_structure(tmp_path: Path, name: str, messages: list[Message]) -> None:
    check_turns(tmp_path, FIXTURES[name], template(name), messages)


def check_turns(tmp_path: Path, case: Case, source: str, messages: list[Message]) -> None:
    folder = write_folder(tmp_path, case.tokens, source)
    tokenizer, theirs = open_folder(folder), AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    row = read_row(as_row(messages))
    assert isinstance(row, Chat)
    encoding = encode_turns(row, tokenizer)
    assert encoding.tree is not None
    texts = texts_of(Grown(encoding.tokens, encoding.weights, encoding.tree))
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    ends = {theirs.convert_tokens_to_ids(end) for end in case.tokens.stops}
    for text, turn in zip(texts, turns, strict=True):
        whole = rendered(source, theirs, case, messages[: turn + 1])
        prompt = rendered(source, theirs, case, messages[:turn], prompt=True)
        if case.end is not None:
            whole.append(theirs.convert_tokens_to_ids(case.end["tool_calls" not in messages[turn]]))
        assert text.tokens.tolist() == whole
        start = next((k for k, (a, b) in enumerate(zip(whole, prompt)) if a != b), len(prompt))
        if case.is_plain:  # an answer hides the thinking before it, so the prompt differs earlier
            middle = theirs.convert_tokens_to_ids("<|im_middle|>")
            start = max(k for k, token in enumerate(whole) if token == middle) + 1
        last = max(k for k, token in enumerate(whole) if token in ends)
        supervised = [float(start <= k <= last) for k in range(len(whole))]
        assert text.weights.tolist() == supervised, (turn, theirs.decode(whole[start - 20 : start + 20]))
        alone = encode_chat(row._replace(messages=row.messages[: turn + 1]), tokenizer, "last")
        assert alone.tokens.tolist() == whole and alone.weights.tolist() == supervised
