"""Keeps the stores of tokenised data in an object store (data.cache_remote), from which other machines fetch them.

    s3://bucket/cache/3f9a.../tokens.npy, ...    the files of a store (`store.py`)
    s3://bucket/cache/3f9a.../ledger.json        written last: the store is complete

The name of a store is a hash of everything that its content depends on, so a store in the object store is never out of
date, and machines that send the same store at the same time send the same bytes.
"""

import json
import shutil
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sft.console import Console, size
from sft.data.cache.folders import work_folder
from sft.data.cache.store import LAST_FILE, open_store, publish
from sft.errors import DataError
from sft.files.atomic_files import unusable
from sft.files.file_digest import entry_of
from sft.files.object_store import ObjectStore


class RemoteStores:
    """The stores below a URL."""

    def __init__(self, url: str, console: Console) -> None:
        self._objects, self._console = ObjectStore(url), console

    def fetch(self, folders: Iterable[Path]) -> None:
        """Fetch the stores of these names that this machine lacks and the object store has.

        Raises DataError if a store there is damaged or cannot be written here.
        """
        for folder in dict.fromkeys(folders):
            if not folder.exists() and (last_file := self._objects.read(f"{folder.name}/{LAST_FILE}")) is not None:
                self._fetch(folder, last_file[0])

    def send(self, folders: Iterable[Path]) -> None:
        """Send the stores of these names that the object store lacks."""
        for folder in dict.fromkeys(folders):
            if self._objects.read(f"{folder.name}/{LAST_FILE}") is None:
                self._send(folder)

    def _fetch(self, folder: Path, last_file: bytes) -> None:
        started, url = time.monotonic(), f"{self._objects.url}/{folder.name}"
        temporary = work_folder(folder) / f"fetched-{uuid.uuid4().hex[:12]}"
        try:
            temporary.mkdir(parents=True)
            files = self._files(last_file, url)
            for name in files:
                self._objects.download(f"{folder.name}/{name}", temporary / name)
            (temporary / LAST_FILE).write_bytes(last_file)
            if open_store(temporary, verify=True) is None:
                raise DataError(f"{url} is damaged.  Remove {url}/{LAST_FILE}, and run sft data prepare again.")
            publish(temporary, folder)
        except OSError as error:
            where = f"tokenised data cannot be fetched to data.cache_dir {folder.parent}"
            raise unusable(where, folder.parent, error, DataError) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):  # not empty: a preparation was killed
                temporary.parent.rmdir()
        took_s = time.monotonic() - started
        self._console.say(f"{url}: fetched ({size(sum(files.values()))} in {took_s:.1f} s)")

    def _send(self, folder: Path) -> None:
        started, prefix = time.monotonic(), f"{folder.name}/"
        files = {path.name: entry_of(path) for path in sorted(folder.iterdir()) if path.name != LAST_FILE}
        there = {stored.name.removeprefix(prefix): stored.num_bytes for stored in self._objects.objects(prefix)}
        num_bytes = self._objects.send(folder, files, there, prefix)
        self._objects.write(prefix + LAST_FILE, (folder / LAST_FILE).read_bytes())
        took_s = time.monotonic() - started
        self._console.say(f"{self._objects.url}/{folder.name}: sent ({size(num_bytes)} in {took_s:.1f} s)")

    @staticmethod
    def _files(last_file: bytes, url: str) -> dict[str, int]:
        """The names and sizes of the files of a store.  Raises DataError if a name is no plain name."""
        try:
            files = {str(name): int(file["bytes"]) for name, file in json.loads(last_file)["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            files = {"": 0}
        if any(name != Path(name).name or name in ("", LAST_FILE) for name in files):
            raise DataError(f"{url}/{LAST_FILE} does not describe a store.  Remove it, and run sft data prepare again.")
        return files
