"""Plain texts: the tokens of transformers and one EOS, all supervised, divided into windows, without a template."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.data.chat.encode_chat import Encoding, encode_row
from sft.data.chat.tokenizer import ByteTokenizer, ChatTokenizer, load_tokenizer
from sft.data.rows.formats import Chat, PlainText, read_row
from sft.data.rows.token_rows import Tokenized
from sft.errors import DataError
from tests.unit.corpora import ROW, corpus_of, write
from tests.unit.fixtures.folder import SPECIAL, config, make_folder, open_folder

TEXT = "def f(x):\n    return '<|im_end|>'  # é\n"
EOS, BOS = SPECIAL.index("<|endoftext|>"), SPECIAL.index("<s>")
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`make("<s> $A")`: a tokenizer folder without a chat template, whose post-processor turns a text $A into "<s>
    $A"."""
    from tokenizers import processors
    from transformers import AutoTokenizer

    plain = make_folder(tmp_path_factory.mktemp("plain"), None)

    def with_post_processor(single: str) -> Path:
        if single == "$A":
            return plain
        hf = AutoTokenizer.from_pretrained(plain)
        special = [(token, hf.convert_tokens_to_ids(token)) for token in single.split() if token != "$A"]
        hf.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
        folder = tmp_path_factory.mktemp("special")
        hf.save_pretrained(folder)
        return folder

    return with_post_processor


@pytest.mark.parametrize(
    ("single", "num_before", "end"),
    [
        ("$A", 0, [EOS]),  # Qwen: no token before or after a text
        ("<s> $A", 1, [EOS]),  # Llama, Mistral: BOS
        ("<s> <bos> $A", 2, [EOS]),
        ("<s> $A <|endoftext|>", 1, []),  # the tokenizer itself adds an end to a text; no second end is added
    ],
)
def test_tokens_are_those_of_transformers_and_one_end(make: Make, single: str, num_before: int, end: list[int]) -> None:
    from transformers import AutoTokenizer

    folder = make(single)
    reference = AutoTokenizer.from_pretrained(folder)(TEXT, truncation=False)["input_ids"]
    assert SPECIAL.index("<|im_end|>") in reference  # a control string in a plain text becomes a control token
    row, tokenizer = PlainText(TEXT), open_folder(folder)
    for supervise in ("assistant", "last", "all"):
        tokens, weights, rendered, before, *_ = encode_row(row, tokenizer, config(supervise=supervise))
        assert tokens.tolist() == [*reference, *end] and tokens.dtype == np.int32
        assert weights.tolist() == [0.0] * max(1, num_before) + [1.0] * (len(tokens) - max(1, num_before))
        assert (rendered, before) == (None, num_before)


def encoded(text: str, tokenizer: ChatTokenizer) -> Encoding:
    return encode_row(PlainText(text), tokenizer, config())


def test_a_text_that_ends_with_eos_gets_no_second_one(make: Make) -> None:
    tokens, *_ = encoded("one<|endoftext|>two<|endoftext|>", open_folder(make("$A")))
    assert tokens.tolist().count(EOS) == 2 and tokens[-1] == EOS != tokens[-2]


def test_bytes() -> None:
    """The byte tokenizer has no EOS, and encodes control strings as bytes."""
    tokens, weights, _, num_before, *_ = encoded("hé<|im_end|>", ByteTokenizer())
    assert tokens.tolist() == [104, 195, 169, *b"<|im_end|>"]
    assert (weights.tolist(), num_before) == ([0.0] + [1.0] * 12, 0)
    with pytest.raises(DataError, match="the text has only one token, so no token is supervised."):
        encoded("h", ByteTokenizer())


def test_a_row_is_a_text_only_if_it_is_nothing_else() -> None:
    """Many chats also have a key `text` with the rendered chat."""
    assert read_row({"text": "a", "meta": 1, "messages": None}) == PlainText("a")
    assert isinstance(read_row({"text": "rendered", **ROW}), Chat)
    assert isinstance(read_row({"text": "x", "tokens": [1, 2], "loss_mask": [0, 1]}), Tokenized)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"text": ""}, "text is empty."),
        ({"text": ["a"]}, "text must be a string; got a list."),
        ({"text": None}, r"unknown format: .*, or text\.  This row has the keys text \(null\)\."),
    ]
    for row, complaint in refused:
        with pytest.raises(DataError, match=complaint):
            read_row(row)


@pytest.mark.parametrize(("single", "first"), [("$A", []), ("<s> $A", [BOS])])
def test_windows_of_a_text(make: Make, tmp_path: Path, single: str, first: list[int]) -> None:
    """Every token is supervised once.  A window repeats an eighth as context, and begins with BOS if the tokenizer adds
    BOS to texts."""
    folder = make(single)
    path = write(tmp_path / "a.jsonl", {"text": "word " * 100}, {"text": "short"})
    settings = {"tokenizer": str(folder), "seq_length": 64, "doc_multiple": 8, "over_long": "windows"}
    corpus = corpus_of(path, **settings)
    whole, full, *_ = encoded("word " * 100, open_folder(folder))
    samples = [corpus.sample(i) for i in range(len(corpus))]
    assert samples.pop().tokens.tolist() == encoded("short", open_folder(folder)).tokens.tolist()
    assert len(samples) > 2 and all(len(sample.tokens) <= 64 for sample in samples)
    assert all(sample.tokens[: len(first)].tolist() == first for sample in samples)
    learnt = np.concatenate([sample.tokens[sample.weights > 0] for sample in samples])
    assert learnt.tolist() == whole[full > 0].tolist()
    for sample in samples[1:]:  # BOS, 8 tokens of context, then new ones
        assert sample.weights.tolist()[: len(first) + 9] == [0.0] * (len(first) + 8) + [1.0]
    assert corpus.name(1) == f"{path}:1 window 2 of {len(samples)}"
    report = next(iter(corpus.row_reports.values()))
    assert (report.rows_windowed, report.tokens_cut, report.tokens_dropped) == (1, 0, 0)


def test_a_text_has_no_turns_to_cut(tmp_path: Path) -> None:
    """Also with on_bad_row = skip: the setting is wrong, not the row."""
    path = write(tmp_path / "a.jsonl", ROW, {"text": "x" * 100})
    settings = {"seq_length": 64, "doc_multiple": 32, "over_long": "cut_turns", "on_bad_row": "skip"}
    wanted = (
        r"a.jsonl:2: a text of 100 tokens \(128 when padded .*\) does not fit data.seq_length = 64, .* to windows, "
    )
    with pytest.raises(DataError, match=wanted):
        corpus_of(path, **settings)
    assert len(corpus_of(path, **{**settings, "over_long": "drop"})) == 1


def test_only_chats_need_a_chat_template(make: Make, tmp_path: Path) -> None:
    settings = {"tokenizer": str(make("$A"))}
    assert len(corpus_of(write(tmp_path / "texts.jsonl", {"text": "one"}, {"text": "two"}), **settings)) == 2
    complaint = r"mixed.jsonl:2: the tokenizer of \S+ has no chat template.*Give one with data.chat_template"
    with pytest.raises(DataError, match=complaint):
        corpus_of(write(tmp_path / "mixed.jsonl", {"text": "one"}, ROW), **settings)
    with pytest.raises(DataError, match="chat_template_kwargs gives quiet, but the tokenizer of .* has no chat templ"):
        load_tokenizer(config(**settings, chat_template_kwargs={"quiet": True}))
