"""Finds the folder of a model or tokenizer that a recipe names, and downloads it from the Hugging Face hub if needed.

    models/Qwen3-8B        an existing folder always comes first
    ./x  ../x  ~/x  /x/y   a path, never a hub name
    Qwen/Qwen3-8B          otherwise a hub name, with an optional branch, tag or commit: Qwen/Qwen3-8B@main

huggingface_hub does all access to the hub and to its cache, and reads HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and
HF_ENDPOINT.  It is imported only for hub names.  A process looks up the commit of a name once, so all files of a start
belong to one commit.  One process of each node looks up and downloads for all (`once_per_node.py`).  `hub_errors.py`
writes the error messages.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.console import Console, size
from sft.errors import ConfigError
from sft.files.folder_files import LIST_BYTES, read_json
from sft.hf import hub_errors
from sft.hf.once_per_node import once_per_node

CONFIG = "config.json"
IMPORTED = "hf"  # folder of config.json in an imported checkpoint, and in a run
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.][\w./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# All files except weights that a model or a tokenizer needs.  Files in subfolders of a repository have other formats.
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_IN_FOLDERS = ["*/*"]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"[\w.-]{1,250}\.safetensors")  # a file that an index may name
_snapshots: dict[str, "HubSnapshot"] = {}


@dataclass(frozen=True, kw_only=True)
class HubSnapshot:
    """A commit of a repository in the local cache.  Weights are there only after `download_weights`."""

    name: str  # the hub name as the recipe gives it
    repo: str
    commit: str
    folder: Path


@dataclass(frozen=True, kw_only=True)
class MissingWeights:
    """Weights of a hub name that are not in the cache.  num_bytes: their size; None if unknown"""

    files: tuple[str, ...]
    num_bytes: int | None


def is_hub_name(name: str) -> bool:
    """Whether `name` is to be looked up on the hub: it has the form of a hub name, and no such path exists."""
    return _HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def local_folder(name: str) -> Path:
    """The folder with config.json and tokenizer, for a hub name, a folder, or an imported checkpoint (its folder hf/).

    For a hub name, downloads all files except the weights.  Raises ConfigError if that fails.
    """
    if is_hub_name(name):
        return snapshot(name).folder
    folder = Path(name)
    if not (folder / CONFIG).exists() and (imported(folder) / CONFIG).exists():
        return folder / IMPORTED
    return folder


def imported(folder: Path) -> Path:
    """The folder hf/ of a run or an imported checkpoint.  Raises ConfigError if it is a link to the files of a model.

    Such a link could lead to another model of the user, whose files would become a part of an export.
    """
    path = folder / IMPORTED
    if path.is_symlink() and any((path / name).exists() for name in (CONFIG, "source.json")):
        raise ConfigError(f"{path} is a link to the files of a model.  Replace it by a copy of them, or remove it.")
    return path


def snapshot(name: str) -> HubSnapshot:
    """The commit of a hub name, with all files except the weights.  Raises ConfigError if they cannot be downloaded."""
    if name not in _snapshots:
        match = _HUB_NAME.fullmatch(name)
        assert match is not None, name
        repo, revision = match[1], match[2]
        folder = Path(once_per_node(f"look up {name}", lambda: str(_look_up(name, repo, revision))))
        _snapshots[name] = HubSnapshot(name=name, repo=repo, commit=folder.name, folder=folder)
    return _snapshots[name]


def commits() -> dict[str, str]:
    """The commit of every hub name that this process has looked up."""
    return {name: snap.commit for name, snap in _snapshots.items()}


def check_commits(of_ranks: Sequence[dict[str, str]]) -> None:
    """Raise ConfigError if ranks have looked up different commits.  of_ranks: the result of `commits` on each rank"""
    for rank, of_rank in enumerate(of_ranks):
        for name in {**of_ranks[0], **of_rank}:
            first, other = of_ranks[0].get(name), of_rank.get(name)
            if first != other:
                raise ConfigError(
                    f"{name} is {_called(first)} on rank 0, but {_called(other)} on rank {rank}.  All ranks must "
                    "read the same files.  The repository may have changed while the run started: start again, or "
                    f"name the commit: {name.partition('@')[0]}@{first or other}."
                )


def missing_weights(name: str) -> MissingWeights | None:
    """The files that `download_weights` would download; None if the cache has all weights.

    Raises ConfigError if the repository has no safetensors files.
    """
    return _missing(snapshot(name))


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    return constants.is_offline_mode()


def download_weights(name: str) -> Path:
    """Download the missing weights of a hub name.  Returns the folder with all files of its commit.

    Raises ConfigError if that fails, or if the repository has no safetensors files.
    """
    snap = snapshot(name)
    return Path(once_per_node(f"download {name} {snap.commit}", lambda: str(_download(snap))))


def model_folder(name: str) -> Path:
    """The folder of a model and its weights: a folder, or a hub name, whose weights are downloaded if needed."""
    return download_weights(name) if is_hub_name(name) else Path(name)


def _look_up(name: str, repo: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted: dict[str, Any] = {"allow_patterns": _SMALL_FILES, "ignore_patterns": _IN_FOLDERS}
    is_offline = constants.is_offline_mode()
    with _quietly(), hub_errors.translated(name, repo, revision):
        if is_offline or _COMMIT.fullmatch(revision or ""):
            return Path(snapshot_download(repo, revision=revision, local_files_only=is_offline, **wanted))
        try:
            # If the hub does not answer, snapshot_download uses an older commit of the cache without a message.
            commit = HfApi().model_info(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT).sha
        except Exception as error:  # the classes of the HTTP library depend on its version: see `is_unreachable`
            if not hub_errors.is_unreachable(error):
                raise
            try:
                folder = Path(snapshot_download(repo, revision=revision, local_files_only=True, **wanted))
            except LocalEntryNotFoundError:
                raise error from None
            _console().say(
                f"WARNING: {hub_errors.endpoint()} cannot be reached ({hub_errors.first_line(error)}), so {name} is "
                f"commit {folder.name} of the cache.  HF_HUB_OFFLINE=1 does not ask."
            )
            return folder
        folder = Path(snapshot_download(repo, revision=revision, **wanted))
        if folder.name != commit:  # the branch has changed since, or the hub answered only the first request
            raise ConfigError(
                f"{name} was commit {commit}, and then commit {folder.name}.  Start again, or name the commit: "
                f"{repo}@{commit}."
            )
        return folder


def _missing(snap: HubSnapshot) -> MissingWeights | None:
    sizes = _listing(snap)
    files = tuple(file for file in _weight_files(snap, sizes) if not (snap.folder / file).exists())
    if not files:
        return None
    return MissingWeights(files=files, num_bytes=None if sizes is None else sum(sizes[file] for file in files))


def _download(snap: HubSnapshot) -> Path:
    from huggingface_hub import constants, snapshot_download

    missing = _missing(snap)
    if missing is None:
        return snap.folder
    if constants.is_offline_mode():
        raise ConfigError(
            f"{snap.name}: HF_HUB_OFFLINE is set, and the cache ({snap.folder}) lacks {_some(missing.files)}.  "
            f"Download the model with `hf download {snap.repo} --revision {snap.commit}`, or unset HF_HUB_OFFLINE."
        )
    total = missing.num_bytes
    blobs = snap.folder.parents[1] / "blobs"
    free = shutil.disk_usage(snap.folder).free
    if total is not None and total > free:
        raise ConfigError(
            f"{snap.name}: the weights that are still to be downloaded have {size(total)}, but the disk of the cache "
            f"({constants.HF_HUB_CACHE}) has {size(free)} free.  Free some, or set HF_HOME to a folder on another disk."
        )
    before = _bytes_in(blobs)
    with (
        _quietly(),
        hub_errors.translated(snap.name, snap.repo, snap.commit),
        _console().watch(f"downloading {snap.name}", total, "bytes", lambda: _bytes_in(blobs) - before),
    ):
        return Path(snapshot_download(snap.repo, revision=snap.commit, allow_patterns=list(missing.files)))


def _listing(snap: HubSnapshot) -> dict[str, int] | None:
    """Sizes in bytes of the files of a commit, by path; None if neither cache nor hub has the list of them."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return {file.path: file.size for file in get_cached_repo_tree(snap.repo, revision=snap.commit)}
    except CachedRepoTreeNotFoundError:
        return None


def _weight_files(snap: HubSnapshot, sizes: dict[str, int] | None) -> list[str]:
    """The safetensors files of a model: those that the index names, or the single one."""
    index = snap.folder / INDEX
    if not index.exists():
        held = sorted(sizes or (path.name for path in snap.folder.iterdir()))
        if SINGLE in held or (sizes is None and not any(name.endswith(".safetensors") for name in held)):
            return [SINGLE]
        raise ConfigError(
            f"{snap.name} has neither {SINGLE} nor {INDEX} (it has {_some(held)}).  Other formats of weights are "
            "not read, and pickles (.bin, .pth) are never opened.  Convert the model with save_pretrained of "
            "transformers, or name a revision with safetensors files."
        )
    try:
        named = sorted({str(file) for file in read_json(snap.folder, INDEX, LIST_BYTES)["weight_map"].values()})
        if unsafe := [file for file in named if not SHARD.fullmatch(file)]:  # * would download every file
            raise ValueError(f"it names {unsafe[0][:80]!r}, which is not a safetensors file of the repository")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{snap.name}: {INDEX} cannot be read ({type(error).__name__}: {error}).") from None
    if sizes is not None and (unknown := [file for file in named if file not in sizes]):
        raise ConfigError(f"{snap.name}: {INDEX} names {_some(unknown)}, but the repository has no such file.")
    return named


@contextmanager
def _quietly() -> Iterator[None]:
    """A context manager that disables the progress bars of huggingface_hub, because our console shows the progress."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_enabled = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if were_enabled:
            enable_progress_bars()


def _bytes_in(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(folder)) if folder.is_dir() else 0


def _console() -> Console:
    return Console(int(os.environ.get("RANK", "0")), sys.stderr)


def _called(commit: str | None) -> str:
    return "a folder" if commit is None else f"commit {commit}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") or "nothing"
