"""Random chat templates and chats, compared with text and mask that plain Python computes: make test-all tries
20,000."""

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from sft.data.chat.encode_chat import Encoding, encode_chat
from sft.data.chat.tokenizer import FolderTokenizer
from sft.data.rows.formats import Chat, read_row
from sft.data.template.chat_template import ChatTemplate
from sft.errors import DataError
from tests.unit.fixtures.folder import open_folder
from tests.unit.fixtures.model_folder import Tokens, pieces_of, write_folder
from tests.unit.random_templates import Case, case
from tests.unit.random_templates.expressions import EITHER

FEW, MANY = 100, 20_000
CHUNK = 50
SEEDS = [
    pytest.param(first, id=str(first), marks=[pytest.mark.grid] if first >= FEW else [])
    for first in range(0, MANY, CHUNK)
]
WITHOUT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("first", SEEDS)
def test_text_and_mask(first: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "random"
    wrong = {}
    for seed in range(first, first + CHUNK):
        made = case(seed)
        try:
            complaint = complaint_of(made, encoded(made, folder))
        except DataError as error:
            complaint = str(error)
        if complaint is not None:
            wrong[seed] = complaint
    assert not wrong


def test_every_choice_is_tried() -> None:
    """The few cases use every statement and operation that a random template can have."""
    templates = "\n".join(case(seed).template for seed in range(FEW))
    parts = "macro call filter with namespace tojson indent split partition join format trim safe map selectattr items"
    absent = [part for part in (*parts.split(), "generation", "endset", "%s' %") if part not in templates]
    assert not absent


def encoded(made: Case, folder: Path) -> Encoding:
    loaded = tokenizer_of(made.tokens, folder)
    template = ChatTemplate(made.template, "random", dict(loaded.files.special_tokens))
    row = read_row({"messages": made.messages, **({"tools": made.tools} if made.tools else {})})
    assert isinstance(row, Chat)
    return encode_chat(row, replace(loaded, chat_template=template))


@cache
def tokenizer_of(tokens: Tokens, folder: Path) -> FolderTokenizer:
    """The tokenizer with these control tokens; loaded once."""
    return open_folder(write_folder(folder / str(abs(hash(tokens))), tokens, WITHOUT))


def complaint_of(made: Case, encoding: Encoding) -> str | None:
    """The fault in the ids or weights of a case; None if they are right."""
    pieces = pieces_of(encoding.tokens.tolist(), made.tokens)
    text = b"".join(pieces).decode()
    rest = text.removeprefix(made.text)
    is_appended = made.appended and rest in made.tokens.special
    if not text.startswith(made.text) or (rest and not is_appended):
        return f"text {text!r}, expected {made.text!r}"
    special = [piece.decode() for piece in pieces if piece.decode(errors="replace") in made.tokens.special]
    if Counter(special[: len(special) - is_appended]) != +made.controls:
        return f"control tokens {Counter(special)}, of the template {made.controls}"
    if is_appended and not encoding.weights[-1]:
        return f"the appended {rest} is not supervised"
    expected = [label for letter, label in zip(made.text, made.labels, strict=True) for _ in letter.encode()]
    ours = [int(w > 0) for piece, w in zip(pieces, encoding.weights, strict=True) for _ in piece][: len(expected)]
    ours[0] = EITHER  # no token precedes the first one
    wrong = [k for k, label in enumerate(expected) if EITHER not in (label, ours[k]) and label != ours[k]]
    if not wrong:
        return None
    around = made.text.encode()[max(0, wrong[0] - 60) : wrong[-1] + 60].decode(errors="replace")
    return f"{len(wrong)} bytes have weight {ours[wrong[0]]}, the first ones in {around!r}"
