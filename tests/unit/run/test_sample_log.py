"""The sample log: its chain of digests, and what a start reads from the log of the previous start."""

import json
from pathlib import Path
from typing import Any

import pytest

from sft.run import sample_log
from sft.run.sample_log import SampleLog, link

# The sha256sum of b'["",0,0,[4,17,23]]', then of b'["<first>",0,1,[5]]', then of b'["<second>",1,0,[]]'.
CHAIN = [
    "5baa1cdd5f89351a3aea8a5c382a6bcb2a6f426296c873c2ab7ac99cb0cdad76",
    "b35d5ec543ff19b7aa9c3fc2f40fa775c7d006ce9f39a2fbc7a99905dca87a4a",
    "5703f1007a1c585ced6d809f628ee1a0c39a0f7b9d8f2e3b53c6df2b77353039",
]
BATCHES = [(0, 0, [23, 4, 17]), (0, 1, [5]), (1, 0, [])]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three steps, written by one start."""
    ledger = SampleLog(tmp_path / "seen.jsonl", 0, "")
    for step, (batch, chain) in enumerate(zip(BATCHES, CHAIN), start=1):
        ledger.write(step, *batch, chain)
    ledger.close()
    return tmp_path / "seen.jsonl"


def test_the_chain_written_out() -> None:
    chain = ""
    for batch, expected in zip(BATCHES, CHAIN):
        chain = link(chain, *batch)
        assert chain == expected
    assert link("", 0, 0, [1, 2, 3]) == link("", 0, 0, (3, 1, 2))


@pytest.mark.parametrize("other", [("x", 0, 0, [1, 2]), ("", 1, 0, [1, 2]), ("", 0, 1, [1, 2]), ("", 0, 0, [12]),
                                   ("", 0, 0, [1, 2, 2]), ("", 0, 0, [])])  # fmt: skip
def test_every_value_enters(other: tuple[str, int, int, list[int]]) -> None:
    assert link(*other) != link("", 0, 0, [1, 2])


def test_a_line_a_step(path: Path) -> None:
    assert path.read_text().splitlines()[0] == (
        f'{{"step": 1, "epoch": 0, "batch": 0, "samples": [4, 17, 23], "chain": "{CHAIN[0]}"}}'
    )
    assert [row["step"] for row in rows(path)] == [1, 2, 3]


def test_going_on_adds_lines(path: Path) -> None:
    before = path.read_text()
    ledger = SampleLog(path, 3, CHAIN[2])
    ledger.write(4, 1, 1, [9], "next")
    assert path.read_text().startswith(before) and [row["step"] for row in rows(path)] == [1, 2, 3, 4]
    ledger.close()


def test_lines_of_later_steps_are_dropped(path: Path) -> None:
    SampleLog(path, 1, CHAIN[0]).close()
    assert [row["step"] for row in rows(path)] == [1] and "gap" not in path.read_text()
    SampleLog(path, 0, "").close()
    assert path.read_text() == ""


@pytest.mark.parametrize("torn", [b'{"step": 4, "epoch": 1, "ba', b"7", b"null", b'{"step": 4}', b"\0\0\0\0",
                                  b'{"step": 4, "chain": "\xff\xfe', b"[" * 100_000, b"x" * 100])  # fmt: skip
@pytest.mark.parametrize("is_last", [True, False])
def test_a_torn_line_is_dropped_with_all_lines_after_it(path: Path, torn: bytes, is_last: bool) -> None:
    before = path.read_bytes()
    path.write_bytes(before + torn + (b"" if is_last else b"\n" + before))
    SampleLog(path, 3, CHAIN[2]).close()
    assert path.read_bytes() == before


def test_a_line_that_lacks_its_end_is_not_written_into(path: Path) -> None:
    path.write_text(path.read_text().rstrip("\n"))
    ledger = SampleLog(path, 3, CHAIN[2])
    ledger.write(4, 1, 1, [9], "next")
    ledger.close()
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4] and "gap" in rows(path)[2]


def test_from_a_damaged_line_on_nothing_is_kept_and_the_gap_is_told(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0" * len(lines[1]) + lines[2])
    SampleLog(path, 3, CHAIN[2]).close()
    first, gap = rows(path)
    assert first["chain"] == CHAIN[0] and gap["step"] == 3 and "gap" in gap and gap["chain"] == CHAIN[2]


def test_a_gap_is_told_once_and_what_follows_leads_on(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))  # the last line was lost
    for _ in range(2):
        SampleLog(path, 3, CHAIN[2]).close()
    assert [row["step"] for row in rows(path)] == [1, 2, 3]
    gap = {"step": 3, "gap": "lines before this step are missing", "chain": CHAIN[2]}
    assert rows(path)[2] == gap


def test_another_folder_s_checkpoint_is_a_gap(tmp_path: Path) -> None:
    SampleLog(tmp_path / "seen.jsonl", 100, "chain of another run").close()
    (row,) = rows(tmp_path / "seen.jsonl")
    assert row["step"] == 100 and "gap" in row and row["chain"] == "chain of another run"


def test_the_disk_has_it_when_a_checkpoint_leads_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    ledger = SampleLog(path, 3, CHAIN[2])
    monkeypatch.setattr(sample_log.os, "fsync", synced.append)
    ledger.sync()
    assert len(synced) == 1
    ledger.close()
