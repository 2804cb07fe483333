"""A later start reads no raw data, and detects every change."""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sft.data.cache import digests
from sft.data.cache.corpus import find_prepared, map_prepared
from sft.data.cache.digests import content_digest
from sft.data.chat.tokenizer import load_tokenizer
from tests.unit.corpora import ROW, corpus_of, write
from tests.unit.fixtures.folder import config

SIZE = 4_000_000  # bytes of raw data
OTHER_READS = 400_000  # bytes: the store, its row report, and the tokenizer


def bytes_read(action: Callable[[], object]) -> int:
    """The bytes that this process reads from files, counted by the kernel."""

    def count() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    before = count()
    action()
    return count() - before


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes files that a test has just written count as old."""
    now = time.time_ns
    monkeypatch.setattr(digests.time, "time_ns", lambda: now() + 3_000_000_000)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts the bytes that a process reads")
@pytest.mark.usefixtures("later")
def test_a_second_start_reads_no_raw_data(tmp_path: Path) -> None:
    path, data, cache = write(tmp_path / "a.jsonl", " " * SIZE, ROW), config(), tmp_path / "cache"
    tokenizer = load_tokenizer(data)

    def start() -> None:
        prepared = find_prepared([path], data, tokenizer, cache, command="sft data prepare")
        assert len(map_prepared(prepared, data, command="sft data prepare")) == 1

    assert bytes_read(lambda: corpus_of(path)) > SIZE
    assert bytes_read(start) < OTHER_READS
    assert bytes_read(lambda: corpus_of(path)) < OTHER_READS
    for memo in (cache / "digests").iterdir():
        memo.unlink()
    assert bytes_read(start) > SIZE


def in_place(path: Path) -> None:
    path.write_bytes(b"two")


def of_the_same_size_and_time(path: Path) -> None:
    stat = path.stat()
    path.write_bytes(b"eno")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def by_another_file(path: Path) -> None:
    stat, other = path.stat(), path.with_name("other")
    other.write_bytes(b"eno")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.rename(path)


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("change", [in_place, of_the_same_size_and_time, by_another_file])
@pytest.mark.parametrize("folder", [False, True])
def test_a_changed_file_is_noticed(tmp_path: Path, change: Callable[[Path], None], folder: bool) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "a.jsonl"
    path.write_bytes(b"one")
    named = path.parent if folder else path
    before = content_digest(named, tmp_path)
    assert content_digest(named, tmp_path) == before
    time.sleep(0.01)  # longer than a tick of the file system's clock
    change(path)
    content = hashlib.sha256(path.read_bytes()).hexdigest()
    expected = hashlib.sha256(f"a.jsonl {content}".encode()).hexdigest() if folder else content
    assert content_digest(named, tmp_path) == expected != before


def test_a_file_that_was_just_written_is_read_again(tmp_path: Path) -> None:
    """A second write within one tick of the file system's clock would leave the file's time unchanged."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one")
    os.utime(path, ns=(0, 0))  # the time of the inode's last change stays
    content_digest(path, tmp_path)
    assert not (tmp_path / "digests").exists()


@pytest.mark.usefixtures("later")
def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plain = tmp_path / "a.jsonl", hashlib.file_digest
    path.write_bytes(b"one")

    def slow(file: object, name: str) -> object:
        path.write_bytes(b"longer")
        return plain(file, name)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "file_digest", slow)
    content_digest(path, tmp_path)
    assert not (tmp_path / "digests").exists()


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("text", ["", "{", "[]", '{"path": 1}', '{"sha256": "0"}'])
def test_a_damaged_memo_is_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one")
    digest = content_digest(path, tmp_path)
    [memo] = (tmp_path / "digests").iterdir()
    good = memo.read_text()
    memo.write_text(text)
    assert content_digest(path, tmp_path) == digest == hashlib.sha256(b"one").hexdigest()
    assert memo.read_text() == good and len(list(memo.parent.iterdir())) == 1


@pytest.mark.usefixtures("later")
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one")
    (tmp_path / "cache").write_text("a file in its place")
    assert content_digest(path, tmp_path / "cache") == hashlib.sha256(b"one").hexdigest()
