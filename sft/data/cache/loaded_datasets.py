"""Opens the files and datasets of a recipe, and remembers in the cache which rows of which files a dataset consists of.

    cache_dir/datasets/7ab0....json    {"name": "OWNER/NAME train", "commit": "8049...", "digest": "3f...", ...}

`sft data prepare` asks the hub for the commit of a dataset, in one process.  A training run reads the remembered
commit: it needs no network, and a branch that moves meanwhile does not change its data.  The name of a store depends on
the bytes of the Arrow files, as for any data file.  So a commit with other rows has another store.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from sft.config import Input, NamedDataset
from sft.console import Console
from sft.data.cache.digests import content_digest
from sft.data.read.named_dataset import COMMIT, HubUnreachable, LoadedDataset, load_dataset
from sft.data.read.remote_files import find_staged, stage
from sft.data.read.rows import DataFile, check_file
from sft.data.read.tables import TableSlice
from sft.errors import DataError
from sft.files.atomic_files import replacing
from sft.files.object_store import is_url

FOLDER = "datasets"


class _Memo(NamedTuple):
    """A dataset as it was loaded.  folder: digest of its local folder at that time; None for a dataset of the hub"""

    dataset: LoadedDataset
    folder: str | None


def open_inputs(inputs: Sequence[Input], cache_dir: Path, console: Console) -> list[DataFile]:
    """Checks that the files exist and are readable, fetches those at URLs, and loads the datasets.  Only one process
    calls this function.

    Raises DataError if a file or dataset cannot be used.
    """
    return _files(inputs, lambda wanted: _load(wanted, cache_dir, console), lambda url: stage(url, cache_dir, console))


def find_inputs(inputs: Sequence[Input], cache_dir: Path, *, command: str) -> list[DataFile]:
    """Checks the files, and finds the files at URLs and the datasets that `command` has fetched.  Raises DataError if
    one is not fetched."""
    return _files(
        inputs,
        lambda wanted: _find(wanted, cache_dir, command),
        lambda url: find_staged(url, cache_dir, command=command),
    )


def _files(
    inputs: Sequence[Input], dataset: Callable[[NamedDataset], LoadedDataset], copy: Callable[[str], Path]
) -> list[DataFile]:
    """dataset: finds or loads a dataset; copy: finds or fetches the file at a URL"""
    files: list[DataFile] = []
    for entry in inputs:
        if isinstance(entry, NamedDataset):
            files.append(dataset(entry))
        else:
            files.append(copy(entry) if is_url(entry) else Path(entry))
            check_file(files[-1])
    return files


def _find(wanted: NamedDataset, cache_dir: Path, command: str) -> LoadedDataset:
    memo = _remembered(wanted, cache_dir)
    if memo is None or memo.folder != _folder_digest(wanted, cache_dir):
        state = "is not loaded" if memo is None else "has changed since it was loaded"
        raise DataError(
            f"dataset {wanted} {state} into {cache_dir}.  First run this command on a machine that sees this folder: "
            f"{command}"
        )
    return memo.dataset


def _load(wanted: NamedDataset, cache_dir: Path, console: Console) -> LoadedDataset:
    from huggingface_hub import is_offline_mode

    memo, folder = _remembered(wanted, cache_dir), _folder_digest(wanted, cache_dir)
    is_intact = memo is not None and _is_intact(memo.dataset, cache_dir)
    if memo is not None and is_intact and memo.folder == folder:
        if folder is not None or COMMIT.fullmatch(wanted.revision or ""):
            return memo.dataset  # a folder with the same digest and a dataset of a commit have the same rows
        if is_offline_mode():  # `datasets` would use its newest copy, whatever the revision
            console.say(
                f"{wanted}: using commit {memo.dataset.commit}, which was loaded before (HF_HUB_OFFLINE is set)"
            )
            return memo.dataset
    try:
        loaded = load_dataset(wanted)
    except HubUnreachable as error:
        if memo is None or not is_intact:
            raise
        console.say(f"{wanted}: using commit {memo.dataset.commit}, which was loaded before ({error})")
        return memo.dataset
    loaded = replace(loaded, digest=_digest(loaded, cache_dir))
    was = memo.dataset.commit if memo is not None else None
    if was is not None and loaded.commit != was:
        console.say(
            f"{wanted}: {wanted.revision or 'main'} moved from commit {was} to {loaded.commit}.  A run that began with "
            f"the former needs revision: {was}"
        )
    console.say(f"{wanted}: {f'commit {loaded.commit}, ' if loaded.commit else ''}{loaded.num_rows:,} rows")
    _remember(wanted, cache_dir, _Memo(loaded, folder))
    return loaded


def _digest(loaded: LoadedDataset, cache_dir: Path) -> str:
    """Digest of the rows and the chosen columns.  Raises DataError if a file cannot be read."""
    try:
        slices = [[content_digest(part.file, cache_dir), part.first, part.stop] for part in loaded.slices]
    except OSError as error:
        raise DataError(f"dataset {loaded}: {error.filename} cannot be read: {error.strerror}.") from error
    return hashlib.sha256(json.dumps([slices, loaded.columns]).encode()).hexdigest()


def _folder_digest(wanted: NamedDataset, cache_dir: Path) -> str | None:
    folder = Path(wanted.name)
    return content_digest(folder, cache_dir) if folder.is_dir() else None


def _is_intact(loaded: LoadedDataset, cache_dir: Path) -> bool:
    """Whether the Arrow files exist and have the same bytes as when the dataset was loaded."""
    return all(file.is_file() for file in loaded.files) and _digest(loaded, cache_dir) == loaded.digest


def _path(wanted: NamedDataset, cache_dir: Path) -> Path:
    folder = Path(wanted.name)
    identity = [str(folder.absolute()) if folder.is_dir() else "", asdict(wanted)]
    return cache_dir / FOLDER / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}.json"


def _remembered(wanted: NamedDataset, cache_dir: Path) -> _Memo | None:
    try:
        content: dict[str, Any] = json.loads(_path(wanted, cache_dir).read_text(encoding="utf-8"))
        folder, slices, columns = (content.pop(name) for name in ("folder", "slices", "columns"))
        dataset = LoadedDataset(
            **content,
            slices=tuple(TableSlice(Path(file), first, stop) for file, first, stop in slices),
            columns=None if columns is None else tuple((key, column) for key, column in columns),
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):  # never loaded, or a damaged memo
        return None
    return _Memo(dataset, folder)


def _remember(wanted: NamedDataset, cache_dir: Path, memo: _Memo) -> None:
    path = _path(wanted, cache_dir)
    content = {**asdict(memo.dataset), "folder": memo.folder}
    content["slices"] = [[str(part.file), part.first, part.stop] for part in memo.dataset.slices]
    try:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
    except OSError as error:
        raise DataError(f"data.cache_dir {cache_dir} cannot be written: {error.strerror}.") from error
