"""Objects of an S3 server: reads, conditional writes and files in parts, also while the server fails."""

import hashlib
from pathlib import Path

import pytest

from sft.errors import ConfigError, StorageError
from sft.files import object_store
from sft.files.file_digest import Entry, entry_of
from sft.files.object_store import DamagedError, ObjectStore, Stored
from tests.object_store import SECRET, Server

URL = "s3://bucket/runs/a"


def file_of(folder: Path, num_bytes: int) -> Path:
    path = folder / "file"
    path.write_bytes(hashlib.sha512(b"x").digest() * (num_bytes // 64) + b"end")
    return path


def test_small_objects(s3: Server) -> None:
    store = ObjectStore(URL + "/")
    assert store.read("x") is None
    store.write("x", b"hello")
    content, etag = store.read("x")
    assert content == b"hello" and etag
    assert store.objects() == [Stored("x", 5)] and s3.content() == {"runs/a/x": b"hello"}
    store.remove(["x", "never-there"])
    assert store.objects() == [] and s3.content() == {}


def test_a_conditional_write_has_one_winner(s3: Server) -> None:
    store = ObjectStore(URL)
    first = store.replace("lock", b"one", None)
    assert first is not None and store.replace("lock", b"two", None) is None
    second = store.replace("lock", b"three", first)
    assert second not in (None, first) and store.replace("lock", b"four", first) is None
    assert store.read("lock") == (b"three", second)


@pytest.mark.parametrize("etag", [None, "known"])
def test_a_conditional_write_whose_answer_is_lost_has_succeeded(s3: Server, etag: str | None) -> None:
    store = ObjectStore(URL)
    known = None if etag is None else store.replace("lock", b"before", None)
    first = s3.number() + 1
    s3.before = lambda number, method, path: "cut" if number == first else None
    try:
        written = store.replace("lock", b"mine", known)
    except StorageError:  # the library does not repeat every write
        written = store.replace("lock", b"mine", known)
    assert written is not None and s3.content() == {"runs/a/lock": b"mine"}


@pytest.mark.parametrize("num_bytes", [0, 1000, 9000])
def test_a_file_goes_and_comes_in_parts(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr(object_store, "_PART_BYTES", 4096)
    path, store = file_of(tmp_path, num_bytes), ObjectStore(URL)
    entry = entry_of(path)
    s3.requests.clear()
    store.upload(path, "d/file", entry.sha256)
    assert store.sha256("d/file") == entry.sha256 and s3.content("runs/a/") == {"d/file": path.read_bytes()}
    s3.requests.clear()
    assert store.download("d/file", tmp_path / "copy", entry) == entry
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()
    assert sum(size for method, _, size in s3.requests if method == "GET") == entry.num_bytes  # each byte once


def test_faults_of_the_server_are_survived(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third request is refused, throttled or cut."""
    monkeypatch.setattr(object_store, "_PART_BYTES", 4096)
    faults = {1: "503", 2: "cut", 0: "429"}
    s3.before = lambda number, method, path: faults[number // 3 % 3] if number % 3 == 0 else None
    path, store = file_of(tmp_path, 20_000), ObjectStore(URL)
    for name in ("a", "b"):
        store.upload(path, name, entry_of(path).sha256)
        store.write(f"{name}.txt", b"text")
    for name in ("a", "b"):
        assert store.download(name, tmp_path / name, entry_of(path)) == entry_of(path)
    assert len(s3.requests) > 10


def test_a_server_that_stays_broken_is_a_storage_error(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_RETRY_S", 0.5)
    s3.before = lambda number, method, path: "503"
    with pytest.raises(StorageError, match=r"^s3://bucket/runs/a/x cannot be read: the store answers 503 S"):
        ObjectStore(URL).read("x")


def test_another_object_is_noticed(s3: Server, tmp_path: Path) -> None:
    path, store = file_of(tmp_path, 640), ObjectStore(URL)
    entry = entry_of(path)
    store.upload(path, "x", entry.sha256)
    store.write("x", b"y" + path.read_bytes()[1:])
    with pytest.raises(DamagedError, match="differs from the file that was written"):
        store.download("x", tmp_path / "1", entry)
    with pytest.raises(DamagedError, match="has 643 bytes, but 7 were written"):
        store.download("x", tmp_path / "2", Entry(num_bytes=7, sha256=entry.sha256))
    with pytest.raises(StorageError, match="there is no such object"):
        store.download("z", tmp_path / "3", entry)


def test_an_object_that_changes_during_a_download_is_noticed(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_PART_BYTES", 1024)
    monkeypatch.setattr(object_store, "_PARTS_AT_ONCE", 1)
    path, store = file_of(tmp_path, 6400), ObjectStore(URL)
    store.upload(path, "x", "")
    first = s3.number() + 3  # after the head and a part

    def change(number: int, method: str, _: str) -> None:
        if number == first:
            store.write("x", b"other")

    s3.before = change
    with pytest.raises(StorageError, match="was changed while it was read"):
        store.download("x", tmp_path / "copy")


@pytest.mark.parametrize(
    "url, reason",
    [
        (
            "gs://bucket/x",
            "names a store gs://, which is not tested, so it is refused; use s3://BUCKET/PATH or a local copy",
        ),
        ("s3://Bucket/x", "must be s3://BUCKET or s3://BUCKET/PATH"),
        ("s3:///x", "must be s3://BUCKET or s3://BUCKET/PATH"),
        ("s3://bucket/x?a=b", "must be s3://BUCKET or s3://BUCKET/PATH"),
    ],
)
def test_urls(url: str, reason: str) -> None:
    assert object_store.refusal(url) == reason
    with pytest.raises(ConfigError) as error:
        ObjectStore(url)
    assert str(error.value) == f"{url} {reason}."


def test_a_missing_bucket(s3: Server) -> None:
    store = ObjectStore("s3://missing/a")
    for action in (lambda: store.read("x"), lambda: store.write("x", b""), lambda: store.objects()):
        with pytest.raises(ConfigError, match="the bucket does not exist"):
            action()


@pytest.mark.parametrize(
    "status, code, reason",
    [
        ("403 Forbidden", "AccessDenied", "these credentials have no permission for it"),
        ("403 Forbidden", "RequestTimeTooSkewed", "the clock of this machine differs too much"),
        ("403 Forbidden", "InvalidAccessKeyId", "the store does not know the access key"),
        ("403 Forbidden", "SignatureDoesNotMatch", "the secret key does not belong to the access key"),
        ("400 Bad Request", "AuthorizationHeaderMalformed", "the bucket is in another region"),
        ("301 Moved Permanently", "PermanentRedirect", "the bucket is in another region"),
    ],
)
def test_refusals_name_the_reason_and_no_secret(s3: Server, status: str, code: str, reason: str) -> None:
    s3.before = lambda number, method, path: f"{status}|{code}"
    store = ObjectStore(URL)
    for action in (lambda: store.read("x"), lambda: store.write("x", b"1"), lambda: store.replace("x", b"1", None)):
        with pytest.raises(ConfigError, match=reason) as error:
            action()
        assert SECRET not in str(error.value) and "\n" not in str(error.value)


def test_no_credentials(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", s3.environment["AWS_ENDPOINT_URL"])  # in place of the cloud's
    s3.before = lambda number, method, path: "403 Forbidden" if path.startswith("/latest") else None
    with pytest.raises(ConfigError, match="there are no credentials: set AWS_ACCESS_KEY_ID"):
        ObjectStore(URL).read("x")
