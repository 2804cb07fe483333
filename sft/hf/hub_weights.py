"""Finds and downloads the weights of a model on the Hugging Face hub: the safetensors files of one commit."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sft.config.pretrained import HubSnapshot
from sft.console import Console, size
from sft.errors import ConfigError
from sft.files.folder_files import LIST_BYTES, bytes_in, read_json
from sft.hf import hub_errors
from sft.hf.hub import INDEX, SHARD, SINGLE, is_hub_name, snapshot
from sft.hf.once_per_node import once_per_node


@dataclass(frozen=True, kw_only=True)
class MissingWeights:
    """Weights of a hub name that are not in the cache.  num_bytes: their size; None if unknown"""

    files: tuple[str, ...]
    num_bytes: int | None


def download_weights(snap: HubSnapshot) -> Path:
    """Download the missing weights of a commit.  Returns the folder with all files of the commit.

    Raises ConfigError if the download fails, or if the repository has no safetensors files.
    """
    return Path(once_per_node(f"download {snap.name} {snap.commit}", lambda: str(_download(snap))))


def model_folder(name: str) -> Path:
    """The folder of a model and its weights: a folder, or a hub name, whose weights are downloaded if needed."""
    return download_weights(snapshot(name)) if is_hub_name(name) else Path(name)


def missing_weights(snap: HubSnapshot) -> MissingWeights | None:
    """The files that `download_weights` would download; None if the cache has all weights.

    Raises ConfigError if the repository has no safetensors files.
    """
    sizes = _listing(snap)
    files = tuple(file for file in _weight_files(snap, sizes) if not (snap.folder / file).exists())
    if not files:
        return None
    return MissingWeights(files=files, num_bytes=None if sizes is None else sum(sizes[file] for file in files))


def _download(snap: HubSnapshot) -> Path:
    from huggingface_hub import constants, is_offline_mode, snapshot_download

    missing = missing_weights(snap)
    if missing is None:
        return snap.folder
    if is_offline_mode():
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
    before, console = bytes_in(blobs), Console(int(os.environ.get("RANK", "0")), sys.stderr)
    with (
        hub_errors.translated(snap.name, snap.repo, snap.commit),
        console.watch(f"downloading {snap.name}", total, "bytes", lambda: bytes_in(blobs) - before),
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


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") or "nothing"
