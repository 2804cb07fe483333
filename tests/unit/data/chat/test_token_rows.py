"""Rows of tokens: their tokens and weights, and each fault with its error message."""

from pathlib import Path

import numpy as np
import pytest

from sft.data.chat.encode_chat import encode_row
from sft.data.chat.tokenizer import ByteTokenizer
from sft.data.rows.formats import read_row
from sft.data.rows.token_rows import Tokenized
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
    """Tokens stay as they are: no template, no added control tokens.  The first token is no label, whatever its
    weight."""
    rows = {"tokens": [256, 65, 257], "loss_mask": [1, 0, 1]}, {"prompt": "a", "completion": "b"}
    corpus = corpus_of(write(tmp_path / "a.jsonl", *rows))
    assert corpus.sample(0).tokens.tolist() == [256, 65, 257] and corpus.sample(0).weights.tolist() == [1, 0, 1]
    assert corpus.num_supervised.tolist() == [1, 2]


# Keys that mark padding and documents

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


# For each form in which other trainers pack and pad rows: the kept tokens, and the starts of documents
KEYS = list[tuple[dict[str, object], list[int], list[int]]]
PACKED: KEYS = [
    ({"position_ids": [0, 1, 2, 0, 1, 2]}, [1, 2, 3, 4, 5, 6], [0, 3]),
    ({"input_pos": [0, 1, 0, 1, 0, 1]}, [1, 2, 3, 4, 5, 6], [0, 2, 4]),
    ({"attention_mask": [1, 1, 1, 2, 2, 2]}, [1, 2, 3, 4, 5, 6], [0, 3]),
    ({"attention_mask": [1, 1, 1, 1, 1, 1], "position_ids": [0, 1, 2, 0, 1, 2]}, [1, 2, 3, 4, 5, 6], [0, 3]),
    ({"seq_start_id": [0, 4]}, [1, 2, 3, 4, 5, 6], [0, 4]),
    ({"cu_seqlens": [0, 2, 6]}, [1, 2, 3, 4, 5, 6], [0, 2]),
    ({"cu_seqlens": [0, 2, 6, -1, -1]}, [1, 2, 3, 4, 5, 6], [0, 2]),
    ({"cu_seqlens": [0, 2, 6, 6, 6]}, [1, 2, 3, 4, 5, 6], [0, 2]),
    ({"cu_seq_lens_q": [0, 2, 6], "cu_seq_lens_k": [0, 2, 6]}, [1, 2, 3, 4, 5, 6], [0, 2]),
    ({"seq_lengths": [2, 2, 2]}, [1, 2, 3, 4, 5, 6], [0, 2, 4]),
    ({"seq_lens": [2, 4]}, [1, 2, 3, 4, 5, 6], [0, 2]),
    ({"seq_idx": [0, 0, 0, 1, 1, 1]}, [1, 2, 3, 4, 5, 6], [0, 3]),
    ({"document_ids": [7, 7, 3, 3, 3, 3]}, [1, 2, 3, 4, 5, 6], [0, 2]),
    ({"segment_ids": [1, 1, 1, 2, 2, 2], "position_ids": [0, 1, 2, 0, 1, 2]}, [1, 2, 3, 4, 5, 6], [0, 3]),
]
LEFT: KEYS = [
    ({"attention_mask": [0, 0, 1, 1, 1, 1]}, [3, 4, 5, 6], [0]),
    ({"attention_mask": [0, 0, 1, 1, 1, 1], "position_ids": [1, 1, 0, 1, 2, 3]}, [3, 4, 5, 6], [0]),
    ({"attention_mask": [0, 0, 1, 1, 2, 2], "token_type_ids": [3, 3, 0, 0, 0, 0]}, [3, 4, 5, 6], [0, 2]),
    ({"position_ids": [0, 0, 0, 1, 2, 3]}, [3, 4, 5, 6], [0]),
    ({"seq_idx": [-1, -1, 0, 0, 1, 1]}, [3, 4, 5, 6], [0, 2]),
]
RIGHT: KEYS = [
    ({"attention_mask": [1, 1, 1, 1, 0, 0]}, [1, 2, 3, 4], [0]),
    ({"attention_mask": [True, True, True, True, False, False]}, [1, 2, 3, 4], [0]),
    ({"attention_mask": [1, 1, 2, 2, 0, 0], "position_ids": [0, 1, 0, 1, 0, 0]}, [1, 2, 3, 4], [0, 2]),
    ({"attention_mask": [1, 1, 1, 1, 0, 0], "position_ids": [0, 1, 0, 1, 2, 3]}, [1, 2, 3, 4], [0, 2]),
    ({"attention_mask": [1, 1, 1, 1, 0, 0], "cu_seqlens": [0, 2, 6]}, [1, 2, 3, 4], [0, 2]),
    ({"position_ids": [0, 1, 0, 1, 0, 0]}, [1, 2, 3, 4], [0, 2]),
    ({"cu_seqlens": [0, 2, 4]}, [1, 2, 3, 4], [0, 2]),
    ({"cu_seqlens": [0, 2, 4, -1]}, [1, 2, 3, 4], [0, 2]),
    ({"seq_lengths": [4], "attention_mask": [1, 1, 1, 1, 0, 0]}, [1, 2, 3, 4], [0]),
    ({"segment_ids": [1, 1, 2, 2, 0, 0]}, [1, 2, 3, 4], [0, 2]),
]
BETWEEN: KEYS = [
    ({"attention_mask": [1, 1, 0, 2, 2, 0]}, [1, 2, 4, 5], [0, 2]),
    ({"attention_mask": [1, 1, 0, 1, 1, 0], "cu_seqlens": [0, 3, 6]}, [1, 2, 4, 5], [0, 2]),
]
FORMS = [
    *((form, [0, 1, 1, 1, 1, 1]) for form in PACKED),
    *((form, [0, 0, 0, 1, 1, 1]) for form in LEFT),
    *((form, [0, 1, 1, 1, 0, 0]) for form in RIGHT),
    *((form, [0, 1, 0, 1, 1, 0]) for form in BETWEEN),
]


@pytest.mark.parametrize(("form", "mask"), FORMS)
def test_keys_of_several_documents(form: tuple[dict[str, object], list[int], list[int]], mask: list[int]) -> None:
    """Padding tokens are removed, and the first token of each document has weight 0."""
    keys, tokens, starts = form
    read = read_row({"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": mask, **keys})
    assert isinstance(read, Tokenized)
    assert (read.tokens.tolist(), list(read.starts), read.num_padding) == (tokens, starts, 6 - len(tokens))
    weights = [float(mask[token - 1]) for token in tokens]
    assert read.weights.tolist() == [0.0 if i in starts else weight for i, weight in enumerate(weights)]


ROW_OF_ITS_OWN = "or give each document a row of its own, without padding."
UNCLEAN: list[tuple[dict[str, object], str]] = [
    ({"attention_mask": [1, 0, 1]}, "token 2 is padding in the middle of a document."),
    ({"attention_mask": [1, 0, 1], "seq_lengths": [3]}, "token 2 is padding in the middle of a document."),
    ({"attention_mask": [0, 0, 0]}, "every token is padding by attention_mask, so the row has no document."),
    ({"attention_mask": [[[[1, 0, 0]]]]}, "attention_mask has a list at position 1; it holds a whole number for each "
                                          "token or document.  A mask of several dimensions cannot be used."),
    ({"attention_mask": [1, 2, 1]}, "attention_mask has 1 at token 3 again, after another number: the tokens"),
    ({"attention_mask": [1, 1, -1]}, "attention_mask has -1; expected numbers from 0.  Correct attention_mask, or"),
    ({"attention_mask": [1, 1, 0.5]}, "attention_mask has a number that is not whole."),
    ({"attention_mask": [1, 1, 10**30]}, "attention_mask has a number beyond 2^53."),
    ({"attention_mask": [1, 1]}, "attention_mask has 2 numbers, but input_ids has 3."),
    ({"position_ids": [2, 3, 4]}, "position_ids has 2 at token 1, at the start of a document; expected 0, 1, 2, ..."),
    ({"position_ids": [0, 1, 3]}, f"has 3 at token 3, after 1; expected 0, 1, 2, ... within each document.  Correct "
                                  f"position_ids, {ROW_OF_ITS_OWN}"),
    ({"position_ids": [0, 1, 0], "attention_mask": [0, 1, 1]}, "position_ids has 1 at token 2, at the start of a"),
    ({"seq_start_id": [1, 2]}, "seq_start_id gives 1, 2, 3 for 3 tokens; expected 0 and then the first token"),
    ({"seq_start_id": [0, 3]}, "seq_start_id gives 0, 3, 3 for 3 tokens;"),
    ({"cu_seqlens": [0, 4]}, "cu_seqlens gives 0, 4 for 3 tokens; expected 0 and then the end of each"),
    ({"cu_seqlens": [0, 1, 1, 3]}, "cu_seqlens gives 0, 1, 1, 3 for 3 tokens;"),
    ({"cu_seqlens": [-1, -1]}, "cu_seqlens gives -1 for 3 tokens;"),
    ({"cu_seqlens": [0, 2, 3], "cu_seqlens_padded": [0, 1, 3]}, "token 2 by cu_seqlens_padded, but not by cu_seqlens."),
    ({"seq_lengths": [2, 0, 1]}, "seq_lengths gives 0, 2, 2, 3 for 3 tokens; expected lengths from 1"),
    ({"seq_lengths": [2, 1], "position_ids": [0, 1, 2]}, "begins at token 3 by seq_lengths, but not by posit"),
    ({"seq_lengths": [3], "attention_mask": [1, 1, 2]}, "begins at token 3 by attention_mask, but not by"),
    ({"segment_ids": [0, 1, 0]}, "segment_ids has 0 at token 3 again, after another number"),
    ({"seq_idx": [-2, 1, 1]}, "seq_idx has -2; expected numbers from -1."),
    ({"seq_idx": "0 0 1"}, "seq_idx must be a list of numbers; got a string."),
    ({"token_type_ids": [0, 1, 1]}, "token_type_ids has other numbers than 0, which mark images or a second text."),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "complaint"), UNCLEAN, ids=range(len(UNCLEAN)))
def test_rows_that_are_not_cleanly_packed(keys: dict[str, object], complaint: str) -> None:
    with pytest.raises(DataError) as error:
        read_row({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0], **keys})
    assert complaint in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
    "keys",
    [
        {"attention_mask": [1, 1, 0]},
        {"cu_seqlens": [0, 2]},
        {"segment_ids": [1, 1, 0]},
        {"seq_idx": [1, 1, -1]},
        {"seq_lengths": [2]},
    ],
)
def test_padding_is_not_supervised(keys: dict[str, object]) -> None:
    with pytest.raises(DataError) as error:
        read_row({"input_ids": [5, 6, 7], "labels": [-100, 6, 7], **keys})
    assert str(error.value) == (
        f"token 3 is padding by {next(iter(keys))}, but it is supervised.  Padding needs the weight 0 or the label "
        "-100.  Correct the mask or the labels."
    )


def test_zero_positions_that_are_supervised_are_documents() -> None:
    """Such tokens are not padding, although none of them has a loss."""
    row = {"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 0, 0]}
    [padded, supervised] = [read_row({**row, "loss_mask": [0, 1, 0, last]}) for last in (0, 1)]
    assert isinstance(padded, Tokenized) and (padded.starts, padded.num_padding) == ((0,), 2)
    assert isinstance(supervised, Tokenized) and (supervised.starts, supervised.num_padding) == ((0, 2, 3), 0)


# Every fault, and its message

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
    ({"tokens": [1, 2], "loss_mask": [0, 1], "cu_seqlens": []}, "must be a list of numbers; got an empty list."),
    ({"tokens": [1, 2, 3], "loss_mask": [1, 0, 1], "seq_lengths": [2, 1]}, "no token after the first token of a doc"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "complaint"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_bad_rows(row: object, complaint: str) -> None:
    with pytest.raises(DataError) as error:
        read_row(row)
    assert complaint in str(error.value) and len(str(error.value)) < 300
