"""Exports a checkpoint to an object store: s3://bucket/models/a

The export is written to a temporary folder (TMPDIR), then sent, config.json (of adapters adapter_config.json) last: an
export without it is incomplete, and loads nowhere.  If a transfer was interrupted, the same command sends the rest.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sft.console import Console, size
from sft.errors import CheckpointError, ConfigError, first_few
from sft.files.file_digest import entry_of
from sft.files.object_store import ObjectStore
from sft.hf.hub import ADAPTERS, CONFIG
from sft.weights.export.export_hf import export_hf

_LAST = (CONFIG, ADAPTERS)


def export_to_store(source: Path, url: str, console: Console, **options: Any) -> tuple[Path, int]:
    """`export_hf` with a URL as the target.  Returns the checkpoint that was converted, and the bytes of the export.

    Raises the errors of `export_hf`, ConfigError if the store cannot be used, and CheckpointError if the URL has an
    export, or other objects.
    """
    if url.startswith("hf://"):
        raise ConfigError(
            f"{url}: exports are not sent to the Hugging Face hub.  Export to a folder, then send it: hf upload "
            "OWNER/NAME FOLDER."
        )
    store = ObjectStore(url)
    there = {stored.name: stored.num_bytes for stored in store.objects()}
    if any(name in there for name in _LAST):
        raise CheckpointError(f"{url} holds a model; nothing was written.  Remove it, or name another place.")
    with TemporaryDirectory(prefix="sft-export-") as temporary:
        folder = Path(temporary, "export")
        checkpoint = export_hf(source, folder, console, **options)
        files = {str(path.relative_to(folder)): entry_of(path) for path in sorted(folder.rglob("*")) if path.is_file()}
        if others := sorted({*there} - {*files}):
            raise CheckpointError(
                f"{url} holds {', '.join(first_few(others))}, which are no part of this export; nothing was written.  "
                "Remove them, or name another place."
            )
        started = time.monotonic()
        num_sent = store.send(folder, {name: entry for name, entry in files.items() if name not in _LAST}, there)
        for name in _LAST:
            if name in files:
                num_sent += store.send(folder, {name: files[name]}, {})
    console.say(f"sent {url} ({size(num_sent)} in {time.monotonic() - started:.1f} s)")
    return checkpoint, sum(entry.num_bytes for entry in files.values())
