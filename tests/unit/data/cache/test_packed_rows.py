"""Rows of tokens that other trainers packed or padded: their samples, names, counts and packs."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.data.cache.corpus import Corpus
from sft.data.packing.pack import Collator
from sft.errors import DataError
from tests.unit.corpora import ROW, corpus_of, write
from tests.unit.surveys import printed, survey

# Documents of 4, 3 and 5 tokens, and their masks
FIRST, SECOND, THIRD = [1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11, 12]
MASKS = [0, 0, 1, 1], [0, 1, 1], [0, 1, 0, 1, 1]
APART = [{"input_ids": tokens, "loss_mask": mask} for tokens, mask in zip((FIRST, SECOND, THIRD), MASKS, strict=True)]
TOGETHER = {"input_ids": [*FIRST, *SECOND, *THIRD], "loss_mask": [0, 0, 1, 1, 1, 1, 1, 0, 1, 0, 1, 1]}
PADDED = {"input_ids": [*TOGETHER["input_ids"], 0, 0], "loss_mask": [*TOGETHER["loss_mask"], 0, 0]}
POSITIONS = [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4]
NUMBERS = [1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3]
FORMS: dict[str, dict[str, Any]] = {
    "position_ids": {**TOGETHER, "position_ids": POSITIONS},
    "attention_mask": {**TOGETHER, "attention_mask": NUMBERS},
    "seq_start_id": {**TOGETHER, "seq_start_id": [0, 4, 7]},
    "cu_seqlens": {**TOGETHER, "cu_seqlens": [0, 4, 7, 12]},
    "seq_lengths": {**TOGETHER, "seq_lengths": [4, 3, 5]},
    "seq_idx": {**TOGETHER, "seq_idx": [number - 1 for number in NUMBERS]},
    "padded attention_mask": {**PADDED, "attention_mask": [*NUMBERS, 0, 0]},
    "padded position_ids": {**PADDED, "position_ids": [*POSITIONS, 0, 0]},
    "padded cu_seqlens": {**PADDED, "cu_seqlens": [0, 4, 7, 12, -1]},
}


def samples(corpus: Corpus) -> list[tuple[list[int], list[float]]]:
    return [(sample.tokens.tolist(), sample.weights.tolist()) for sample in map(corpus.sample, range(len(corpus)))]


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_row_gives_the_samples_of_its_documents_apart(form: str, tmp_path: Path) -> None:
    """Then losses are also equal, because batches consist of samples only."""
    apart = corpus_of(write(tmp_path / "apart.jsonl", *APART))
    path = write(tmp_path / "packed.jsonl", FORMS[form], APART[1])
    packed = corpus_of(path)
    assert samples(packed) == [*samples(apart), samples(apart)[1]]
    assert packed.num_supervised.tolist() == [2, 2, 3, 2]
    assert [packed.name(i) for i in range(4)] == [*(f"{path}:1 document {k} of 3" for k in (1, 2, 3)), f"{path}:2"]
    report, padding = packed.row_reports[Path(path)], 2 * form.startswith("padded")
    assert (report.rows, report.rows_packed, report.documents, report.samples) == (2, 1, 3, 4)
    assert (report.rows_whole, report.tokens_kept, report.supervised_kept) == (4, 15, 9)
    assert (report.rows_padded, report.tokens_padding) == (padding // 2, padding)
    text = "4 samples, 15 tokens (60.0% supervised), longest 5; cut 1 packed row into 3 documents"
    assert str(report) == text + ("; dropped 2 tokens of padding of 1 row" if padding else "")


def test_no_document_sees_another(tmp_path: Path) -> None:
    """A change of one document of a row does not change samples, labels or positions of the other documents."""
    other = {**FORMS["position_ids"], "input_ids": [*FIRST, 70, 71, 72, *THIRD]}
    [before, after] = [
        corpus_of(write(tmp_path / f"{i}.jsonl", row)) for i, row in enumerate((FORMS["seq_idx"], other))
    ]
    assert [a == b for a, b in zip(samples(before), samples(after), strict=True)] == [True, False, True]
    collator = Collator(doc_multiple=8, pad_id=0)
    packs = [collator.pack(list(map(corpus.sample, range(3)))) for corpus in (before, after)]
    assert packs[0].cu_seqlens.tolist() == packs[1].cu_seqlens.tolist() == [0, 8, 16, 24]
    assert np.flatnonzero(packs[0].loss_weights).tolist() == [1, 2, 8, 9, 16, 18, 19]
    assert (packs[0].labels != packs[1].labels).nonzero()[0].tolist() == [8, 9]


# Two documents of 20 and 4 tokens
LONG = {"input_ids": [*range(20), *FIRST], "loss_mask": [0] * 6 + [1] * 2 + [0] * 6 + [1] * 6 + [0, 0, 1, 1]}
LONG_PACK = {**LONG, "seq_lengths": [20, 4]}


def test_over_long_holds_for_a_document(tmp_path: Path) -> None:
    fits = corpus_of(write(tmp_path / "a.jsonl", LONG_PACK), seq_length=20, doc_multiple=4)
    assert fits.lengths.tolist() == [20, 4]
    with pytest.raises(DataError) as error:
        corpus_of(path := write(tmp_path / "b.jsonl", LONG_PACK), seq_length=16, doc_multiple=8)
    assert str(error.value).startswith(
        f"{path}:1: document 1 of 2: 20 tokens (24 when padded to a multiple of 8) do not"
    )


@pytest.mark.parametrize(
    ("over_long", "lengths", "names", "counts"),
    [
        ("drop", [4], ["document 2 of 2"], {"rows_dropped": 1, "tokens_dropped": 20, "dropped": (1,), "rows_whole": 1}),
        ("cut_turns", [8, 4], ["document 1 of 2", "document 2 of 2"], {"rows_cut": 1, "tokens_cut": 12}),
        (
            "windows",
            [8, 16, 4],
            ["document 1 of 2 window 1 of 2", "document 1 of 2 window 2 of 2", "document 2 of 2"],
            {"rows_windowed": 1, "samples_windowed": 2, "tokens_cut": 1, "tokens_repeated": 5, "windowed": (1,)},
        ),
    ],
)
def test_a_document_that_is_too_long(
    over_long: str, lengths: list[int], names: list[str], counts: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", LONG_PACK)
    corpus = corpus_of(path, seq_length=16, doc_multiple=8, over_long=over_long)
    assert corpus.lengths.tolist() == lengths
    assert [corpus.name(i) for i in range(len(corpus))] == [f"{path}:1 {name}" for name in names]
    report = asdict(corpus.row_reports[Path(path)])
    assert {key: report[key] for key in counts} == counts and (report["rows"], report["documents"]) == (1, 2)


def test_documents_without_a_loss_are_dropped_and_counted(tmp_path: Path) -> None:
    """A document of one token, and a document without an answer.  A long document without an answer does not count as
    too long."""
    row = {"input_ids": [1, *range(30), *FIRST], "loss_mask": [1] + [0] * 30 + [0, 0, 1, 1], "seq_lengths": [1, 30, 4]}
    path = write(tmp_path / "a.jsonl", row)
    corpus = corpus_of(path, seq_length=16, doc_multiple=8)
    assert samples(corpus) == [(FIRST, [0, 0, 1, 1])] and corpus.name(0) == f"{path}:1 document 3 of 3"
    assert corpus.summary().endswith(
        "1 samples, 4 tokens (50.0% supervised), longest 4; cut 1 packed row into 3 documents, of which 2 of 31 tokens "
        "have none supervised and are dropped"
    )


def test_a_row_that_is_not_cleanly_packed_is_a_bad_row(tmp_path: Path) -> None:
    bad = {**TOGETHER, "position_ids": POSITIONS, "seq_lengths": [4, 8]}
    path = write(tmp_path / "a.jsonl", *[FORMS["seq_idx"]] * 9, bad)
    with pytest.raises(DataError) as error:
        corpus_of(path)
    assert str(error.value) == (
        f"{path}:10: a document begins at token 8 by position_ids, but not by seq_lengths.  Correct one of them, or "
        "give each document a row of its own, without padding.  data.on_bad_row=skip leaves out such rows, up to a "
        "tenth of a file."
    )
    skipped = corpus_of(path, on_bad_row="skip").row_reports[Path(path)]
    assert (skipped.rows, skipped.rows_packed, skipped.documents, skipped.skipped) == (10, 9, 27, (10,))


def test_inspect_counts_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(Path("a.jsonl"), FORMS["padded attention_mask"], ROW, LONG_PACK)
    taken = survey(num_previews=2, train=[path], seq_length=64)
    total = taken.total
    assert (total.rows, total.rows_packed, total.documents, total.tokens_padding, total.samples) == (3, 2, 5, 2, 6)
    assert (total.longest, taken.rows_of_tokens, [role.messages for role in taken.roles]) == (39, 2, [1, 1])
    assert max(taken.retention, key=lambda point: point.seq_length).rows == 6
    assert [shown.name for shown in taken.previews[:2]] == ["a.jsonl:1 document 1 of 3", "a.jsonl:1 document 2 of 3"]
    said = "  a: cut 2 packed rows into 5 documents\n  a: dropped 2 tokens of padding of 1 row\n"
    assert said in printed(taken)


def test_a_store_without_packed_rows_is_the_same_as_before(tmp_path: Path) -> None:
    """The digest of the store, which a resumed run checks, equals that of releases that refused packed rows."""
    corpus = corpus_of(write(tmp_path / "a.jsonl", ROW, APART[0], {**APART[1], "attention_mask": [1, 1, 1]}))
    assert corpus.digest == "8db473333bbe0849da629aacc3bf4945cd40b5b78397765201750655cc928910"
