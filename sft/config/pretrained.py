"""Defines the facts about the model of model.hf that are not keys of `model`.

They are found once, when the recipe is loaded.  Later code does not look up the name or read config.json again.
"""

from dataclasses import dataclass
from pathlib import Path

from sft.config.weight_format import WeightFormat


@dataclass(frozen=True, kw_only=True)
class HubSnapshot:
    """A commit of a hub repository in the local cache.  It has weights only after `hub_weights.download_weights`.

    name    the hub name as the recipe gives it
    repo    the hub name without a revision
    folder  the folder of the commit in the cache
    """

    name: str
    repo: str
    commit: str
    folder: Path


@dataclass(frozen=True, kw_only=True)
class NewRow:
    """A row of the embedding, and of the output weight, that a run adds to a model.

    token   the text of the token
    pieces  ids of the tokens as which the model's tokenizer wrote this text before
    """

    token_id: int
    token: str
    pieces: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """The folder of the model, and facts from its config.json that are not keys of a recipe.

    name           value of model.hf in the recipe
    folder         folder of config.json and the tokenizer; weights of a hub name are in it after their download
    snapshot       the commit of a hub name; None: `name` is a folder
    family         name of the table in sft/hf/families that has the model's tensors
    max_positions  length of the longest context that the model was trained on; None: config.json does not say
    stored_format  format in which the files store weights in low bits; None: they store none
    new_rows       rows of data.add_tokens, which the files do not have, or have untrained
    """

    name: str
    folder: Path
    snapshot: HubSnapshot | None
    family: str
    max_positions: int | None
    stored_format: WeightFormat | None = None
    new_rows: tuple[NewRow, ...] = ()
