"""All ways in which a file of a checkpoint can differ from the written file, and the check that finds each of them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft.checkpoint import manifest
from sft.checkpoint.manifest import Manifest
from sft.errors import CheckpointError
from sft.files.file_digest import Entry, HashingFile
from tests.unit.fixtures.disk import watch_disk

FILES = {"__0_0.distcp": b"a" * 700, "__1_0.distcp": b"b" * 900, ".metadata": b"abc", "common.pt": b"", "x.pt": b"xyzw"}
ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete checkpoint, as far as its files matter here."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    files = {name: manifest.entry_of(tmp_path / name) for name in FILES}
    manifest.write(tmp_path, Manifest(files=files, facts={"step": 100, "layout": {"tp": 2}}))
    return tmp_path


def read(folder: Path) -> Manifest:
    found = manifest.read(folder)
    assert found is not None
    return found


def damage(folder: Path, verify: manifest.Verify = "full", share: tuple[int, int] = (0, 1)) -> list[str]:
    return manifest.damage(folder, read(folder), verify=verify, share=share)


def test_what_is_written_is_read_back(folder: Path) -> None:
    found = read(folder)
    assert found.files.keys() == FILES.keys() and found.num_bytes == 1607
    assert found.files[".metadata"] == Entry(num_bytes=3, sha256=ABC)
    assert found.files["common.pt"] == Entry(num_bytes=0, sha256=EMPTY)
    assert found.facts == {"step": 100, "layout": {"tp": 2}}
    assert manifest.names_in(folder) == [".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt", "x.pt"]
    for verify in ("off", "size", "full"):
        assert damage(folder, verify) == []  # type: ignore[arg-type]
    (folder / "manifest.json").unlink()
    assert manifest.read(folder) is None


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def replace_by_link(path: Path) -> None:
    away = path.with_name("away")
    path.rename(away)
    path.symlink_to(away)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


# damage, message, whether the size of the file shows it
DAMAGES: dict[str, tuple[Callable[[Path], Any], str, bool]] = {
    "missing": (Path.unlink, "{} is missing", True),
    "cut by a byte": (lambda path: os.truncate(path, 899), "{} has 899 bytes; the save wrote 900", True),
    "one bit": (flip, "{} differs from the file that was saved: its SHA-256 is another", False),
    "a link to the same": (replace_by_link, "{} is not a plain file", True),
    "a folder": (replace_by_folder, "{} is not a plain file", True),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_every_damage_is_named(folder: Path, name: str) -> None:
    do, said, shows_in_size = DAMAGES[name]
    do(folder / "__1_0.distcp")
    line = said.format(folder / "__1_0.distcp")
    assert damage(folder, "full") == [line]
    assert damage(folder, "size") == ([line] if shows_in_size else [])
    assert damage(folder, "off") == []


@pytest.mark.parametrize("module, call", [(manifest, "entry_of"), (os, "lstat")])
def test_a_file_that_cannot_be_read_just_now_is_no_damage(
    folder: Path, module: Any, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that does not answer for a while must not make a run put good checkpoints aside."""
    really = getattr(module, call)

    def fail(path: str | Path) -> Any:
        if Path(path).name == "x.pt":
            raise OSError(5, "Input/output error", str(path))
        return really(path)

    with monkeypatch.context() as patch:
        patch.setattr(module, call, fail)
        with pytest.raises(OSError, match="x.pt"):
            damage(folder)


@pytest.mark.parametrize("num_shares", [2, 3, 5])
def test_shares_together_find_what_one_finds_and_read_each_file_once(
    folder: Path, num_shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("__0_0.distcp", "x.pt"):
        flip(folder / name)
    os.truncate(folder / "__1_0.distcp", 5)
    alone, entry_of = set(damage(folder)), manifest.entry_of
    were_read: list[list[str]] = []
    monkeypatch.setattr(manifest, "entry_of", lambda path: were_read[-1].append(path.name) or entry_of(path))
    found = set()
    for index in range(num_shares):
        were_read.append([])
        found |= set(damage(folder, share=(index, num_shares)))
    assert found == alone and len(found) == 3
    assert sorted(sum(were_read, [])) == [".metadata", "__0_0.distcp", "common.pt", "x.pt"]
    if num_shares == 3:  # even shares: no rank has none while another one has several
        assert all(were_read)


def test_a_rank_verifies_the_files_that_it_wrote(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later, the rank loads the files from the page cache.  With a hundred ranks, file 10 follows 9."""
    entries = {f"__{rank}_0.distcp": Entry(num_bytes=rank % 7, sha256=ABC) for rank in range(100)}
    content = Manifest(files={**entries, "common.pt": Entry(num_bytes=9, sha256=ABC)}, facts={})
    were_read: list[str] = []
    monkeypatch.setattr(manifest, "_size_problem", lambda path, entry: None)
    monkeypatch.setattr(manifest, "entry_of", lambda path: were_read.append(path.name))
    for share, names in ((0, {"common.pt", "__0_0.distcp"}), (10, {"__10_0.distcp"}), (99, {"__99_0.distcp"})):
        were_read.clear()
        manifest.damage(folder, content, verify="full", share=(share, 100))
        assert set(were_read) == names and len(were_read) == len(names)


def test_sizes_are_looked_at_by_the_first_share_alone(folder: Path) -> None:
    (folder / "common.pt").unlink()
    assert [len(damage(folder, "size", (index, 4))) for index in range(4)] == [1, 0, 0, 0]


def written_with(folder: Path, name: str) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content["files"][name] = {"bytes": 0, "sha256": EMPTY}
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["..", ".", "", "/etc/passwd", "a/b", "a\\b", "a\0b"])
def test_a_name_that_does_not_lie_in_the_folder_is_refused(folder: Path, name: str) -> None:
    written_with(folder, name)
    with pytest.raises(CheckpointError) as error:
        manifest.read(folder)
    assert str(error.value) == f"{folder}/manifest.json names {name!r}, which is not a file name in this folder."


@pytest.mark.parametrize("name", ["a" * 300, "\ud800"])
def test_a_name_that_no_file_can_have_ends_in_words(folder: Path, name: str) -> None:
    written_with(folder, name)
    try:
        assert len(damage(folder)) == 1
    except CheckpointError:
        pass


ONE = '{"format": "sft checkpoint 1", "files": {"a": %s}}'
DAMAGED = [
    b"", b"{", b"[]", b"\xff\xfe\x00", b"\0" * 200, b'{"format": "sft checkpoint 1"}', b'{"files": {}}', b"[" * 100_000,
    *[(ONE % entry).encode() for entry in (
        "7", '{"bytes": 1}', f'{{"sha256": "{EMPTY}"}}', f'{{"bytes": "x", "sha256": "{EMPTY}"}}',
        f'{{"bytes": null, "sha256": "{EMPTY}"}}', f'{{"bytes": NaN, "sha256": "{EMPTY}"}}',
        f'{{"bytes": 1e999, "sha256": "{EMPTY}"}}',
    )],
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: repr(content[:60]))
def test_a_damaged_manifest_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="manifest.json is damaged"):
        manifest.read(tmp_path)


def test_every_cut_of_a_manifest_is_told(folder: Path) -> None:
    content = (folder / "manifest.json").read_bytes()
    for length in range(0, len(content) - 1, 3):  # the last byte is a line break
        (folder / "manifest.json").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="manifest.json is damaged"):
            manifest.read(folder)


def test_a_manifest_that_cannot_be_opened_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(folder / "manifest.json"))

    monkeypatch.setattr(manifest, "read_json", fail)
    with pytest.raises(PermissionError):
        manifest.read(folder)


def test_another_format_is_refused(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("sft checkpoint 1", "sft checkpoint 2"))
    with pytest.raises(
        CheckpointError, match="manifest.json does not have the format sft checkpoint 1; another version"
    ):
        manifest.read(folder)


def test_the_disk_has_a_manifest_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watch_disk(monkeypatch)
    manifest.write(tmp_path, Manifest(files={}, facts={}))
    assert calls == ["fsync manifest.json.tmp", "rename manifest.json.tmp -> manifest.json", f"fsync {tmp_path.name}"]


def test_a_hashing_file_is_on_the_disk_when_it_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watch_disk(monkeypatch)
    file = HashingFile(tmp_path / "file")
    assert [file.write(b"a"), file.write(b"bc")] == [1, 2]
    assert file.finish() == Entry(num_bytes=3, sha256=ABC) == manifest.entry_of(tmp_path / "file")
    assert calls == ["fsync file"]


def test_a_large_block_may_change_after_it_is_written(tmp_path: Path) -> None:
    """A thread hashes a block of more than 1 MiB; meanwhile the caller fills the block with the next part of a
    tensor."""
    file, block = HashingFile(tmp_path / "file"), bytearray(b"a" * (8 << 20))
    for letter in (b"b", b"c"):
        file.write(block)
        block[:] = letter * len(block)
    file.write(b"d")
    assert file.finish() == manifest.entry_of(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"a" * len(block) + b"b" * len(block) + b"d"


class Stream:
    """A stream whose writes take two bytes at a time, and three bytes in total."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, data: bytes) -> int:
        if len(self.content) >= 3:
            raise OSError(28, "No space left on device")
        self.content += bytes(data[:2])
        return len(data[:2])


def test_a_short_write_is_continued_and_an_error_raised_when_it_is_asked_for(tmp_path: Path) -> None:
    """The error is not raised inside torch.save, which would replace it by its own error."""
    file, stream = HashingFile(tmp_path / "file"), Stream()
    file.close()
    file._stream = stream  # type: ignore[assignment]
    file.write(b"abc")
    assert stream.content == b"abc"
    file.check()
    file.write(b"de")
    for ask in (file.check, file.finish):
        with pytest.raises(OSError, match="No space left"):
            ask()
