"""Copies data files from URLs to this machine, once for each version of a file.

    s3://bucket/chats/a.jsonl             ->  cache_dir/remote/5c1e.../bucket/chats/a.jsonl
    hf://datasets/OWNER/NAME/a.parquet    ->  the cache of huggingface_hub (HF_HOME)

The folder 5c1e... is a hash of the URL, the size and the ETag, so a file that was changed gets a new copy.  A copy has
its name only after it is complete.  A file on the hub belongs to a commit: `stage` asks for the newest commit of the
branch, and `find_staged` finds the commit that was staged last, without a network, as for datasets by name.
"""

import hashlib
import json
import re
import time
from pathlib import Path

from sft.config import NamedDataset
from sft.console import Console, size
from sft.data.read.named_dataset import commit_of, hub_refusal
from sft.errors import DataError
from sft.files import object_store
from sft.files.atomic_files import replacing, unusable
from sft.files.object_store import ObjectStore, Version

FOLDER = "remote"
_HUB = "hf://"
_COPY = re.compile(rf"(?:^|/){FOLDER}/[0-9a-f]{{32}}/(.+)")
_HUB_COPY = re.compile(r"(?:^|/)datasets--(.+?)--([^/]+)/snapshots/[^/]+/(.+)")
_HUB_FILE = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+?)(?:@([^/\s]+))?/([^\s]*[^\s/])")


def refusal(url: str) -> str | None:
    """Why this URL cannot name a data file; None if its form is right."""
    if url.startswith(_HUB):
        is_right = _HUB_FILE.fullmatch(url) is not None
        return None if is_right else "must be hf://datasets/OWNER/NAME/FILE or hf://datasets/OWNER/NAME@REVISION/FILE"
    if (reason := object_store.refusal(url)) is not None:
        return reason
    return None if url.count("/") > 2 and not url.endswith("/") else "names no file; give s3://BUCKET/FILE"


def stage(url: str, cache_dir: Path, console: Console) -> Path:
    """The copy of the file as it is now, which is fetched if it is not on this machine.

    Raises DataError or ConfigError if the file cannot be read, and StorageError if another try may succeed.
    """
    _refuse(url)
    if url.startswith(_HUB):
        return _on_hub(url)
    store, name = _store(url)
    version = _version(url, store, name)
    path = _path(url, cache_dir, version)
    if path.exists():
        return path
    started = time.monotonic()
    try:
        with replacing(path) as temporary:
            with console.watch(f"fetching {url}", version.num_bytes, "bytes", lambda: _num_bytes(temporary)):
                store.download(name, temporary, version=version)
    except OSError as error:
        raise unusable(f"{url} cannot be copied to data.cache_dir {cache_dir}", cache_dir, error, DataError) from error
    console.say(f"{url}: fetched to {path} ({size(version.num_bytes)} in {time.monotonic() - started:.1f} s)")
    return path


def find_staged(url: str, cache_dir: Path, *, command: str) -> Path:
    """The copy of the file that `command` has fetched.

    Raises DataError if there is none, or if the file of an object store was changed since.
    """
    _refuse(url)
    if url.startswith(_HUB):
        path = _known_of_hub(url)
    else:
        store, name = _store(url)
        path = _path(url, cache_dir, _version(url, store, name))
    if path is None or not path.exists():
        raise DataError(
            f"{url} was not copied to {cache_dir}, or was changed since.  First run this command on a machine that "
            f"sees this folder: {command}"
        )
    return path


def url_of(path: Path) -> str | None:
    """The URL of a copy; None if the file is no copy.

    cache/remote/5c1e.../bucket/a.jsonl                               ->  s3://bucket/a.jsonl
    hf/hub/datasets--OWNER--NAME/snapshots/8049.../chats/a.parquet    ->  hf://datasets/OWNER/NAME/chats/a.parquet
    """
    if match := _COPY.search(path.as_posix()):
        return f"{object_store.SCHEME}{match[1]}"
    match = _HUB_COPY.search(path.as_posix())
    return match and f"{_HUB}datasets/{match[1]}/{match[2]}/{match[3]}"


def _num_bytes(path: Path) -> int:
    """Bytes of a file that is written in parts; 0 if it does not exist."""
    return path.stat().st_blocks * 512 if path.exists() else 0


def _refuse(url: str) -> None:
    if (reason := refusal(url)) is not None:
        raise DataError(f"data file {url} {reason}.")


def _store(url: str) -> tuple[ObjectStore, str]:
    folder, _, name = url.rpartition("/")
    return ObjectStore(folder), name


def _version(url: str, store: ObjectStore, name: str) -> Version:
    if (version := store.version(name)) is None:
        raise DataError(f"data file {url} does not exist.")
    return version


def _path(url: str, cache_dir: Path, version: Version) -> Path:
    digest = hashlib.sha256(json.dumps([url, *version]).encode()).hexdigest()[:32]
    return cache_dir / FOLDER / digest / url.removeprefix(object_store.SCHEME)


def _on_hub(url: str) -> Path:
    """The file in the cache of huggingface_hub, of the commit that the hub names now; offline, of the last one."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    name, file, revision = _parts(url)
    wanted = NamedDataset(name, revision=revision)
    commit = commit_of(wanted)
    if commit is None and (known := _known_of_hub(url)) is not None:
        return known
    try:
        path = Path(hf_hub_download(name, file, repo_type="dataset", revision=revision))
    except RemoteEntryNotFoundError as error:
        raise DataError(f"{url} does not exist: dataset {name} has no file {file}.") from error
    except Exception as error:  # errors of huggingface_hub and of the network
        raise hub_refusal(wanted, error) from error
    if commit not in path.parts:  # the hub failed, and the cache had an older commit
        raise DataError(f"{url}: commit {commit} cannot be downloaded.  Try again, or set @REVISION.")
    return path


def _known_of_hub(url: str) -> Path | None:
    """The file of the commit that the hub named last; None if it was not fetched."""
    from huggingface_hub import try_to_load_from_cache

    name, file, revision = _parts(url)
    path = try_to_load_from_cache(name, file, repo_type="dataset", revision=revision)
    return Path(path) if isinstance(path, str) else None


def _parts(url: str) -> tuple[str, str, str | None]:
    """hf://datasets/OWNER/NAME@v1/a.jsonl -> OWNER/NAME, a.jsonl, v1"""
    match = _HUB_FILE.fullmatch(url)
    assert match is not None, url
    return match[1], match[3], match[2]
