"""A file that is replaced has its old or its new content, whatever interrupts the replacement."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sft.errors import CheckpointError, SftError, StorageError
from sft.files import atomic_files
from sft.files.atomic_files import replace_text, why_not_written
from sft.weights.atomic_folder import new_folder
from tests.unit.fixtures.disk import watch_disk


def test_the_content_is_replaced_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file.tmp").write_text("half of something that is longer, left by a killed process")
    for content in ("old\n", "", "ü → 中\n"):
        replace_text(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content.encode()
        assert os.listdir(tmp_path) == ["file"]


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


@pytest.mark.parametrize("sync", [True, False])
def test_the_disk_has_the_content_before_the_name_and_then_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    calls = watch_disk(monkeypatch)
    replace_text(tmp_path / "file", "new", sync=sync)
    renamed = "rename file.tmp -> file"
    assert calls == (["fsync file.tmp", renamed, f"fsync {tmp_path.name}"] if sync else [renamed])


def test_a_new_folder_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a conversion's writes: files, then the folders that contain them, then the final name."""
    calls = watch_disk(monkeypatch)
    with new_folder(tmp_path / "target", 10) as temporary:
        (temporary / "below").mkdir()
        (temporary / "below" / "file").write_text("x")
        (temporary / "beside").write_text("y")
    name = temporary.name
    assert calls == ["fsync file", "fsync below", "fsync beside", f"fsync {name}", f"rename {name} -> target",
                     f"fsync {tmp_path.name}"]  # fmt: skip


@pytest.mark.parametrize(
    "number, kind, words",
    [
        (errno.ENOSPC, StorageError, "the disk is full (OSError: [Errno 28] No space left on device)"),
        (errno.EIO, StorageError, "the disk reports an I/O error (OSError: [Errno 5] Input/output error)"),
        (errno.EISDIR, CheckpointError, "[Errno 21] Is a directory"),
    ],
)
def test_a_new_folder_that_a_disk_refuses(tmp_path: Path, number: int, kind: type[SftError], words: str) -> None:
    """An export fails on a full disk, leaves nothing, and may succeed at the next try."""
    with pytest.raises(kind) as caught:
        with new_folder(tmp_path / "target", 10) as temporary:
            (temporary / "file").write_text("x")
            raise failed_with(number)
    assert str(caught.value).startswith(f"{tmp_path}/target was not written: {words}.")
    assert type(caught.value) is kind and not [*tmp_path.iterdir()]


def failed_with(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    "number, words",
    [
        (errno.ENOSPC, "the disk is full (OSError: [Errno 28] No space left on device)"),
        (errno.EDQUOT, "the quota on this disk is used up (OSError: [Errno 122] Disk quota exceeded)"),
        (errno.EROFS, "the file system is read-only (OSError: [Errno 30] Read-only file system)"),
        (errno.ENOENT, "the folder no longer exists (FileNotFoundError: [Errno 2] No such file or directory)"),
        (errno.ESTALE, "the folder no longer exists (OSError: [Errno 116] Stale file handle)"),
        (errno.EIO, "the disk reports an I/O error (OSError: [Errno 5] Input/output error)"),
        (
            errno.EACCES,
            "this user has no permission to write to the folder (PermissionError: [Errno 13] Permission " "denied)",
        ),
    ],
)
def test_a_failed_write_is_reported_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    assert why_not_written(tmp_path, failed_with(number)) == words
    # A library reports an error when it closes a file; the error number is in the cause of its exception.
    try:
        try:
            raise failed_with(number)
        finally:
            raise RuntimeError("unexpected pos 704 vs 598\nframe 0")
    except RuntimeError as error:
        assert why_not_written(tmp_path, error) == f"{words.split(' (')[0]} (RuntimeError: unexpected pos 704 vs 598)"


def test_the_file_system_is_asked_where_an_error_has_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = RuntimeError("unexpected pos 704 vs 598")
    assert why_not_written(tmp_path, late) == "RuntimeError: unexpected pos 704 vs 598"  # the disk is in order
    assert os.listdir(tmp_path) == []
    for free in ({"f_bavail": 255}, {"f_favail": 0}):  # less than 1 MiB in blocks of 4 KiB; no room for another file
        blocks = {"f_bavail": 1 << 20, "f_frsize": 4096, "f_files": 9, "f_favail": 9, **free}
        with monkeypatch.context() as patch:
            patch.setattr(atomic_files.os, "statvfs", lambda path: SimpleNamespace(**blocks))
            assert why_not_written(tmp_path, late).startswith("the disk is full (")
    assert why_not_written(tmp_path / "gone", late).startswith("the folder no longer exists (")

    def quota(handle: int) -> None:
        raise failed_with(errno.EDQUOT)

    monkeypatch.setattr(atomic_files.os, "fsync", quota)
    assert why_not_written(tmp_path, late).startswith("the quota on this disk is used up (")
    assert os.listdir(tmp_path) == []
