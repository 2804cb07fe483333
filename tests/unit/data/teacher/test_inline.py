"""The key `teacher` of a row: every supervised token of a sample has the distribution that the row gives to it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sft.data.cache.corpus import Corpus
from sft.data.chat.tokenizer import ByteTokenizer
from sft.errors import DataError
from tests.unit.corpora import ROW, corpus_of, write

K2 = {"k": 2}
# Four tokens.  The distribution of token t has the ids 10 t and 10 t + 1; the last token also has 10 t + 2.
IDS = [1, 2, 3, 4]
TEACHER: dict[str, Any] = {
    "ids": [None, [20, 21], [31, 30], [42, 40, 41]],
    "logprobs": [None, [-0.5, -1.0], [-2.0, -1.0], [-3.0, -1.0, -2.0]],
}
TAUGHT = {"input_ids": IDS, "loss_mask": [0, 0, 1, 1], "teacher": TEACHER}


def rows_of(corpus: Corpus) -> list[Any]:
    """For each sample its tokens, and the ids of the distribution of each supervised token."""
    samples = map(corpus.sample, range(len(corpus)))
    return [(s.tokens.tolist(), None if s.teacher is None else s.teacher["ids"].tolist()) for s in samples]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_the_most_likely_tokens_of_supervised_tokens(form: str, tmp_path: Path) -> None:
    if form == "jsonl":
        path = write(tmp_path / "a.jsonl", TAUGHT)
    else:
        path = str(tmp_path / "a.parquet")
        pq.write_table(pa.Table.from_pylist([TAUGHT]), path)
    (sample,) = [corpus_of(path, teacher=K2).sample(0)]
    assert sample.teacher is not None and sample.labels.tolist() == [2, 3]
    assert sample.teacher["ids"].tolist() == [[30, 31], [40, 41]]
    np.testing.assert_array_equal(sample.teacher["logprobs"], np.array([[-1, -2], [-1, -2]], np.float32))
    assert corpus_of(path).sample(0).teacher is None


def test_fewer_tokens_than_k_and_the_label(tmp_path: Path) -> None:
    teacher = {**TEACHER, "label_logprobs": [None, None, -4.0, -5.0]}
    path = write(tmp_path / "a.jsonl", {**TAUGHT, "teacher": teacher})
    sample = corpus_of(path, teacher={"k": 3, "label": True}).sample(0)
    assert sample.teacher is not None
    assert sample.teacher["ids"].tolist() == [[30, 31, 3, -1], [40, 41, 42, 4]]
    assert sample.teacher["logprobs"].tolist() == [[-1, -2, -4, 0], [-1, -2, -3, -5]]


def test_windows_and_documents_of_packed_rows_keep_tokens_and_distributions_together(tmp_path: Path) -> None:
    """An id of a distribution is 1,000 times the token, which occurs once."""
    tokens = list(range(1, 61))
    mask = [0] * 20 + [1] * 20 + [0] * 5 + [1] * 15
    teacher = {"ids": [[1000 * token] for token in tokens], "logprobs": [[-1.0]] * 60}
    row = {"input_ids": tokens, "loss_mask": mask, "teacher": teacher}
    packed = {**row, "seq_lengths": [30, 30]}
    sizes = {"seq_length": 24, "doc_multiple": 4, "over_long": "windows"}
    whole = corpus_of(write(tmp_path / "a.jsonl", row, packed), teacher={"k": 1}, seq_length=64, doc_multiple=4)
    cut = corpus_of(write(tmp_path / "b.jsonl", row, packed), teacher={"k": 1}, **sizes)
    assert [len(whole), len(cut)] == [3, 5]
    for corpus in (whole, cut):
        for sample in map(corpus.sample, range(len(corpus))):
            assert sample.teacher is not None
            assert sample.teacher["ids"][:, 0].tolist() == [1000 * t for t in sample.tokens[sample.labels].tolist()]


@pytest.mark.parametrize("text", ["héy", "日本"])
def test_offsets_of_a_text(text: str, tmp_path: Path) -> None:
    """With the byte tokenizer, each byte is a token; bytes of one character have its offsets."""
    offsets = [[i, i + 1] for i, character in enumerate(text) for _ in character.encode()]
    teacher = {"ids": [[k] for k in range(len(offsets))], "logprobs": [[-1.0]] * len(offsets), "offsets": offsets}
    path = write(tmp_path / "a.jsonl", {"text": text, "teacher": teacher})
    ((_, ids),) = rows_of(corpus_of(path, teacher={"k": 1}))
    assert ids == [[k] for k in range(1, len(offsets))]


def test_16_bits_round_down_and_no_sum_grows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 4, (200, 64))
    logprobs = scores - np.log(np.exp(scores).sum(1, keepdims=True))  # 64 tokens are the whole vocabulary: the sum is 1
    teacher = {"ids": [list(range(64))] * 200, "logprobs": logprobs.tolist()}
    path = write(tmp_path / "a.jsonl", {"input_ids": [5] * 200, "loss_mask": [1] * 200, "teacher": teacher})
    narrow, exact = (
        corpus_of(path, teacher={"k": 64, "logprob_dtype": dtype}).sample(0).teacher for dtype in ("fp16", "fp32")
    )
    assert narrow is not None and exact is not None
    assert narrow["logprobs"].dtype == np.float16 and narrow.nbytes == 199 * 64 * 6
    np.testing.assert_allclose(exact["logprobs"], -np.sort(-logprobs, axis=1)[1:], rtol=1e-6)
    wide = narrow["logprobs"].astype(np.float64)
    assert (np.exp(wide).sum(1) <= 1).all() and (wide <= exact["logprobs"]).all()
    np.testing.assert_allclose(wide, exact["logprobs"], rtol=1e-3)  # as the page of the key promises
    assert (np.exp(logprobs.astype(np.float16).astype(np.float64)).sum(1) > 1).mean() > 0.3  # the usual rounding


def test_rows_without_a_teacher(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TAUGHT, ROW)
    with pytest.raises(DataError, match="a.jsonl:2: the row has no key teacher, which data.teacher.k asks for"):
        corpus_of(path, teacher=K2)
    assert [ids is None for _, ids in rows_of(corpus_of(path, teacher={**K2, "missing": "labels"}))] == [False, True]


def test_unread_distributions_are_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TAUGHT)
    assert "keys not used: teacher (1 row)" in corpus_of(path).summary()
    assert "not used" not in corpus_of(path, teacher=K2).summary()


def with_values(**values: Any) -> dict[str, Any]:
    return {**TAUGHT, "teacher": {**TEACHER, **values}}


OTHER = hashlib.sha256(b"other").hexdigest()
BAD = {
    "another tokenizer": (with_values(tokenizer=OTHER), "ids are of another tokenizer .digest d9298a10d1b0. than that"),
    "other tokens": (with_values(digest="00ff"), "teacher.digest is 00ff, but the tokens of this row have "),
    "too few": (with_values(ids=[[1]], logprobs=[[-1.0]]), "ids has 1 entries, but the row has 4 tokens"),
    "positions": (with_values(positions=[0, 1, 3, 2]), "positions are 1, 3, 2 for 4 tokens; expected rising"),
    "beyond": (with_values(positions=[0, 1, 2, 4]), "positions are 1, 2, 4 for 4 tokens"),
    "offsets": (with_values(offsets=[[0, 1]] * 4), "offsets needs a row with the key text"),
    "lengths": (with_values(logprobs=[None, [-1.0], [-1.0], [-1.0]]), "have lists of different lengths"),
    "above 0": (with_values(logprobs=[None, [0.5, -1], [-1, -2], [-1, -2, -3]]), "token 2 has the log-prob.*0.5; exp"),
    "sum above 1": (with_values(logprobs=[None, [-1, -1], [-0.1, -0.2], [-1, -2, -3]]), "token 3 have the sum 1.72357"),
    "not finite": (with_values(logprobs=[None, [-1, -1], [-1, None], [-1, -2, -3]]), "logprobs has null; it holds"),
    "twice": (with_values(ids=[None, [1, 1], [1, 2], [1, 2, 3]]), "for token 2 has the id 1 twice"),
    "negative": (with_values(ids=[None, [1, -2], [1, 2], [1, 2, 3]]), "for token 2 has the id -2; ids are"),
    "lacking": (with_values(ids=[None, [1, 2], None, [1, 2, 3]], logprobs=[None, [-1, -2], None, [-1, -2, -3]]),
                "token 3 is supervised, but has no distribution of the teacher, as have 1 of the 2"),
    "key": (with_values(logits=[]), "teacher has the key logits; known keys are ids, logprobs"),
    "chat": ({**ROW, "teacher": TEACHER}, "a chat has the key teacher.*Give its distributions with data.teacher.files"),
    "no object": ({**TAUGHT, "teacher": [1]}, "teacher must be an object with ids and logprobs; got a list"),
    "padding": ({**TAUGHT, "attention_mask": [0, 1, 1, 1]}, "the row has padding beside the key teacher"),
    "no label": (TAUGHT, "gives no label_logprobs for its positions, but data.teacher.label is true"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refusals_name_the_row(name: str, tmp_path: Path) -> None:
    row, message = BAD[name]
    teacher = {"k": 3, "label": name == "no label"}
    with pytest.raises(DataError, match=message) as caught:
        corpus_of(write(tmp_path / "a.jsonl", TAUGHT if name != "no label" else row, row), teacher=teacher)
    assert str(caught.value).startswith(f"{tmp_path}/a.jsonl:{1 if name == 'no label' else 2}: ")
    assert "\n" not in str(caught.value)


def test_a_text_that_the_teacher_split_otherwise(tmp_path: Path) -> None:
    teacher = {"ids": [[1]], "logprobs": [[-1.0]], "offsets": [[1, 3]]}
    with pytest.raises(
        DataError, match=r"offsets has \[1, 3\] as entry 1, but no further token.*there covers \[1, 2\]"
    ):
        corpus_of(write(tmp_path / "a.jsonl", {"text": "hey", "teacher": teacher}), teacher={"k": 1})


def test_rounding_above_1_is_mended(tmp_path: Path) -> None:
    row = with_values(logprobs=[None, [np.log(0.5), np.log(0.50004)], [4e-6, -20.0], [-1, -2, -3]])
    supervised = {**row, "loss_mask": [0, 1, 1, 1]}
    teacher = corpus_of(write(tmp_path / "a.jsonl", supervised), teacher=K2).sample(0).teacher
    assert teacher is not None
    assert (np.exp(teacher["logprobs"].astype(np.float64)).sum(1) < 1 + 1e-7).all() and teacher["logprobs"].max() <= 0


def test_the_digest_is_that_of_the_page(tmp_path: Path) -> None:
    """Other programs compute it as docs/how-to/score.md says."""
    digest = hashlib.sha256(np.array(IDS, dtype="<i4").tobytes()).hexdigest()[:32]
    row = with_values(digest=digest, tokenizer=ByteTokenizer().digest)
    assert rows_of(corpus_of(write(tmp_path / "a.jsonl", row), teacher=K2)) == [(IDS, [[30, 31], [40, 41]])]
    assert json.dumps(row)
