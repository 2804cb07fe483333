"""Finds the original Hugging Face model of a checkpoint: its config.json, its tokenizer and the list of its tensors.

A checkpoint contains neither config.json nor a tokenizer.  A run and `sft import` keep these files in a folder `hf/`
near their checkpoints.  Without such a folder, the original is looked for in the folders that model.hf and
model.init_from of the checkpoint's recipe name.  The user may name another folder with --hf.  Tokenizer and chat
template come from the run's `hf/` if it has them, even with --hf.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sft.checkpoint import manifest
from sft.checkpoint.manifest import Manifest
from sft.config import RANDOM
from sft.errors import CheckpointError
from sft.hf.hub import CONFIG, imported
from sft.hf.source import Expected, Role, open_source
from sft.weights import kept
from sft.weights.kept import Kept
from sft.weights.serving import flags
from sft.weights.serving.served import Record


@dataclass(frozen=True, kw_only=True)
class Original:
    """The original model of a checkpoint."""

    folder: Path
    name: str  # the model as the recipe names it
    commit: str | None = None
    origin: Path | None = None  # the folder from which `folder` was copied; None if it is no copy
    # The tensors that an export must have, by name; None if the folder has no weights and does not list them.
    tensors: Mapping[str, Expected] | None = None
    digests: Mapping[str, str] = field(default_factory=dict)  # known SHA-256 of tensors that are passed through
    # Returns name and value of each tensor that is passed through, one at a time.
    passed_through: Callable[[], Iterable[tuple[str, torch.Tensor]]] = tuple
    tokenizer: Path  # the folder of tokenizer, chat template and generation_config.json
    served: Record | None = None  # settings of the run in the tokenizer files; None: they are the files of the model

    def names(self, role: Role) -> list[str]:
        return [name for name, tensor in (self.tensors or {}).items() if tensor.role == role]


def find_original(path: Path, recipe: Mapping[str, Any], like: Path | None, *, has_mtp: bool = False) -> Original:
    """The original model of the checkpoint `path`.

    recipe: the values of the checkpoint's recipe, by dotted key
    like: the folder that the user named with --hf
    has_mtp: whether the checkpoint has the block for multi-token prediction
    Raises CheckpointError if no folder has a config.json, or if files are damaged.  Raises ConfigError as `imported`
    does.
    """
    folders = []
    for folder in _folders(path, recipe, like):
        folders.append(folder)
        if (folder / CONFIG).is_file():
            original = _original(folder, str(recipe.get("model.hf") or folder), has_mtp)
            of_run = _served_by_run(path)
            return original if of_run is None else replace(original, tokenizer=of_run.folder, served=of_run.served)
    if like:
        raise CheckpointError(
            f"--hf {like} has no {CONFIG}; --hf must name the Hugging Face folder from which the weights came."
        )
    raise CheckpointError(
        f"{path} does not name its Hugging Face model, and {', '.join(map(str, folders))} has no {CONFIG}.  Give the "
        f"folder with {CONFIG} and the tokenizer: --hf FOLDER."
    )


def describe_tokenizer(original: Original, recipe: Mapping[str, Any]) -> str:
    """One line about the chat template of an export, or a warning that it may differ from the template of the run."""
    if original.served is not None:
        return f"  template      {flags.short(original.served)}"
    if recipe.get("data.tokenizer") == "byte":
        return f"WARNING: the run's tokenizer, byte, has no files: tokenizer and template are those of {original.name}."
    return (
        f"WARNING: tokenizer, chat template and end tokens are those of {original.name}, because no hf/{kept.SOURCE} "
        "beside the checkpoint says what the run was trained with.  If the run is resumed, it writes that; then export "
        "again."
    )


def _served_by_run(path: Path) -> Kept | None:
    """The folder `hf/` of the run that wrote the checkpoint `path`.

    None if there is none, if it lacks the run's tokenizer, or if it is damaged.
    """
    parent = path.absolute().parent
    if parent.name != "checkpoints":
        return None
    try:
        files = kept.read_beside(parent.parent)
    except CheckpointError:
        return None
    if files is None or files.served is None:
        return None
    small = {name: entry for name, entry in files.files.items() if not name.endswith(".safetensors")}
    return None if manifest.damage(files.folder, Manifest(files=small, facts={}), verify="full") else files


def _folders(path: Path, recipe: Mapping[str, Any], like: Path | None) -> Iterator[Path]:
    """The folders in which config.json may be, best first."""
    if like:
        yield like
        yield imported(like)
        return
    yield imported(path.parent)  # written by `sft import`
    parent = path.parent if path.parent.name else path.absolute().parent
    if parent.name == "checkpoints":
        yield imported(parent.parent)  # written by a run
    for key in ("model.hf", "model.init_from"):
        if recipe.get(key) not in (None, RANDOM):
            named = Path(recipe[key])
            yield named
            yield imported(named)
            yield imported(named.parent)


def _original(folder: Path, name: str, has_mtp: bool) -> Original:
    files = kept.read(folder)
    if files is not None:
        manifest.refuse(folder, files.damage("full"))
        return Original(
            folder=folder,
            name=files.name,
            commit=files.commit,
            origin=files.origin,
            tensors=files.tensors,
            digests=files.digests,
            passed_through=files.passed_through,
            tokenizer=folder,
        )
    if not any(folder.glob("*.safetensors")):
        return Original(folder=folder, name=name, tokenizer=folder)
    source = open_source(folder, name, has_mtp=has_mtp)
    passed_through = partial(kept.not_trained, source)
    return Original(folder=folder, name=name, tensors=source.manifest, passed_through=passed_through, tokenizer=folder)
