"""Writes the folder `hf/` of a run before the first step, and checks it when the run resumes and after every save.

A damaged folder is copied again from its origin, if the origin still has the same content.  Otherwise the run prints a
warning and continues, because its checkpoints are complete.  An export then needs --hf.  Only rank 0 uses this module.
"""

import shutil
from pathlib import Path

from sft.checkpoint import folders
from sft.checkpoint.manifest import Verify
from sft.config import RANDOM, CheckpointConfig, ModelConfig
from sft.config.pretrained import Pretrained
from sft.console import Console
from sft.errors import CheckpointError, ConfigError, StorageError
from sft.hf.hub import CONFIG, IMPORTED, imported
from sft.hf.source import open_source
from sft.weights import kept
from sft.weights.kept import Kept
from sft.weights.serving.served import Served

_NOT_PATHS = ("auto", "must", "never", RANDOM)  # values of checkpoint.resume and model.init_from


def prepare(
    run: Path,
    model: ModelConfig,
    checkpoint: CheckpointConfig,
    console: Console,
    served: Served | None = None,
    *,
    is_new: bool,
) -> None:
    """Write the folder `hf/` of a new run, or check the folder of a resumed run.

    served: tokenizer and template of the run; None: the files of the model are kept
    Raises ConfigError like `check_exports` and `imported`, and CheckpointError if the folder cannot be written.
    """
    folder = imported(run)
    if folder.is_dir() and not is_new:
        check(run, console, served, verify="full")
        _complete(folder, served, console)
        return
    assert model.hf is None or model.pretrained is not None, "a recipe that names a model knows it"
    for leftover in run.glob(f"{IMPORTED}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if folder.is_dir():  # left by an earlier start, which saved no checkpoint; the recipe may have changed
        shutil.rmtree(folder, ignore_errors=True)
    check_exports(run, model, checkpoint, is_new=True)
    if (other := _kept_beside(_sources(model, checkpoint))) is not None:
        kept.copy(other, folder, served)
    elif model.pretrained is not None:
        _keep_model(model.pretrained, folder, served, has_weights=model.init_from != RANDOM, has_mtp=model.has_mtp)
    else:
        return
    if (written := kept.read(folder)) is not None:
        console.say(kept.describe(written))


def check_exports(run: Path, model: ModelConfig, checkpoint: CheckpointConfig, *, is_new: bool) -> None:
    """Raise ConfigError if checkpoint.export_hf is set, but the run has no Hugging Face model, or if hf/ is a link."""
    has_folder = imported(run).is_dir() and not is_new
    if checkpoint.export_hf == "none" or model.hf is not None or has_folder:
        return
    if _kept_beside(_sources(model, checkpoint)) is None:
        raise ConfigError(
            f"checkpoint.export_hf = {checkpoint.export_hf}, but the run is of no Hugging Face model: set model.hf, or "
            "checkpoint.export_hf=none."
        )


def _sources(model: ModelConfig, checkpoint: CheckpointConfig) -> list[Path]:
    """The checkpoints, or folders of checkpoints, that the recipe names."""
    return [Path(path) for path in (checkpoint.resume, model.init_from) if path is not None and path not in _NOT_PATHS]


def _complete(folder: Path, served: Served | None, console: Console) -> None:
    """Replace tokenizer and template of the model by those of the run, in a folder that an earlier version wrote."""
    files = kept.read(folder)
    if files is None or files.served is not None or served is None or files.damage("size"):
        return
    try:
        kept.serve(files, served)
        console.say(f"{folder} now has the tokenizer, the chat template and the end tokens of this run, for exports")
    except (CheckpointError, StorageError, OSError) as error:
        console.say(f"WARNING: {error}  An export has the chat template and the tokenizer of {files.name}.")


def check(run: Path, console: Console, served: Served | None = None, *, verify: Verify = "size") -> None:
    """Look for damage in the folder `hf/`, and repair it if possible.  Prints a warning if there is damage."""
    folder = run / IMPORTED
    problems: list[str] = []
    try:
        kept_files = kept.read(imported(run))
        if kept_files is None:
            if folder.is_dir():
                console.say(f"WARNING: {folder / kept.SOURCE} is missing.  An export needs --hf FOLDER.")
            return
        problems = kept_files.damage(verify)
        if problems:
            kept.restore(kept_files, served)
            console.say(f"WARNING: {'; '.join(problems)}.  {folder} was copied anew from {kept_files.origin}.")
    except (CheckpointError, ConfigError, StorageError, OSError) as error:
        console.say(
            f"WARNING: {'; '.join([*problems, str(error).rstrip('.')])}.  Training goes on, and checkpoints are "
            "complete, but an export needs --hf FOLDER with the original model."
        )


def _kept_beside(paths: list[Path]) -> Kept | None:
    """The folder `hf/` of the import or run that one of the checkpoints belongs to; None if there is none.

    paths: checkpoints, or folders of checkpoints
    """
    for path in paths:
        checkpoint = folders.find([path], str(path)).absolute()
        for parent in (checkpoint.parent, checkpoint.parent.parent):
            if (other := kept.read_beside(parent)) is not None:
                return other
    return None


def _keep_model(model: Pretrained, target: Path, served: Served | None, *, has_weights: bool, has_mtp: bool) -> None:
    """Write `target` from the model that the recipe names.  has_weights: whether the run starts from its weights"""
    name, folder = model.name, model.folder
    if (other := kept.read(folder)) is not None:
        kept.copy(other, target, served)
    elif has_weights and any(folder.glob("*.safetensors")):
        kept.keep(open_source(folder, name, has_mtp=has_mtp), target, served)
    elif (folder / CONFIG).is_file():
        kept.keep_files(folder, name, target, served)
