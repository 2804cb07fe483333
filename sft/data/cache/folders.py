"""Names the cache folder of each data file, and removes folders that are no longer used.

The name of a folder depends on the bytes of the file, the tokenizer and template, the settings named here, and the code
that makes samples of rows (`ENCODING`).  Samples do not depend on the parallel layout, so any layout reuses the cache.

    cache_dir/3f9a...      the complete store of one file (`store.py`)
    cache_dir/3f9a....work  parts of an unfinished store, also after its process was killed (`workers.py`)
    cache_dir/digests      digests of data files (`digests.py`)
    cache_dir/datasets     which rows of which Arrow files a dataset consists of (`loaded_datasets.py`)
    cache_dir/remote       copies of data files of an object store (`remote_files.py`)
"""

import hashlib
import json
import re
import shutil
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from sft.config import DataConfig
from sft.data.cache.digests import content_digest, files_of
from sft.data.chat.tokenizer import ByteTokenizer, ChatTokenizer
from sft.data.read.named_dataset import LoadedDataset
from sft.data.read.rows import DataFile
from sft.errors import DataError

# Version of the code that makes samples of rows.  A change that gives any row other tokens or weights must change this
# text; older stores are then no longer used.  tests/unit/data/cache/test_encoding_version.py fails if tokens or weights
# of its rows change and this text does not.
ENCODING = "2: the sources of characters decide masks, and text that a template inserts is supervised"
# Version of the code that decides which rows are unusable.  Only names of stores with on_bad_row = skip depend on it.
REFUSALS = "4: a prompt with a list of one completion is a chat"
# Version of the code that renders each turn and makes trees.  Only names of stores with turns = each depend on it.
TREES = "2: samples of a split tree know the tokens that an earlier one supervises"
# Version of the code that reads a teacher's distributions.  Only names of stores with a teacher depend on it.
TEACHER = "1"
_SETTINGS = ("seq_length", "doc_multiple", "over_long", "on_bad_row", "supervise", "supervise_inserted")
Stamp = tuple[tuple[int, int], ...]

_OURS = re.compile(r"[0-9a-f]{32}(\.work)?")


def store_folder(cache_dir: Path, file: DataFile, data: DataConfig, tokenizer: ChatTokenizer) -> Path:
    """The cache folder of one data file.  Its name, 32 hex digits, is a hash of everything that the samples depend on.

    Raises OSError if the file cannot be read.
    """
    libraries = () if isinstance(tokenizer, ByteTokenizer) else ("transformers", "tokenizers", "jinja2")
    parts: dict[str, Any] = {
        "content": file.digest if isinstance(file, LoadedDataset) else content_digest(file, cache_dir),
        "kind": "dataset" if isinstance(file, LoadedDataset) else file.suffix,
        "tokenizer": tokenizer.digest,
        "settings": {name: getattr(data, name) for name in _SETTINGS},
        "code": ENCODING,
        "libraries": [version(name) for name in libraries],
    }
    if data.on_bad_row == "skip":
        parts["refusals"] = REFUSALS
    if data.turns == "each":
        parts["turns"] = TREES
    if data.teacher.k is not None:
        files = [content_digest(Path(file), cache_dir) for file in data.teacher.files or ()]
        parts["teacher"] = {**data.teacher.model_dump(), "files": files, "code": TEACHER}
    return cache_dir / hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def work_folder(folder: Path) -> Path:
    """The folder in which the parts of the store `folder` are made.  After an interruption, the next preparation finds
    the finished parts in it."""
    return folder.with_name(f"{folder.name}.work")


def stamp(path: DataFile) -> Stamp:
    """Sizes and modification times of a file, folder or dataset; they change whenever a program writes to it."""
    if isinstance(path, LoadedDataset):
        parts = path.files
    else:
        parts = files_of(path) if path.is_dir() else [path]
    stats = [part.stat() for part in parts]
    return tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)


def check_unchanged(path: DataFile, before: Stamp) -> None:
    """Raises DataError if the file or folder was modified after its stamp `before` was taken."""
    try:
        changed = stamp(path) != before
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error}.") from error
    if changed:
        raise DataError(
            f"data file {path} changed while it was tokenised.  Start the command again when the file is complete."
        )


def is_newer(path: DataFile, cache_dir: Path) -> bool:
    """Whether a file was modified after all stores in `cache_dir`; false if there is none."""
    made_ns = [part.stat().st_mtime_ns for part in cache_dir.glob("*") if _OURS.fullmatch(part.name)]
    return bool(made_ns) and max(modified_ns for _, modified_ns in stamp(path)) > max(made_ns)


class Stale(NamedTuple):
    """A folder of the cache that was removed."""

    folder: Path
    num_bytes: int


def sweep(cache_dir: Path, copies: Path, used: Collection[Path]) -> list[Stale]:
    """Removes the stores in `cache_dir` and the folders in `copies` that are not in `used`, and all work folders.

    Folders with names of another form stay.  On a local disk, a run that has mapped a removed store continues.  If the
    work folder of a running preparation is removed, the preparation tokenises that file again.  Raises DataError if a
    folder cannot be removed.
    """
    stale = []
    try:
        for folder in sorted(part for parent in (cache_dir, copies) if parent.is_dir() for part in parent.iterdir()):
            store = folder.with_name(folder.name.removesuffix(".work"))
            if _OURS.fullmatch(folder.name) and folder.is_dir() and (store not in used or store != folder):
                stale.append(Stale(folder, sum(part.stat().st_size for part in files_of(folder))))
                shutil.rmtree(folder)
    except OSError as error:
        raise DataError(f"unused data in data.cache_dir {cache_dir} cannot be removed: {error}.") from error
    return stale
