"""Stores: what goes in comes out, and what was changed on disk is not used."""

import json
from pathlib import Path

import numpy as np
import pytest

from sft.data.cache.encoder import EncodedRows, to_palette
from sft.data.cache.row_report import LINE, Reject, count_rows
from sft.data.cache.store import Store, open_store, publish, write_store
from sft.errors import DataError


def block(row: int, weights: list[float], *rejects: Reject) -> EncodedRows:
    """One whole row of tokens 0, 1, ..."""
    palette, mask = to_palette(np.array(weights, dtype=np.float32))
    size, labels = len(weights), sum(weight > 0 for weight in weights[1:])
    lines = np.array([(row, 1, 1, size, labels, size, size, labels)], dtype=LINE)
    return EncodedRows(np.arange(size, dtype=np.int32), mask, palette, lines, rejects)


FIRST = block(1, [0, 0, 1, 1])
SECOND = block(4, [0, 0.25, 1], Reject(2, "no messages."), Reject(3, "“not” JSON"))


def stored(folder: Path) -> Store:
    write_store(folder / "work" / "store", [FIRST, SECOND], np.array([0, 0.25, 1], dtype=np.float32))
    publish(folder / "work" / "store", folder / "store")
    store = open_store(folder / "store", verify=True)
    assert store is not None
    return store


def test_a_palette_in_numbers() -> None:
    palette, mask = to_palette(np.array([0, 0, 1, 0.5, 0.5], dtype=np.float32))
    assert palette.tolist() == [0, 0.5, 1] and palette.dtype == np.float32
    assert mask.tolist() == [0, 0, 2, 1, 1] and mask.dtype == np.uint8
    palette, mask = to_palette(np.array([0.5], dtype=np.float32))
    assert palette.tolist() == [0, 0.5] and mask.tolist() == [1]
    palette, mask = to_palette(np.empty(0, dtype=np.float32))
    assert palette.tolist() == [0] and mask.tolist() == []


def test_255_weights_and_no_more() -> None:
    weights = np.arange(1, 256, dtype=np.float32)
    palette, mask = to_palette(weights)
    assert palette.tolist() == list(range(256)) and mask.tolist() == list(range(1, 256))
    with pytest.raises(DataError, match="more than 255 distinct weights above 0, among them 1, 2 and 3; .* Round them"):
        to_palette(np.append(weights, np.float32(0.5) + 255))


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    store = stored(tmp_path)
    assert store.tokens.tolist() == [0, 1, 2, 3, 0, 1, 2] and store.tokens.dtype == np.int32
    assert store.mask.tolist() == [0, 0, 2, 2, 0, 1, 2] and store.mask.dtype == np.uint8
    assert store.weights[store.mask].tolist() == [0, 0, 1, 1, 0, 0.25, 1]
    assert store.rows["row"].tolist() == [1, 4] and store.rows["supervised"].tolist() == [2, 2]
    rejects = (tmp_path / "store" / "rejects.jsonl").read_text(encoding="utf-8")
    assert rejects == '{"row": 2, "reason": "no messages."}\n{"row": 3, "reason": "“not” JSON"}\n'
    assert not store.tokens.flags.writeable


def test_all_files_reach_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr("sft.data.cache.store.flush", lambda path: flushed.append(path.name))
    stored(tmp_path)
    assert sorted(flushed) == sorted(path.name for path in (tmp_path / "store").iterdir())


def test_the_digest_follows_tokens_and_weights_and_not_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size of the blocks in which arrays are read."""
    digest = stored(tmp_path / "a").digest
    monkeypatch.setattr("sft.data.cache.store._HASH_BYTES", 8)
    assert stored(tmp_path / "b").digest == digest
    for name, weights in (("c", [0, 0.25, 1.5]), ("d", [0, 0.25, 0.5, 1])):
        palette = np.array(weights, dtype=np.float32)
        other = FIRST._replace(weights=palette[[0, 2]]), SECOND._replace(weights=palette[[0, 1, 2]])
        write_store(tmp_path / name, other, palette)
        store = open_store(tmp_path / name)
        assert store is not None and store.digest != digest


@pytest.mark.parametrize("name", ["tokens.npy", "mask.npy", "rows.npy", "rejects.jsonl", "ledger.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty", "remove"])
def test_a_damaged_store_is_not_used(tmp_path: Path, name: str, damage: str) -> None:
    """A flipped bit in an array takes reading it all to find; everything else is seen at once."""
    stored(tmp_path)
    path = tmp_path / "store" / name
    whole = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        flipped = whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]
        path.write_bytes({"flip": flipped, "cut": whole[:-2], "grow": whole + b" 1", "empty": b""}[damage])
    assert open_store(tmp_path / "store", verify=True) is None
    seen = (name, damage) == ("ledger.json", "flip") or damage != "flip"
    assert (open_store(tmp_path / "store") is None) == seen


def test_a_ledger_of_other_content_is_not_used(tmp_path: Path) -> None:
    stored(tmp_path)
    path = tmp_path / "store" / "ledger.json"
    content = json.loads(path.read_text())
    for text in ("[]", "{}", "null", json.dumps({**content, "weights": [0, 1, 2]}), json.dumps({"digest": 1})):
        path.write_text(text)
        assert open_store(tmp_path / "store") is None, text


def test_publishing_onto_a_store(tmp_path: Path) -> None:
    """A whole one stays; a damaged one is moved away."""
    stored(tmp_path)
    palette = np.array([0, 1], dtype=np.float32)
    write_store(tmp_path / "work" / "other", [FIRST], palette)
    publish(tmp_path / "work" / "other", tmp_path / "store")
    store = open_store(tmp_path / "store")
    assert store is not None and len(store.rows) == 2
    (tmp_path / "store" / "mask.npy").write_bytes(b"")
    publish(tmp_path / "work" / "other", tmp_path / "store")
    store = open_store(tmp_path / "store")
    assert store is not None and len(store.rows) == 1


def test_the_ledger_of_a_table() -> None:
    """The table of `count_rows`, with two rows skipped for one reason and a third for another."""
    lines = np.array(
        [
            (1, 1, 1, 10, 4, 10, 10, 4),
            (2, 1, 1, 10, 4, 10, 25, 9),
            (3, 0, 0, 0, 0, 0, 99, 9),
            (4, 1, 2, 10, 4, 10, 17, 9),
            (4, 2, 2, 10, 5, 7, 17, 9),
        ],
        dtype=LINE,
    )
    rejects = [
        Reject(5, 'message 3 has role "assitant"; expected one of system, user.'),
        Reject(6, "no messages."),
        Reject(7, 'message 11 has role "bot \\"x\\""; expected one of system, user.'),
    ]
    ledger = count_rows(lines, rejects)
    assert (ledger.rows, ledger.rows_whole, ledger.rows_cut, ledger.rows_windowed) == (7, 1, 1, 1)
    assert (ledger.rows_dropped, ledger.rows_skipped, ledger.samples, ledger.samples_windowed) == (1, 3, 4, 2)
    assert (ledger.tokens_kept, ledger.tokens_repeated, ledger.tokens_cut, ledger.tokens_dropped) == (40, 3, 15, 99)
    assert (ledger.supervised_kept, ledger.supervised_cut, ledger.supervised_dropped) == (17, 5, 9)
    assert (ledger.cut, ledger.windowed, ledger.dropped, ledger.skipped) == ((2,), (4,), (3,), (5, 6, 7))
    assert ledger.reasons == (
        ('message N has role "..."; expected one of system, user.', 2),
        ("no messages.", 1),
    )
    assert str(ledger) == (
        "4 samples, 40 tokens (42.5% supervised), longest 10"
        "; cut 1 samples: row 2; made 2 windows of 1 rows, which repeat 3 tokens: row 4"
        "; left out 15 tokens of them (5 supervised)"
        "; dropped 1 samples of 99 tokens (9 supervised): row 3"
        "; skipped 3 bad rows: rows 5, 6, 7 "
        '(2 x message N has role "..."; expected one of system, user.; 1 x no messages.)'
    )
