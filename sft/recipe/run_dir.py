"""Checks run.dir, and gets the weights from which a start in it begins, before heavy modules are imported."""

from pathlib import Path

from sft.checkpoint import folders, resume_setting
from sft.errors import CheckpointError, ConfigError
from sft.files.atomic_files import why_no_folder
from sft.files.object_store import is_url
from sft.hf import hub, hub_weights
from sft.recipe.resolved import Recipe
from sft.run import status


def check_folder(recipe: Recipe, *, has_files: bool = True) -> None:
    """Raise ConfigError if run.dir cannot be written, and CheckpointError if checkpoint.resume allows no start.

    has_files: whether this machine has the files of the run.  Without them, only a name that is no path is refused.
    """
    config, folder = recipe.config.checkpoint, Path(recipe.config.run.dir)
    if is_url(recipe.config.run.dir):
        raise ConfigError(
            f"run.dir = {recipe.config.run.dir} ({recipe.origins['run.dir']}) must be a folder of this machine.  "
            "Choose one; checkpoint.remote=s3://BUCKET/PATH copies its checkpoints to a store."
        )
    if has_files:
        if why := why_no_folder(folder):
            raise ConfigError(f"run.dir = {folder} ({recipe.origins['run.dir']}) {why}.  Choose another run.dir.")
        status.read(folder)
        resume_setting.check(config, folder / "checkpoints")
    elif config.resume not in resume_setting.WORDS and "/" not in config.resume:
        resume_setting.named(config)


def check_source(source: str | None) -> None:
    """Raise CheckpointError if `source` names no weights, and ConfigError if the hub does not have them.

    For commands that read weights after long work.  A name on the hub is looked up; a folder is not opened.
    source: a checkpoint, run, Hugging Face model or PEFT folder; None: the recipe names the weights
    """
    if source is None:
        return
    if hub.is_hub_name(source):
        hub.snapshot(source)
    elif not any((Path(source) / file).is_file() for file in (hub.CONFIG, hub.ADAPTERS)):
        named_checkpoint(Path(source))


def named_checkpoint(source: Path) -> Path:
    """The Megatron checkpoint `source`, or the newest one of the run or of the folder of checkpoints `source`."""
    try:
        return folders.find([source, source / "checkpoints"], str(source))
    except CheckpointError:
        why = "has none" if source.exists() else f"does not exist in {Path.cwd()}"
        raise CheckpointError(
            f"no weights to score: {source} {why}; expected {folders.EXPECTED}, or a run with checkpoints, or a "
            "Hugging Face folder with config.json and safetensors files, or a PEFT folder with adapter_config.json, or "
            "a name of the hub."
        ) from None


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
