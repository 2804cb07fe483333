"""A file that is replaced is the old or the new one, whatever happens in between."""

import os
from pathlib import Path
from typing import Any

import pytest

from sft import atomic_files
from sft.atomic_files import flush, replace_text
from tests.unit.fixtures.held import held


def test_the_content_is_replaced_and_nothing_is_left(tmp_path: Path) -> None:
    for content in ("old\n", "", "ü → 中\n"):
        replace_text(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content.encode()
        assert os.listdir(tmp_path) == ["file"]


def test_a_reader_of_the_old_file_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with (tmp_path / "file").open() as reader:
        replace_text(tmp_path / "file", "new")
        assert reader.read() == "old"


def test_what_a_killed_process_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file.tmp").write_text("half of something that is longer")
    replace_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
def test_what_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "file").write_text("old")
    if fails == "write":
        monkeypatch.setattr(Path, "write_text", full)
    else:
        monkeypatch.setattr(atomic_files.os, fails, full)
    with pytest.raises(OSError, match="No space left"):
        replace_text(tmp_path / "file", "new", sync=True)
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("sync,expected", [
    (True, ["fsync file.tmp: new", "replace file.tmp -> file", "fsync folder"]),
    (False, ["replace file.tmp -> file"]),
])  # fmt: skip
def test_the_disk_has_the_content_before_the_name_and_then_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool, expected: list[str]
) -> None:
    done = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        done.append("fsync folder" if path == tmp_path else f"fsync {path.name}: {path.read_text()}")
        fsync(handle)

    def note_replace(before: Path, after: Path) -> None:
        done.append(f"replace {before.name} -> {after.name}")
        replace(before, after)

    monkeypatch.setattr(atomic_files.os, "fsync", note_fsync)
    monkeypatch.setattr(atomic_files.os, "replace", note_replace)
    replace_text(tmp_path / "file", "new", sync=sync)
    assert done == expected


def test_flush_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    had = held()
    for path in (tmp_path / "file", tmp_path):
        flush(path)
    assert held() <= had
    with pytest.raises(FileNotFoundError):
        flush(tmp_path / "nowhere")
