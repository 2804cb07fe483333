"""Reads and writes objects of an S3 bucket: whole small objects, conditional writes, and files in parts.

obstore sends the requests.  It repeats a request that fails with a server error, throttling or a lost connection, for
at most two minutes.  A conditional write replaces an object only if the object is still the one that was read, which
its ETag shows; fsspec has no such write.  Credentials come from the environment (AWS_ACCESS_KEY_ID, ...), from the
machine's role, or, if boto3 is installed, from the files and profiles that the AWS command line uses.

Only s3:// is accepted: the tests have a server for it, and for no other store.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

from sft.errors import ConfigError, StorageError
from sft.files.file_digest import Entry, entry_of

SCHEME = "s3://"
_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(/[^\s?#]*)?")
_PART_BYTES = 16 << 20  # of an upload or a download; S3 takes at most 10,000 parts, which is 156 GiB
_MOST_PARTS = 10_000
_PARTS_AT_ONCE = 8
_ATTEMPTS = 4  # of one part of a download, whose answer may break off after its first byte
_RETRY_S = 120.0
_DIGEST = "sha256"  # the name of the attribute that holds an object's digest
_INSTALL = "pip install 'sft-megatron[s3]'"
_NO_CREDENTIALS = "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give a role"
# Texts in the answers of a store -> what the user must know.  The first that occurs counts.
_REASONS = (
    ("/latest/api/token", _NO_CREDENTIALS),  # the service of a cloud that gives a machine its role
    ("/latest/meta-data", _NO_CREDENTIALS),
    ("NoSuchBucket", "the bucket does not exist"),
    ("RequestTimeTooSkewed", "the clock of this machine differs too much from that of the store; set it by NTP"),
    ("InvalidAccessKeyId", "the store does not know the access key; check AWS_ACCESS_KEY_ID"),
    ("SignatureDoesNotMatch", "the secret key does not belong to the access key; check AWS_SECRET_ACCESS_KEY"),
    ("ExpiredToken", "the credentials have expired"),
    ("AccessDenied", "these credentials have no permission for it"),
    ("403 Forbidden", "these credentials have no permission for it"),
    ("AuthorizationHeaderMalformed", "the bucket is in another region; set AWS_REGION"),
    ("PermanentRedirect", "the bucket is in another region; set AWS_REGION"),
    ("redirect without LOCATION", "the bucket is in another region; set AWS_REGION"),
    ("IllegalLocationConstraint", "the bucket is in another region; set AWS_REGION"),
)


def is_url(path: str) -> bool:
    """Whether a path of a recipe names an object store: s3://bucket/data.jsonl, gs://..."""
    return "://" in path


def refusal(url: str) -> str | None:
    """Why this URL cannot be used; None if its form is right."""
    if url.startswith(SCHEME):
        return None if _URL.fullmatch(url) else "must be s3://BUCKET or s3://BUCKET/PATH"
    scheme = url.partition("://")[0]
    return f"names a store {scheme}://, which is not tested, so it is refused; use s3://BUCKET/PATH or a local copy"


class DamagedError(StorageError):
    """An object differs from what was written."""


@dataclass(frozen=True)
class Stored:
    """An object: its name below the store's URL, and its size in bytes."""

    name: str
    num_bytes: int


class Version(NamedTuple):
    """The size of an object in bytes, and the ETag, which every write changes."""

    num_bytes: int
    etag: str


class ObjectStore:
    """The objects whose names begin with a URL such as s3://bucket/runs/a.

    Every method raises ConfigError if the user must correct something (bucket, credentials, region), and StorageError
    if the store does not answer; another start may then succeed.
    """

    def __init__(self, url: str) -> None:
        if reason := refusal(url):
            raise ConfigError(f"{url} {reason}.")
        self.url = url.rstrip("/")
        self._store = _open(self.url)

    def read(self, name: str) -> tuple[bytes, str] | None:
        """The content of a small object and its ETag; None if there is no such object."""
        import obstore

        with self._explained("read", name):
            try:
                answer = obstore.get(self._store, name)
                return bytes(answer.bytes()), str(answer.meta["e_tag"])
            except FileNotFoundError as error:
                _raise_without_bucket(error)
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small object.  It replaces an object of the same name at once: no reader sees a part of it."""
        import obstore

        with self._explained("written", name):
            obstore.put(self._store, name, content, use_multipart=False)

    def replace(self, name: str, content: bytes, etag: str | None) -> str | None:
        """Write an object if it still has this ETag; with None, if there is no object of this name.

        Returns the new ETag, or None if another object is there.  The answer to a write may be lost, and its repetition
        then meets its own object; so an object with the same content counts as written.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._explained("written", name):
            try:
                written = obstore.put(self._store, name, content, mode="create" if etag is None else {"e_tag": etag})
                return str(written["e_tag"])
            except (AlreadyExistsError, PreconditionError):
                pass
        stored = self.read(name)
        return stored[1] if stored is not None and stored[0] == content else None

    def upload(self, path: Path, name: str, sha256: str) -> None:
        """Write an object from a file, in parts.  The object appears when its last part has arrived.

        sha256: the digest of the file, which the object gets as an attribute
        """
        import obstore

        with self._explained("written", name):
            size, attributes = path.stat().st_size, cast(Any, {_DIGEST: sha256})
            part = max(_PART_BYTES, -(-size // _MOST_PARTS))
            obstore.put(
                self._store,
                name,
                path,
                attributes=attributes,
                use_multipart=size > part,
                chunk_size=part,
                max_concurrency=_PARTS_AT_ONCE,
            )

    def sha256(self, name: str) -> str | None:
        """The digest that `upload` gave to the object; None if there is no such object, or another program wrote it."""
        import obstore

        with self._explained("read", name):
            try:
                attributes: Any = obstore.get(self._store, name, options={"head": True}).attributes
            except FileNotFoundError as error:
                _raise_without_bucket(error)
                return None
            digest = attributes.get(_DIGEST)
            return None if digest is None else str(digest)

    def send(self, folder: Path, entries: Mapping[str, Entry], there: Mapping[str, int], prefix: str = "") -> int:
        """Write the files of a folder as objects, except those that are there.  Returns the bytes sent.

        there: sizes of the objects that are there; prefix: goes before the name of a file
        """
        missing = [
            name
            for name, entry in entries.items()
            if there.get(name) != entry.num_bytes or self.sha256(prefix + name) != entry.sha256
        ]
        _in_parallel(lambda name: self.upload(folder / name, prefix + name, entries[name].sha256), missing)
        return sum(entries[name].num_bytes for name in missing)

    def version(self, name: str) -> Version | None:
        """The version of an object; None if there is no such object."""
        import obstore

        with self._explained("read", name):
            try:
                meta = obstore.head(self._store, name)
                return Version(int(meta["size"]), str(meta["e_tag"]))
            except FileNotFoundError:
                pass
        return None if self.read(name) is None else self.version(name)  # `read` raises if the bucket is missing

    def download(self, name: str, path: Path, entry: Entry | None = None, version: Version | None = None) -> Entry:
        """Read an object into a new file, in parts.  Returns the size and the digest of the file.

        entry: what the object must be; version: the version to read; None: the one that is there
        Raises DamagedError if the object is not `entry`, and StorageError if it is changed while it is read.
        """
        if (version := version or self.version(name)) is None:
            raise StorageError(f"{self.url}/{name} cannot be read: there is no such object.")
        size, etag = version
        with self._explained("read", name):
            if entry is not None and size != entry.num_bytes:
                raise DamagedError(f"{self.url}/{name} has {size:,} bytes, but {entry.num_bytes:,} were written.")
            with path.open("xb") as file, ThreadPoolExecutor(_PARTS_AT_ONCE, "download") as pool:
                parts = [(start, min(start + _PART_BYTES, size)) for start in range(0, size, _PART_BYTES)]
                for _ in pool.map(lambda part: self._read_part(name, etag, file.fileno(), *part), parts):
                    pass
                os.fsync(file.fileno())
        copied = entry_of(path)
        if entry is not None and copied != entry:
            raise DamagedError(f"{self.url}/{name} differs from the file that was written: its SHA-256 is another.")
        return copied

    def _read_part(self, name: str, etag: str, file: int, start: int, end: int) -> None:
        import obstore
        from obstore.exceptions import PreconditionError

        for attempt in range(1, _ATTEMPTS + 1):
            try:
                answer = obstore.get(self._store, name, options={"range": (start, end), "if_match": etag})
                content = memoryview(bytes(answer.bytes()))
                break
            except PreconditionError as error:
                raise StorageError(f"{self.url}/{name} was changed while it was read.") from error
            except FileNotFoundError:
                raise
            except Exception:  # the answer broke off
                if attempt == _ATTEMPTS:
                    raise
        while content:
            written = os.pwrite(file, content, start)
            content, start = content[written:], start + written

    def objects(self, prefix: str = "") -> list[Stored]:
        """All objects whose names begin with the prefix, which ends with "/" or is empty; sorted by name."""
        import obstore

        with self._explained("listed", prefix):
            entries = [entry for part in obstore.list(self._store, prefix or None) for entry in part]
            return sorted((Stored(str(e["path"]), int(e["size"])) for e in entries), key=lambda stored: stored.name)

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects.  Those that do not exist are passed over."""
        import obstore

        for name in names:
            with self._explained("removed", name):
                try:
                    obstore.delete(self._store, name)
                except FileNotFoundError as error:
                    _raise_without_bucket(error)

    @contextmanager
    def _explained(self, verb: str, name: str) -> Iterator[None]:
        """Turns an error of the store into one paragraph, without the request, whose headers may hold secrets."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, FileNotFoundError, PermissionError) as error:
            text = str(error)
            where = f"{self.url}/{name} cannot be {verb}"
            reason = next((reason for part, reason in _REASONS if part in text), None)
            if reason is not None:
                raise ConfigError(f"{where}: {reason}.") from None
            if isinstance(error, FileNotFoundError):
                raise StorageError(f"{where}: there is no such object.") from None
            raise StorageError(f"{where}: {_status(text)}.  Start the command again when this is mended.") from None


def _status(text: str) -> str:
    """The part of an error that says what failed: "503 Slow Down"."""
    if status := re.search(r"status code: (\d{3} [A-Za-z -]+)", text):
        return f"the store answers {status[1].strip()}"
    if cause := re.search(r"HTTP error: ([a-z ]+)", text):
        return f"the store does not answer ({cause[1].strip()})"
    return text.splitlines()[0][:200]


def _raise_without_bucket(error: FileNotFoundError) -> None:
    """Raise the error again if the bucket is missing, and not only the object."""
    if "NoSuchBucket" in str(error):
        raise error


def _open(url: str) -> Any:
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise ConfigError(f"{url}: reading and writing s3:// needs an optional package: {_INSTALL}") from error
    options: dict[str, Any] = {
        "client_options": {"connect_timeout": "10s", "timeout": "120s", "allow_http": True},
        "retry_config": {"max_retries": 8, "retry_timeout": timedelta(seconds=_RETRY_S)},
        "checksum_algorithm": "SHA256",
    }
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3"):
        options["endpoint"] = endpoint
    if (provider := _boto3_credentials()) is not None:
        options["credential_provider"] = provider
    return S3Store.from_url(url, **options)


def _boto3_credentials() -> Any:
    """The credentials of boto3's files and profiles; None if the environment has keys, or boto3 is missing."""
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return None
    try:
        from boto3 import Session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    session = Session()
    return None if session.get_credentials() is None else Boto3CredentialProvider(session)


def _in_parallel(work: Callable[[Any], None], items: Sequence[Any], at_once: int = 4) -> None:
    """Call `work` for every item, a few at a time.  Raises the first error, after the others that began have ended."""
    with ThreadPoolExecutor(at_once, "object store") as pool:
        for _ in pool.map(work, items):
            pass
