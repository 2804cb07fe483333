"""Finds the folder of a model or tokenizer that a recipe names, and downloads it from the Hugging Face hub if needed.

    models/Qwen3-8B        an existing folder always comes first
    ./x  ../x  ~/x  /x/y   a path, never a hub name
    Qwen/Qwen3-8B          otherwise a hub name, with an optional branch, tag or commit: Qwen/Qwen3-8B@main

huggingface_hub does all access to the hub and to its cache, and reads HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and
HF_ENDPOINT.  It is imported only for hub names.  A process looks up the commit of a name once, so all files of a start
belong to one commit.  One process of each node looks up and downloads for all (`once_per_node.py`).  `hub_weights.py`
downloads the weights, and `hub_errors.py` writes the error messages.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from sft.config.pretrained import HubSnapshot
from sft.console import Console
from sft.errors import ConfigError
from sft.hf import hub_errors
from sft.hf.once_per_node import once_per_node

CONFIG = "config.json"
ADAPTERS = "adapter_config.json"  # marks a PEFT folder
IMPORTED = "hf"  # folder of config.json in an imported checkpoint, and in a run
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.][\w./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# The files except weights that a model or a tokenizer needs.  Subfolders of a repository contain the model in other
# formats.
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_IN_FOLDERS = ["*/*"]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"[\w.-]{1,250}\.safetensors")  # a file that an index may name
_snapshots: dict[str, HubSnapshot] = {}


def is_hub_name(name: str) -> bool:
    """Whether `name` is to be looked up on the hub: it has the form of a hub name, and no such path exists."""
    return _HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def local_folder(name: str) -> Path:
    """The folder with config.json and tokenizer of the model `name`.

    For a hub name, downloads all files except the weights.  For an imported checkpoint, returns its folder hf/.
    Raises ConfigError if the download fails.
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


def _look_up(name: str, repo: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, constants, is_offline_mode, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted: dict[str, Any] = {"allow_patterns": _SMALL_FILES, "ignore_patterns": _IN_FOLDERS}
    is_offline = is_offline_mode()
    with hub_errors.translated(name, repo, revision):
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
            Console(int(os.environ.get("RANK", "0")), sys.stderr).say(
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
