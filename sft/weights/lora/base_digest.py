"""Identifies the frozen weights beside which a run trains adapters, by a digest of their files.

Adapters fit only the weights beside which they were trained.  So a checkpoint of adapters contains the digest, and a
run with other weights cannot resume from it.  Hashing 1 to 2 GB takes a second, so base.json keeps the digest of each
file, which is used again while the file's size and modification time are the same.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sft.checkpoint import folders, manifest
from sft.config import RANDOM, Config
from sft.errors import CheckpointError
from sft.files.atomic_files import replace_text
from sft.files.file_digest import entry_of
from sft.files.folder_files import LIST_BYTES, UnsafeFileError, matching, read_json
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0
from sft.weights.initial import find_checkpoint
from sft.weights.lora import merged_adapters

if TYPE_CHECKING:
    from sft.mcore.process_groups import ProcessGroups

MEMORY = "base.json"  # in the folder of the run


def base_digest(config: Config, run: Path, groups: "ProcessGroups", *, remembers: bool = True) -> str:
    """The digest of the frozen weights that the recipe names.  Collective: each rank hashes some of the files.

    run: the folder of the run, whose base.json has the known digests of files
    remembers: whether base.json is updated
    Raises ConfigError or CheckpointError if the weights are missing.  Raises CheckpointError if the run continues and
    its own adapters are already merged into these weights.
    """
    model = config.model
    if model.init_from == RANDOM:
        return _random(config)
    files = broadcast_from_rank0(lambda: _weight_files(config), groups.control)
    known = broadcast_from_rank0(lambda: _read_memory(run), groups.control)
    broadcast_from_rank0(lambda: _refuse_merged(config, run, known), groups.control)
    ranks = len(all_gather_objects(lambda: 0, groups.control))
    own = {name: _digest_of(Path(name), known) for name in files[groups.rank :: ranks]}
    entries = {
        name: entry for of_rank in all_gather_objects(lambda: own, groups.control) for name, entry in of_rank.items()
    }
    if groups.rank == 0 and remembers and entries != known:
        run.mkdir(parents=True, exist_ok=True)
        replace_text(run / MEMORY, json.dumps(entries, indent=1) + "\n")
    return _rounded(_digest_of_all(entries), config)


def remembered_digest(config: Config, run: Path, others: Iterable[Path] = ()) -> str | None:
    """The digest of the frozen weights that the recipe names, without hashing; None if a file's digest is not known.

    others: folders of other runs whose base.json may also have digests
    Raises as `base_digest` does.
    """
    if config.model.init_from == RANDOM:
        return _random(config)
    _refuse_merged(config, run, _read_memory(run))
    known = {name: entry for folder in (*others, run) for name, entry in _read_memory(folder).items()}
    entries = {}
    for name in _weight_files(config):
        entries[name] = _digest_of(Path(name), known, compute=lambda path: "")
        if not entries[name]["sha256"]:
            return None
    return _rounded(_digest_of_all(entries), config)


def _random(config: Config) -> str:
    return _rounded(f"random weights, seed {config.run.seed}", config)


def _rounded(digest: str, config: Config) -> str:
    """The digest of the weights as the model has them: with model.base_dtype = nf4, they are rounded to 4 bits."""
    is_rounded = config.model.base_dtype == "nf4"
    return hashlib.sha256(f"NF4 of {digest}".encode()).hexdigest() if is_rounded else digest


def _refuse_merged(config: Config, run: Path, known: dict[str, dict[str, int | str]]) -> None:
    """Raise CheckpointError if the run continues, and its own adapters are already merged into its frozen weights."""
    if config.model.init_from is None and folders.candidates(run / "checkpoints"):
        merged_adapters.refuse(_folder(config), _digest_of_all(known), f"The run in {run}")


def digest_of(base: Path, run: Path) -> str:
    """The digest of the weights in a Hugging Face folder or a Megatron checkpoint.

    run: the folder of a run whose base.json may have digests of the files
    """
    files = _regular(base, "*.safetensors") or _files_of_checkpoint(base)
    known = _read_memory(run)
    return _digest_of_all({name: _digest_of(Path(name), known) for name in files})


def _digest_of_all(entries: dict[str, dict[str, int | str]]) -> str:
    content = [(Path(name).name, entry["bytes"], entry["sha256"]) for name, entry in sorted(entries.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _weight_files(config: Config) -> list[str]:
    """The files whose digests identify the weights: safetensors files, or the manifest of a checkpoint."""
    model = config.model
    if model.init_from is None:
        return _regular(_folder(config), "*.safetensors")
    return _files_of_checkpoint(find_checkpoint(model.init_from))


def _folder(config: Config) -> Path:
    assert config.model.pretrained is not None
    return config.model.pretrained.folder


def _files_of_checkpoint(checkpoint: Path) -> list[str]:
    return _regular(checkpoint, manifest.NAME if (checkpoint / manifest.NAME).is_file() else "*")


def _regular(folder: Path, pattern: str) -> list[str]:
    try:
        return [str(path) for path in matching(folder, pattern)]
    except UnsafeFileError as error:
        raise CheckpointError(f"{error}.") from None


def _read_memory(run: Path) -> dict[str, dict[str, int | str]]:
    try:
        content: dict[str, dict[str, int | str]] = read_json(run, MEMORY, LIST_BYTES)
    except (OSError, ValueError, RecursionError):
        return {}
    is_known = isinstance(content, dict) and all(isinstance(entry, dict) for entry in content.values())
    return content if is_known else {}


def _digest_of(
    path: Path,
    known: dict[str, dict[str, int | str]],
    compute: Callable[[Path], str] = lambda path: entry_of(path).sha256,
) -> dict[str, int | str]:
    """Size, modification time and SHA-256 of a file.

    The SHA-256 is computed only if size or time differ from those in `known`.
    """
    stat = path.stat()
    entry: dict[str, int | str] = {"bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}
    before = known.get(str(path), {})
    is_known = "sha256" in before and all(before.get(key) == value for key, value in entry.items())
    return entry | {"sha256": before["sha256"] if is_known else compute(path)}
