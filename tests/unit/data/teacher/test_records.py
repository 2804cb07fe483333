"""Files of `sft score`: their records reach the samples with the same tokens, or the row is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sft.data.cache.corpus import Corpus
from sft.data.cache.store import open_store
from sft.data.cache.vocabulary import check_ids
from sft.data.chat.tokenizer import ByteTokenizer
from sft.data.teacher.inline import token_digest
from sft.data.teacher.records import ScoredSample, schema, to_batch
from sft.errors import DataError
from tests.builders import parsed
from tests.unit.corpora import LONG, ROW, corpus_of, write

K2 = {"k": 2}
TURNS = {"messages": [*LONG["messages"], {"role": "user", "content": "?"}, {"role": "assistant", "content": "No"}]}


def score(path: Path, corpus: Corpus, *, k: int = 3, tokenizer: str | None = None, groups: int = 2) -> str:
    """Writes the file that `sft score` would write for a corpus.  The ids of label n of sample s are s, 100 + n, 9."""
    digest = tokenizer or ByteTokenizer().ids_digest
    kind = schema({"k": k, "tokenizer": digest})
    samples = []
    for number in range(len(corpus)):
        sample = corpus.sample(number)
        count = len(sample.labels)
        ids = np.stack([np.full(count, number), 100 + np.arange(count), np.full(count, 9)], axis=1)[:, :k]
        samples.append(
            ScoredSample(
                *(str(corpus.location(number)[0]), *corpus.location(number)[1:]),
                tokens=None if sample.tree else sample.tokens,
                weights=None if sample.tree else sample.weights,
                digest=token_digest(sample.tokens, sample.tree),
                positions=sample.labels.astype(np.int32),
                ids=ids.astype(np.int32),
                logprobs=np.tile(np.array([-1, -1.5, -2], np.float32)[:k], (count, 1)),
                label_logprobs=np.full(count, -4, np.float32),
            )
        )
    with pq.ParquetWriter(path, kind) as writer:
        for first in range(0, len(samples), groups):
            writer.write_batch(to_batch(samples[first : first + groups], digest, kind))
    return str(path)


def check(corpus: Corpus) -> None:
    """The samples of the corpus are those that were scored, in another order of the rows."""
    for number in range(len(corpus)):
        sample = corpus.sample(number)
        assert sample.teacher is not None
        assert (sample.teacher["ids"][:, 0] == len(corpus) - 1 - number).all()
        assert sample.teacher["ids"][:, 1].tolist() == [100 + n for n in range(len(sample.labels))]
        assert (sample.teacher["logprobs"] == [-1, -1.5]).all()


@pytest.mark.parametrize("settings", [{}, {"turns": "each"}, {"over_long": "windows", "seq_length": 64}], ids=str)
def test_records_reach_their_samples_in_any_order_of_rows(settings: dict[str, Any], tmp_path: Path) -> None:
    rows = [TURNS, ROW, LONG]
    before = corpus_of(write(tmp_path / "a.jsonl", *rows), **settings)
    if "over_long" in settings:  # the samples of a row keep their order
        rows = [TURNS]
        before = corpus_of(write(tmp_path / "a.jsonl", *rows), **settings)
    assert before.has_trees == ("turns" in settings)
    file = score(tmp_path / "scored.parquet", before)
    after = corpus_of(write(tmp_path / "b.jsonl", *rows[::-1]), teacher={**K2, "files": [file]}, **settings)
    assert len(after) == len(before) > 1
    if "over_long" in settings:
        ids = [after.sample(number).teacher["ids"][0, 0] for number in range(len(after))]
        assert ids == list(range(len(after)))
    else:
        check(after)


def test_a_scored_file_is_data_by_itself(tmp_path: Path) -> None:
    before = corpus_of(write(tmp_path / "a.jsonl", ROW, LONG))
    after = corpus_of(score(tmp_path / "scored.parquet", before), teacher={"k": 3, "label": True})
    assert "2 samples" in after.summary() and "not used" not in after.summary()
    assert after.digest != before.digest
    for number in range(2):
        ours, theirs = before.sample(number), after.sample(number)
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.weights, theirs.weights)
        assert theirs.teacher is not None
        labels = ours.tokens[ours.labels]
        np.testing.assert_array_equal(theirs.teacher["ids"][:, 3], np.where(labels == 9, -1, labels))
    tree = corpus_of(write(tmp_path / "a.jsonl", TURNS), turns="each")
    with pytest.raises(DataError, match="scored_tree.parquet row 1: unknown format: a row must have "):
        corpus_of(score(tmp_path / "scored_tree.parquet", tree), teacher=K2)


def test_a_store_with_distributions_is_used_again_and_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROW, LONG)
    file, log = score(tmp_path / "scored.parquet", corpus_of(path)), list[str]()
    teacher = {**K2, "files": [file]}
    first = corpus_of(path, teacher=teacher, log=log)
    again = corpus_of(path, teacher=teacher, log=log)
    assert "tokenised in" in log[0] and "(cached)" in log[1] and again.digest == first.digest
    (folder,) = [found.parent for found in (tmp_path / "cache").glob("*/teacher.npy")]
    assert (folder / "teacher.npy").stat().st_size < 300 + 14 * 2 * 8  # 14 labels, 8 bytes for each of 2 tokens
    content = bytearray((folder / "teacher.npy").read_bytes())
    content[-1] ^= 1
    (folder / "teacher.npy").write_bytes(content)
    assert open_store(folder) is not None and open_store(folder, verify=True) is None
    score(tmp_path / "scored.parquet", corpus_of(path), k=2, groups=1)  # another file: another store
    assert corpus_of(path, teacher=teacher, log=log).digest == first.digest and "tokenised in" in log[-1]


def refused(tmp_path: Path, rows: list[Any], file: str, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        corpus_of(write(tmp_path / "b.jsonl", *rows), teacher={**K2, "files": [file]}, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_refusals(tmp_path: Path) -> None:
    before = corpus_of(write(tmp_path / "a.jsonl", ROW, LONG))
    file = score(tmp_path / "scored.parquet", before)
    missing = refused(tmp_path, [ROW, LONG, TURNS], file)
    assert missing.startswith(f"{tmp_path}/b.jsonl:3: a sample of this row has no distributions: {file} (scores of ")
    assert "a.jsonl) has no record of row 3.  Name the file with its scores, score this data" in missing
    changed = {"messages": [*ROW["messages"][:1], {"role": "assistant", "content": "fine"}]}
    other = refused(tmp_path, [ROW, changed], file)
    assert f"b.jsonl:2: a sample of this row has no distributions: {file} (scores of " in other
    assert "a.jsonl) has row 2 with other tokens (digest " in other
    assert "token 3 is supervised, but has no distribution" not in other
    more = refused(tmp_path, [ROW, LONG], file, supervise="all")
    assert "b.jsonl:1: token 2 is supervised, but has no distribution of the teacher, as have 33 of the 38" in more
    tokenizer = refused(tmp_path, [ROW], score(tmp_path / "c.parquet", before, tokenizer="0f" * 32))
    assert "c.parquet: the teacher's ids are of another tokenizer (digest 0f0f0f0f0f0f) than that of" in tokenizer
    with pytest.raises(
        DataError, match="scored.parquet was scored with --top-k 3, fewer tokens than data.teacher.k = 4"
    ):
        corpus_of(write(tmp_path / "b.jsonl", ROW), teacher={"k": 4, "files": [file]})
    pq.write_table(pq.read_table(file).replace_schema_metadata(None), tmp_path / "plain.parquet")
    plain = refused(tmp_path, [ROW], str(tmp_path / "plain.parquet"))
    assert "plain.parquet is no file of sft score 1 (its metadata say None)" in plain
    content = Path(file).read_bytes()
    (tmp_path / "short.parquet").write_bytes(content[: len(content) // 2])
    damaged = refused(tmp_path, [ROW], str(tmp_path / "short.parquet"))
    assert f"data.teacher.files: {tmp_path}/short.parquet cannot be read as parquet: " in damaged
    assert "..  Score" not in damaged  # pyarrow ends its reason with a full stop


def test_rows_without_a_record_may_learn_from_labels(tmp_path: Path) -> None:
    file = score(tmp_path / "scored.parquet", corpus_of(write(tmp_path / "a.jsonl", ROW)))
    path, log = write(tmp_path / "b.jsonl", LONG, ROW), list[str]()
    corpus = corpus_of(path, teacher={**K2, "files": [file], "missing": "labels"}, log=log)
    assert log[-1] == "1 of 2 samples have no teacher: they are learnt from labels only"
    assert corpus.sample(0).teacher is None and corpus.sample(1).teacher is not None


def test_an_id_beyond_the_embedding(tmp_path: Path) -> None:
    teacher = {"ids": [[1], [2], [300]], "logprobs": [[-1.0]] * 3}
    row = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "teacher": teacher}
    corpus = corpus_of(write(tmp_path / "a.jsonl", row), teacher={"k": 1})
    check_ids(parsed("model.vocab_size=301").config, corpus, ByteTokenizer())
    with pytest.raises(DataError, match="data.teacher.k = 302 is more than the 301 tokens of the vocabulary"):
        check_ids(parsed("model.vocab_size=301", "data.teacher.k=302").config, corpus, ByteTokenizer())
    with pytest.raises(
        DataError, match="a.jsonl:1: the teacher's distributions have the id 300, but the embedding has"
    ):
        check_ids(parsed("model.vocab_size=300").config, corpus, ByteTokenizer())


def test_the_documented_columns(tmp_path: Path) -> None:
    table = pq.read_table(score(tmp_path / "scored.parquet", corpus_of(write(tmp_path / "a.jsonl", ROW))))
    ids, numbers = pa.list_(pa.int32()), pa.list_(pa.float32())
    teacher = [("tokenizer", pa.string()), ("digest", pa.string()), ("positions", ids), ("ids", pa.list_(ids))]
    teacher += [("logprobs", pa.list_(numbers)), ("label_logprobs", numbers)]
    columns = [("file", pa.string()), ("row", pa.int64()), ("part", pa.int32()), ("input_ids", ids)]
    assert table.schema == pa.schema([*columns, ("loss_mask", numbers), ("teacher", pa.struct(teacher))])
    assert json.loads(table.schema.metadata[b"sft_score"])["format"] == "sft score 1"
