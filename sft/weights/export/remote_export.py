"""Exports a checkpoint to an object store, s3://BUCKET/models/a, or to the Hugging Face hub, hf://OWNER/NAME

The export is written to a temporary folder (TMPDIR), then sent.  In an object store, config.json (of adapters
adapter_config.json) comes last: an export without it is incomplete, and loads nowhere.  On the hub, one commit has all
files.  If a transfer was interrupted, the same command sends the rest.
"""

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sft.console import Console, size
from sft.errors import CheckpointError, first_few
from sft.files.file_digest import entry_of
from sft.files.object_store import ObjectStore
from sft.hf.hub import ADAPTERS, CONFIG
from sft.hf.hub_upload import SCHEME, open_branch, publish
from sft.weights.export.export_hf import export_hf, find_checkpoint

_LAST = (CONFIG, ADAPTERS)

Send = Callable[[Path, list[str]], int]  # sends these files of a folder, and returns the bytes sent


def export_to_url(source: Path, url: str, console: Console, **options: Any) -> tuple[Path, int]:
    """`export_hf` with a URL as the target.  Returns the checkpoint that was converted, and the bytes of the export.

    Raises the errors of `export_hf`, ConfigError if the store or the hub cannot be used, and CheckpointError if the URL
    has an export, or other objects.
    """
    is_hub = url.startswith(SCHEME)
    if is_hub:
        source = find_checkpoint(source)  # before a repository is created
    send = _to_hub(url, source.name) if is_hub else _to_store(url)
    with TemporaryDirectory(prefix="sft-export-") as temporary:
        folder = Path(temporary, "export")
        checkpoint = export_hf(source, folder, console, **options)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        num_bytes, started = sum(path.stat().st_size for path in files), time.monotonic()
        num_sent = send(folder, [str(path.relative_to(folder)) for path in files])
    console.say(f"sent {url} ({size(num_sent)} in {time.monotonic() - started:.1f} s)")
    return checkpoint, num_bytes


def _to_store(url: str) -> Send:
    store = ObjectStore(url)
    there = {stored.name: stored.num_bytes for stored in store.objects()}
    if any(name in there for name in _LAST):
        raise CheckpointError(f"{url} holds a model; nothing was written.  Remove it, or name another place.")

    def send(folder: Path, names: list[str]) -> int:
        if others := sorted({*there} - {*names}):
            raise CheckpointError(
                f"{url} holds {', '.join(first_few(others))}, which are no part of this export; nothing was written.  "
                "Remove them, or name another place."
            )
        entries = {name: entry_of(folder / name) for name in names}
        num_sent = store.send(folder, {name: entry for name, entry in entries.items() if name not in _LAST}, there)
        for name in _LAST:
            if name in entries:
                num_sent += store.send(folder, {name: entries[name]}, {})
        return num_sent

    return send


def _to_hub(url: str, checkpoint: str) -> Send:
    branch = open_branch(url)

    def send(folder: Path, names: list[str]) -> int:
        publish(branch, folder, names, f"Export of {checkpoint}")
        return sum((folder / name).stat().st_size for name in names)

    return send
