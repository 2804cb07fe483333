"""Checks run.dir, and gets the weights from which a start in it begins, before heavy modules are imported."""

from pathlib import Path

from sft.checkpoint import folders, resume_setting
from sft.errors import ConfigError
from sft.files.atomic_files import why_no_folder
from sft.hf import hub_weights
from sft.recipe.resolved import Recipe
from sft.run import status


def check_folder(recipe: Recipe, *, has_files: bool = True) -> None:
    """Raise ConfigError if run.dir cannot be written, and CheckpointError if checkpoint.resume allows no start.

    has_files: whether this machine has the files of the run.  Without them, only a name that is no path is refused.
    """
    config, folder = recipe.config.checkpoint, Path(recipe.config.run.dir)
    if has_files:
        if why := why_no_folder(folder):
            raise ConfigError(f"run.dir = {folder} ({recipe.origins['run.dir']}) {why}.  Choose another run.dir.")
        status.read(folder)
        resume_setting.check(config, folder / "checkpoints")
    elif config.resume not in resume_setting.WORDS and "/" not in config.resume:
        resume_setting.named(config)


def download_weights(recipe: Recipe, *, has_adapters: bool = False) -> None:
    """Download the weights of a hub name, if the run starts from them or trains adapters beside them.

    has_adapters: whether the command uses adapters, although the recipe may have none
    Raises ConfigError if the download fails.
    """
    config = recipe.config
    is_named = config.checkpoint.resume not in resume_setting.WORDS
    resumes = is_named or bool(folders.candidates(Path(config.run.dir) / "checkpoints"))
    is_used = has_adapters or config.lora.is_used or not resumes
    model = config.model.pretrained
    if model is not None and model.snapshot is not None and config.model.init_from is None and is_used:
        hub_weights.download_weights(model.snapshot)
