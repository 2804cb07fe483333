"""Facts about the model of model.hf that are not keys of `model`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """The folder of the model, and facts from its config.json that are not keys of a recipe.

    name           value of model.hf in the recipe
    folder         folder of config.json and the tokenizer; weights of a hub name are in it after their download
    commit         commit of a hub name; None: `name` is a folder
    family         name of the table in sft/hf/families that has the model's tensors
    max_positions  length of the longest context that the model was trained on; None: config.json does not say
    """

    name: str
    folder: Path
    commit: str | None
    family: str
    max_positions: int | None
