"""Files become samples: every fault is named, every lost row is counted, and a cache is either right or rebuilt."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.data.cache.corpus import Corpus
from sft.data.cache.encoder import EncodedRows, check_palette, to_palette
from sft.data.cache.folders import store_folder
from sft.data.cache.row_report import LINE, Reject, RowCounts, RowReport, count_rows
from sft.data.cache.store import Store, open_store, publish, write_store
from sft.data.chat.tokenizer import load_tokenizer
from sft.errors import DataError
from tests.unit.corpora import LONG, ROW, corpus_of, write
from tests.unit.fixtures.folder import config, make_folder, template


def texts(corpus: Corpus) -> list[str]:
    byte = load_tokenizer(config())
    return [byte.decode(corpus.sample(i).tokens) for i in range(len(corpus))]


def test_samples(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.jsonl", ROW, "", LONG), write(tmp_path / "b.jsonl", ROW)
    corpus = corpus_of(first, second)
    assert len(corpus) == 3
    assert corpus.lengths.tolist() == [39, 116, 39] and corpus.lengths.dtype == np.int64
    assert corpus.num_supervised.tolist() == [5, 9, 5] and corpus.num_supervised.dtype == np.int64
    sample = corpus.sample(2)
    assert sample.sample_id == 2 and sample.num_supervised == 5
    assert bytes(sample.tokens[sample.weights > 0][:4].tolist()) == b"Fine"
    assert [corpus.name(i) for i in range(3)] == [f"{first}:1", f"{first}:3", f"{second}:1"]
    assert corpus.digest != corpus_of(second, first).digest
    assert corpus.summary().splitlines()[1].endswith("b.jsonl: 1 samples, 39 tokens (12.8% supervised), longest 39")


def test_over_long_is_an_error_by_default(tmp_path: Path) -> None:
    """P97: a sample that is twice as long as the limit."""
    path = write(tmp_path / "a.jsonl", ROW, LONG)
    with pytest.raises(DataError) as error:
        corpus_of(path, seq_length=64, doc_multiple=16)
    assert str(error.value).startswith(f"{path}:2: 116 tokens (128 when padded to a multiple of 16) do not fit data.se")
    assert len(corpus_of(path, seq_length=128, doc_multiple=16)) == 2


def ledger(**counts: Any) -> RowReport:
    """A row report in which every row is a chat."""
    nothing = {name: () if "tuple" in str(kind) else 0 for name, kind in RowReport.__annotations__.items()}
    return RowReport(**nothing | {"chats": counts.get("rows", 0)} | counts)


def test_over_long_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROW, LONG, ROW)
    corpus = corpus_of(path, seq_length=64, over_long="drop")
    assert corpus.lengths.tolist() == [39, 39] and corpus.name(1).endswith("a.jsonl:3")
    assert corpus.row_reports == {
        Path(path): ledger(
            rows=3, rows_whole=2, samples=2, tokens_kept=78, supervised_kept=10, longest=39,
            rows_dropped=1, tokens_dropped=116, supervised_dropped=9, dropped=(2,),
        )
    }  # fmt: skip
    assert "; dropped 1 samples of 116 tokens (9 supervised): row 2" in corpus.summary()


def test_over_long_cut_after_a_turn(tmp_path: Path) -> None:
    hopeless = {"messages": [{"role": "user", "content": "x" * 99}, *ROW["messages"][1:], *ROW["messages"]]}
    path = write(tmp_path / "a.jsonl", ROW, LONG, hopeless)
    corpus = corpus_of(path, seq_length=64, over_long="cut_turns")
    begun = "<|im_start|>user\nHello, friend!<|im_end|>\n<|im_start|>assistant\nFine<|im_end|>"
    assert texts(corpus) == [begun + "\n", begun]
    assert corpus.row_reports == {
        Path(path): ledger(
            rows=3, rows_whole=1, samples=2, tokens_kept=39 + 38, supervised_kept=10, longest=39,
            rows_cut=1, tokens_cut=78, supervised_cut=4, cut=(2,),
            rows_dropped=1, tokens_dropped=163, supervised_dropped=10, dropped=(3,),
        )
    }  # fmt: skip


def test_over_long_in_windows(tmp_path: Path) -> None:
    """The limit is 64.  The prompt of 33 tokens and its answer of 5 leave 26, too few for the next turn: 4 tokens and
    the 74 between.  The window of this turn has 60 tokens for the text before it: half for the end of the prompt, half
    for the end of the message."""
    path = write(tmp_path / "a.jsonl", ROW, LONG)
    corpus = corpus_of(path, seq_length=64, over_long="windows")
    assert corpus.lengths.tolist() == [39, 38, 64] and corpus.num_supervised.tolist() == [5, 5, 4]
    assert [corpus.name(i) for i in (0, 2)] == [f"{path}:1", f"{path}:2 window 2 of 2"]
    assert texts(corpus)[2].endswith("x" * 17 + "<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>")
    assert corpus.row_reports == {
        Path(path): ledger(
            rows=2, rows_whole=1, samples=3, tokens_kept=39 + 38 + 64, supervised_kept=14, longest=64,
            rows_windowed=1, samples_windowed=2, tokens_repeated=30, tokens_cut=116 - 38 - 34, windowed=(2,),
        )
    }  # fmt: skip


def test_a_file_of_which_no_sample_is_left(tmp_path: Path) -> None:
    both = corpus_of(
        write(tmp_path / "a.jsonl", LONG), write(tmp_path / "b.jsonl", ROW), seq_length=64, over_long="drop"
    )
    assert both.name(0).endswith("b.jsonl:1") and len(both) == 1


def test_cache_is_used(tmp_path: Path) -> None:
    path, log = write(tmp_path / "a.jsonl", ROW), []
    first = corpus_of(path, log=log)
    moved = Path(path).rename(tmp_path / "moved.jsonl")
    second = corpus_of(str(moved), log=log)
    assert "tokenised in" in log[0]
    assert log[1].endswith("moved.jsonl: 1 samples, 39 tokens (12.8% supervised), longest 39 (cached)")
    assert first.digest == second.digest and second.name(0).endswith("moved.jsonl:1")
    [store] = (tmp_path / "cache").glob("?" * 32)
    counts = json.loads((store / "ledger.json").read_text())["rows"]
    assert json.loads(json.dumps(first.report())) == {"digest": first.digest, "files": {path: counts}}


def test_cache_follows_all_that_samples_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P100: another content, kind, tokenizer, template, release of a library or setting makes a new store."""
    path, folder = tmp_path / "a.jsonl", make_folder(tmp_path / "tokenizer", template("chatml"))
    write(path, ROW)
    llama = tmp_path / "llama.jinja"
    llama.write_text(template("llama3"))

    def name(file: Path = path, **overrides: Any) -> str:
        data = config(**overrides)
        return store_folder(tmp_path, file, data, load_tokenizer(data)).name

    settings: list[dict[str, Any]] = [
        {"seq_length": 2048}, {"doc_multiple": 16}, {"over_long": "drop"}, {"on_bad_row": "skip"}, {"supervise": "all"},
        {"tokenizer": str(folder)}, {"tokenizer": str(folder), "chat_template": str(llama)},
    ]  # fmt: skip
    names = [name(), *(name(**overrides) for overrides in settings)]
    assert names[0] == name(num_workers=7)
    names.append(name(Path(shutil.copy(path, tmp_path / "a.json"))))
    (tmp_path / "saved").mkdir()
    names.append(name(Path(shutil.copy(path, tmp_path / "saved")).parent))
    for file in (path, tmp_path / "saved" / "a.jsonl"):
        file.write_text(file.read_text().replace("Fine", "Good"))
    names += [name(), name(tmp_path / "saved")]
    template_file = folder / "chat_template.jinja"
    template_file.write_text(template_file.read_text().replace("# Tools", "# TOOLS"))
    names.append(name(tokenizer=str(folder)))
    monkeypatch.setattr("sft.data.cache.folders.version", lambda library: "99.0")
    names += [name(tokenizer=str(folder)), name(on_bad_row="skip")]
    unskipped = name()
    monkeypatch.setattr("sft.data.cache.folders.REFUSALS", "texts are usable")
    names.append(name(on_bad_row="skip"))
    assert name() == unskipped, "a store that skipped no row holds the same samples when further rows become usable"
    assert len(set(names)) == len(names) == 16


def block(row: int, weights: list[float], *rejects: Reject) -> EncodedRows:
    """A block with one whole row of tokens 0, 1, ..."""
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
    palette, mask = to_palette(np.arange(1, 256, dtype=np.float32))
    assert palette.tolist() == list(range(256)) and mask.tolist() == list(range(1, 256))
    wanted = "a.jsonl: more than 255 different weights above 0, such as 1, 2 and 3; .* Round them"
    with pytest.raises(DataError, match=wanted):
        check_palette(np.arange(257, dtype=np.float32), Path("a.jsonl"))


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
    """The digest does not depend on the size of the blocks in which arrays are read."""
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
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove"])
def test_a_damaged_store_is_not_used(tmp_path: Path, name: str, damage: str) -> None:
    """A flipped bit in an array is found only by reading the whole array; all other damage is found at once."""
    stored(tmp_path)
    path = tmp_path / "store" / name
    whole = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        flipped = whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]
        path.write_bytes({"flip": flipped, "cut": whole[:-2], "grow": whole + b" 1"}[damage])
    assert open_store(tmp_path / "store", verify=True) is None
    seen = (name, damage) == ("ledger.json", "flip") or damage != "flip"
    assert (open_store(tmp_path / "store") is None) == seen


def test_a_ledger_of_other_content_is_not_used(tmp_path: Path) -> None:
    stored(tmp_path)
    path = tmp_path / "store" / "ledger.json"
    content = json.loads(path.read_text())
    for text in ("[]", "{}", json.dumps({**content, "weights": [0, 1, 2]}), json.dumps({"digest": 1})):
        path.write_text(text)
        assert open_store(tmp_path / "store") is None, text


def test_publishing_onto_a_store(tmp_path: Path) -> None:
    """A whole store stays; a damaged one is moved away."""
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
    """The table of `count_rows`, with two rows skipped for one reason and a third row for another reason."""
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
    ledger = count_rows(lines, RowCounts(rejects=rejects))
    assert (ledger.rows, ledger.rows_whole, ledger.rows_cut, ledger.rows_windowed) == (7, 1, 1, 1)
    assert (ledger.rows_dropped, ledger.rows_skipped, ledger.samples, ledger.samples_windowed) == (1, 3, 4, 2)
    assert ledger.supervised_kept == 17
    assert str(ledger) == (
        "4 samples, 40 tokens (42.5% supervised), longest 10"
        "; cut 1 samples: row 2; made 2 windows of 1 rows, and windows repeat 3 tokens: row 4"
        "; left out 15 tokens of these rows (5 supervised)"
        "; dropped 1 samples of 99 tokens (9 supervised): row 3"
        "; skipped 3 bad rows: rows 5, 6, 7 "
        '(2 x message N has role "..."; expected one of system, user.; 1 x no messages.)'
    )
