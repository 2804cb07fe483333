"""Which tokens stand for a turn, and that they decode to it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sft.data.chat.formats import Chat
from sft.data.chat.render import RenderedChat
from sft.data.chat.tokenizer import FolderTokenizer
from sft.data.chat.tokens import find_token_spans
from sft.data.chat.turns import Turn
from sft.errors import DataError
from tests.unit.fixtures.chats import assistant, runs, user
from tests.unit.fixtures.folder import load_letters


def tokens(text: str, turns: list[str], tokenizer: FolderTokenizer) -> list[str]:
    """What the tokens of some parts of the text decode to."""
    spans = [Turn(i, text.index(part), text.index(part) + len(part), "blank") for i, part in enumerate(turns)]
    encoded = tokenizer.encode(text)
    rendered = RenderedChat(text, text, [], [], None, {}, "", tokenizer)
    found = find_token_spans(spans, rendered, encoded)
    return [tokenizer.decode(encoded.ids[first:last]) for _, first, last in found]


@pytest.mark.parametrize(
    ("name", "text", "turn", "expected"),
    [
        ("chatml", "<|im_start|>assistant\nYes.<|im_end|>\n", "Yes.<|im_end|>", "Yes.<|im_end|>"),
        # The space of the header and the first word are one token.
        ("plain_header", "user: a\nassistant: Hello<|endoftext|>", "Hello<|endoftext|>", " Hello<|endoftext|>"),
        # Control tokens inside a turn.
        ("llama31", "<|end_header_id|>\n\n<|python_tag|>f<|eom_id|>", "<|python_tag|>f<|eom_id|>", None),
        # The spaces after <|assistant|> belong to it, those of the content too.
        ("phi3", "<|user|>\na<|end|>\n<|assistant|>\n b<|end|>\n", " b<|end|>", "b<|end|>"),
        # Characters of several bytes.
        ("chatml", "<|im_start|>assistant\n中😀é<|im_end|>\n", "中😀é<|im_end|>", "中😀é<|im_end|>"),
    ],
)
def test_tokens_of_a_turn(
    tokenizers: Callable[[str], FolderTokenizer], name: str, text: str, turn: str, expected: str | None
) -> None:
    assert tokens(text, [turn], tokenizers(name)) == [expected or turn]


def test_turns_in_order(tokenizers: Callable[[str], FolderTokenizer]) -> None:
    """Each end of turn is counted, those of users too."""
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
    assert tokens(text, ["b<|im_end|>", "c<|im_end|>"], tokenizers("chatml")) == ["b<|im_end|>", "c<|im_end|>"]


def test_a_tokenizer_that_loses_text_is_refused(tmp_path: Path) -> None:
    tokenizer = load_letters(tmp_path)
    assert runs(Chat([user("x"), assistant("fine")], None), tokenizer) == ["fine<|im_end|>"]
    with pytest.raises(
        DataError, match=r'turns an assistant turn into other text: "wide<\|im_end\|>" became "<unk>ide<'
    ):
        runs(Chat([user("x"), assistant("wide")], None), tokenizer)
