"""Rows of tokens: the tokens and weights that they give, and each fault with the words it is refused in."""

from pathlib import Path

import numpy as np
import pytest

from sft.data.chat.encode_chat import encode_row
from sft.data.chat.tokenizer import ByteTokenizer
from sft.data.rows.formats import Tokenized, read_row
from sft.errors import DataError
from tests.unit.corpora import corpus_of, write


@pytest.mark.parametrize(
    ("row", "tokens", "weights"),
    [
        ({"tokens": [5, 6, 7], "loss_mask": [0, 1, 0]}, [5, 6, 7], [0.0, 1.0, 0.0]),
        ({"input_ids": [5, 6, 7], "assistant_masks": [False, True, True]}, [5, 6, 7], [0.0, 1.0, 1.0]),
        ({"input_ids": [5, 6, 6], "labels": [-100, -100, 6], "attention_mask": [1, 1, 1]}, [5, 6, 6], [0.0, 0.0, 1.0]),
        ({"tokens": [0, 2**31 - 1], "loss_mask": [0, 0.25], "labels": None}, [0, 2**31 - 1], [0.0, 0.25]),
    ],
)
def test_tokens(row: object, tokens: list[int], weights: list[float]) -> None:
    read = read_row(row)
    assert isinstance(read, Tokenized)
    assert read.tokens.tolist() == tokens and read.tokens.dtype == np.int32
    assert read.weights.tolist() == weights and read.weights.dtype == np.float32


def test_ids_are_those_of_the_tokenizer() -> None:
    row = Tokenized(np.array([3, 259, 300], dtype=np.int32), np.ones(3, dtype=np.float32))
    assert encode_row(row, ByteTokenizer(vocab_size=301), "assistant").tokens is row.tokens
    with pytest.raises(DataError) as error:
        encode_row(row, ByteTokenizer(), "assistant")
    assert str(error.value) == "token 2 is 259, but the tokenizer has only ids 0 to 258."


def test_tokens_become_samples(tmp_path: Path) -> None:
    """As they are: no template, no control tokens added.  The first one is no label, whatever it weighs."""
    rows = {"tokens": [256, 65, 257], "loss_mask": [1, 0, 1]}, {"prompt": "a", "completion": "b"}
    corpus = corpus_of(write(tmp_path / "a.jsonl", *rows))
    assert corpus.sample(0).tokens.tolist() == [256, 65, 257] and corpus.sample(0).weights.tolist() == [1, 0, 1]
    assert corpus.num_supervised.tolist() == [1, 2]


# Keys that say where padding and documents lie

ONE_DOCUMENT = {
    "attention_mask": [1, 1, 1],
    "position_ids": [0, 1, 2],
    "seq_start_id": [0],
    "cu_seqlens": [0, 3],
    "seq_lengths": [3],
    "seq_idx": [4, 4, 4],
    "token_type_ids": [0, 0, 0],
    "segment_ids": [1, 1, 1],
    "document_ids": [7, 7, 7],
}


@pytest.mark.parametrize("name", ONE_DOCUMENT)
def test_keys_of_one_document(name: str) -> None:
    row = {"tokens": [5, 6, 7], "loss_mask": [0, 1, 1]}
    read = read_row({**row, name: ONE_DOCUMENT[name]})
    assert isinstance(read, Tokenized) and read.tokens.tolist() == [5, 6, 7]


DOCUMENTS = "Other values mean several documents, which would see each other.  Give each document a row of its own."
PADDING = (
    "Other tokens are padding, which would be trained as text.  Remove them from input_ids and its mask or labels."
)
IMAGES = "Other values mark images or a second text, which are not supported.  Remove the row."
ONE_NUMBER = "expected the same number for each of the 3 tokens"
SEVERAL_DOCUMENTS = {
    "attention_mask": ([0, 1, 1], f"is 0, 1, 1; expected 1 for each of the 3 tokens.  {PADDING}"),
    "position_ids": ([0, 1, 0], f"is 0, 1, 0; expected 0, 1, 2, ... for 3 tokens.  {DOCUMENTS}"),
    "seq_start_id": ([0, 2], f"is 0, 2; expected [0].  {DOCUMENTS}"),
    "cu_seqlens": ([0, 2, 3], f"is 0, 2, 3; expected [0, 3].  {DOCUMENTS}"),
    "seq_lengths": ([2, 1], f"is 2, 1; expected [3].  {DOCUMENTS}"),
    "seq_idx": ([0, 0, 1], f"is 0, 0, 1; {ONE_NUMBER}.  {DOCUMENTS}"),
    "segment_ids": ([1, 1], f"is 1, 1; {ONE_NUMBER}.  {DOCUMENTS}"),
    "document_ids": ([1, 2, 2], f"is 1, 2, 2; {ONE_NUMBER}.  {DOCUMENTS}"),
    "token_type_ids": ([0, 1, 1], f"is 0, 1, 1; expected 0 for each of the 3 tokens.  {IMAGES}"),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL_DOCUMENTS)
def test_keys_of_several_documents(name: str) -> None:
    values, complaint = SEVERAL_DOCUMENTS[name]
    with pytest.raises(DataError) as error:
        read_row({"input_ids": [5, 6, 7], "labels": [-100, 6, 7], name: values})
    assert str(error.value) == f"{name} {complaint}"


# Every fault, and its words

BAD_ROWS: list[tuple[object, str]] = [
    ({"tokens": "1 2"}, "tokens must be a list of at least one number; got a string."),
    ({"tokens": [1, True]}, "tokens has true at position 2; ids are integers."),
    ({"tokens": [1, -2]}, "tokens has -2 at position 2; ids are integers from 0 to 2,147,483,647."),
    ({"tokens": [1, 2]}, "tokens needs one of loss_mask, assistant_masks or labels, to say which tokens are "
                         "supervised;"),
    ({"input_ids": [1, 2], "labels": [1, 2, -100]}, "input_ids has 2 numbers, but labels has 3."),
    ({"tokens": [1, 2], "loss_mask": [0, -1]}, "loss_mask is -1; expected 0, or 1e-06 to 1e+06."),
    ({"tokens": [1, 2], "loss_mask": [0, "1"]}, "loss_mask has a string at position 2; it holds numbers."),
    ({"tokens": [1, 2], "loss_mask": [1, 0]}, "loss_mask supervises no token after the first token, so the row"),
    ({"tokens": [1, 2, 3], "labels": [-100, 3, -100]},
     "label 2 is 3, but token 2 is 2: a label must be the token at the same position (not shifted), or -100."),
    ({"tokens": [1, 2], "labels": [-100, 2.0]}, "labels has 2.0 at position 2; labels are integers."),
    ({"tokens": [1, 2], "loss_mask": [0, 1], "attention_mask": 1}, "attention_mask must be a list of numbers; got 1."),
    ({"tokens": [1, 2], "loss_mask": [0, 1], "cu_seqlens": []}, "cu_seqlens is an empty list; expected [0, 2]."),
]  # fmt: skip


@pytest.mark.parametrize(("row", "complaint"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_bad_rows(row: object, complaint: str) -> None:
    with pytest.raises(DataError) as error:
        read_row(row)
    assert complaint in str(error.value) and len(str(error.value)) < 300
