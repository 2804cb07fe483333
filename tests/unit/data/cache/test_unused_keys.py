"""Keys that nothing reads, and rows that are dropped because of a label, are counted and reported."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.cli import main
from sft.data.cache import unused_keys, workers
from sft.data.cache.row_report import LINE, RowCounts, RowReport, count_rows
from sft.data.cache.unused_keys import KeyCounter, describe_unused
from sft.errors import DataError
from tests.builders import RECIPE
from tests.unit.corpora import ROW, corpus_of, write

ROWS: list[dict[str, Any]] = [
    {**ROW, "id": 1, "source": "x", "url": None},
    {**ROW, "id": 2, "source": "y", "label": True},
    {**ROW, "id": 3, "label": False, "note": "unwanted rows do not count"},
    {"text": "a text", "id": 4, "documents": []},
    {"tokens": [1, 2], "loss_mask": [0, 1], "id": 5, "attention_mask": [1, 1]},
    {**ROW, "id": 6, "label": False},
]
TOLD = (
    "4 samples, 86 tokens (18.6% supervised), longest 39; dropped 2 rows by label: rows 3, 6; keys not used: "
    "id (4 rows), source (2 rows), documents (1 row)"
)


def test_the_report_names_keys_and_unwanted_rows(tmp_path: Path) -> None:
    path, log = write(tmp_path / "a.jsonl", *ROWS), []
    for on_bad_row in ("error", "skip"):
        corpus = corpus_of(path, log=log, on_bad_row=on_bad_row)
        report = corpus.row_reports[Path(path)]
        assert report.unused == (("id", 4), ("source", 2), ("documents", 1)) and report.unused_others == 0
        assert (report.rows, report.rows_whole, report.rows_unwanted, report.unwanted) == (6, 4, 2, (3, 6))
        assert (report.rows_skipped, report.chats) == (0, 2)
        assert str(report) == TOLD and f"{path}: {TOLD.partition(';')[0]} (tokenised in" in log[-1]
        assert [corpus.name(i).rsplit(":")[-1] for i in range(4)] == ["1", "2", "4", "5"]
    [ledger] = [json.loads(path.read_text()) for path in tmp_path.glob("cache/*/ledger.json")][:1]
    assert ledger["rows"]["unused"] == [["id", 4], ["source", 2], ["documents", 1]]
    assert RowReport.from_json(json.loads(json.dumps(asdict(report)))) == report


def test_skipped_rows_do_not_count(tmp_path: Path) -> None:
    bad = {"messages": ROW["messages"][:1], "id": 7, "other": 1}
    path = write(tmp_path / "a.jsonl", bad, *ROWS, *[ROW] * 8)
    report = corpus_of(path, on_bad_row="skip").row_reports[Path(path)]
    assert report.rows_skipped == 1 and report.unused == (("id", 4), ("source", 2), ("documents", 1))


def test_unwanted_rows_may_be_most_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROW, *[{**ROW, "label": False}] * 9)
    report = corpus_of(path, on_bad_row="skip").row_reports[Path(path)]
    assert (report.rows, report.rows_unwanted, report.samples) == (10, 9, 1)
    with pytest.raises(DataError, match="no samples remain from"):
        corpus_of(write(tmp_path / "b.jsonl", {**ROW, "label": False}))


def test_parts_and_processes_do_not_change_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unused_keys, "_NAMES_COUNTED", 30)
    monkeypatch.setattr(unused_keys, "NAMES_LISTED", 7)
    rows = [{**ROW, f"key {i % 50}": 1, f"z {i % 3}": 1} for i in range(60)]
    packed = {"tokens": [1, 2, 3, 4, 0], "loss_mask": [0, 1, 0, 1, 0], "attention_mask": [1, 1, 2, 2, 0]}
    path = write(tmp_path / "a.jsonl", *rows, *ROWS, *[packed] * 9)
    one = corpus_of(path, num_workers=1).row_reports
    report = one[Path(path)]
    assert report.unused[:3] == (("z 0", 20), ("z 1", 20), ("z 2", 20))
    assert (report.rows_packed, report.documents, report.rows_padded, report.tokens_padding) == (9, 18, 9, 9)
    monkeypatch.setattr(workers, "ROWS_PER_PART", 7)
    two = corpus_of(path, num_workers=2, cache=tmp_path / "other").row_reports
    assert two == one
    [first], [second] = tmp_path.glob("cache/*/ledger.json"), tmp_path.glob("other/*/ledger.json")
    assert first.read_bytes() == second.read_bytes()


def test_many_names_are_summed() -> None:
    counter = KeyCounter()
    for i in range(10_050):
        counter.add([("id", 1), (f"user {i:05}", 2)])
    assert len(counter.listed) == 100
    assert counter.listed[:3] == (("id", 10_050), ("user 00000", 2), ("user 00001", 2))
    assert counter.others == (10_050 - 99) * 2
    report = count_rows(np.array([(1, 1, 1, 10, 4, 10, 10, 4)], dtype=LINE), RowCounts(unused=counter))
    assert str(report).endswith("user 00098 (2 rows), and other keys 19,902 times")
    assert len(json.dumps(asdict(report))) < 4000


def test_names_that_a_terminal_would_interpret_are_escaped(tmp_path: Path) -> None:
    assert describe_unused([("a\n\x1b[31m", 1), ("né", 1000)], 0) == (
        'keys not used: "a\\n\\u001b[31m" (1 row), né (1,000 rows)'
    )
    path = write(tmp_path / "a.jsonl", {**ROW, "k" * 5000: 1})
    assert corpus_of(path).row_reports[Path(path)].unused == (("k" * 57 + "...", 1),)


def test_inspect_and_prepare_tell_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    Path("r.yaml").write_text(RECIPE)
    train, held_out = write(Path("a.jsonl"), *ROWS), write(Path("b.jsonl"), ROW, {**ROW, "topic": "t"})
    sets = [f"data.train={train}", f"data.eval={held_out}", "data.seq_length=512"]
    assert main(["data", "prepare", "r.yaml", *sets]) == 0
    out = capsys.readouterr().out
    assert all(f"a.jsonl: {part}" in out for part in TOLD.split("; ", 1))
    assert main(["data", "inspect", "r.yaml", *sets, "--json"]) == 0
    survey = json.loads(capsys.readouterr().out)
    assert [found["total"] for found in survey["findings"] if found["what"] == "too_long"] == [4]
    counts = survey["total"]
    assert counts["unused"] == [["id", 4], ["source", 2], ["documents", 1]]
    assert (counts["rows_unwanted"], counts["unused_others"], counts["rows"]) == (2, 0, 6)
    assert main(["data", "inspect", "r.yaml", *sets]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "a: label false drops 2 rows" in lines
    assert "a: keys not used: id (4 rows), source (2 rows), documents (1 row)" in lines
    assert "b (eval): keys not used: topic (1 row)" in lines
