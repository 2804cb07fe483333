"""The model that model.hf names, as far as a run needs to know it beside the keys of `model`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """The folder of the model, and what its config.json says beside the keys of a recipe.

    name           as the recipe has it
    folder         of config.json and the tokenizer.  Weights of a hub name are in it after their download
    commit         of a hub name; None: `name` is a folder
    family         name of the table in sft/hf/families that has its tensors
    max_positions  length of the longest context that it was trained on; None: config.json does not say
    """

    name: str
    folder: Path
    commit: str | None
    family: str
    max_positions: int | None
