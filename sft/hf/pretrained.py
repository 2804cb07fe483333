"""Finds the model that a recipe names and reads its config.json once.  Later code reads `ModelConfig.pretrained`."""

from pathlib import Path
from typing import Any

from sft.config import Config
from sft.config.pretrained import Pretrained
from sft.errors import ConfigError
from sft.hf.architecture import Architecture, architecture, read
from sft.hf.hub import CONFIG, is_hub_name, local_folder, snapshot
from sft.hf.nested_config import text_part
from sft.hf.stored_format import stored_format


def read_pretrained(
    name: str, shown: str | None = None, *, has_format: bool = False
) -> tuple[Pretrained, Architecture]:
    """The model of this name, and what its config.json describes.

    name: a hub name, or a folder that save_pretrained or `sft import` wrote
    shown: the name of config.json in errors; None: its path
    has_format: whether to describe the format of weights in low bits, which takes 0.5 s for a thousand experts
    Raises ConfigError if there is no such model, or if config.json is missing or describes a model that is not
    supported.
    """
    if "://" in name:
        raise ConfigError("this is an address; give a folder, or the name on the hub alone, such as Qwen/Qwen3-8B.")
    on_hub = snapshot(name) if is_hub_name(name) else None
    folder = local_folder(name) if on_hub is None else on_hub.folder
    content = read(folder)
    model = architecture(content, shown or _config_of(name, folder, is_on_hub=on_hub is not None))
    longest = text_part(content, model.family).get(model.family.longest)
    pretrained = Pretrained(
        name=name,
        folder=folder,
        snapshot=on_hub,
        family=model.family.name,
        max_positions=longest if isinstance(longest, int) and longest > 0 else None,
        stored_format=stored_format(content, model) if has_format else None,
    )
    return pretrained, model


def model_keys(pretrained: Pretrained, model: Architecture) -> dict[str, tuple[Any, str]]:
    """The value and the source of each model key that config.json determines.

    {"model.num_layers": (28, "models/Qwen3-0.6B/config.json, num_hidden_layers"), ...}
    """
    path = _config_of(pretrained.name, pretrained.folder, is_on_hub=pretrained.snapshot is not None)
    return {
        f"model.{key}": (value, f"{path}, {model.sources[key]}")
        for key, value in model.values.items()
        if value is not None or key in model.family.fixed
    }


def tokenizer_folder(config: Config) -> Path | None:
    """The folder of the recipe's tokenizer; None for the built-in one.

    Raises ConfigError if data.tokenizer is a hub name whose files cannot be downloaded.
    """
    name, model = config.tokenizer, config.model.pretrained
    if name == "byte":
        return None
    return model.folder if model is not None and model.name == name else local_folder(name)


def _config_of(name: str, folder: Path, *, is_on_hub: bool) -> str:
    """The name of a model's config.json in messages."""
    return f"{name}/{CONFIG}" if is_on_hub else str(folder / CONFIG)
