"""`model.hf: DIR` -> the keys of `model.*` that its config.json gives, and where each stands in it."""

from pathlib import Path
from typing import Any

from sft.hf.architecture import CONFIG, architecture, read

IMPORTED = "hf"  # where an imported checkpoint keeps config.json


def model_keys(folder: str) -> dict[str, tuple[Any, str]]:
    """{"model.num_layers": (28, "models/Qwen3-0.6B/config.json, num_hidden_layers"), ...}

    folder: as save_pretrained writes it, or made by tools/import_hf.py
    Raises ConfigError where config.json is missing, or describes a model that is not supported.
    """
    path = Path(folder)
    if not (path / CONFIG).exists() and (path / IMPORTED / CONFIG).exists():
        path /= IMPORTED
    model = architecture(read(path), str(path / CONFIG))
    return {
        f"model.{key}": (value, f"{path / CONFIG}, {model.sources[key]}")
        for key, value in model.values.items()
        if value is not None or key in model.family.implied
    }
