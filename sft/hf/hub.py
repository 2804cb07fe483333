"""The local folder of a model or tokenizer that a recipe names."""

from pathlib import Path

CONFIG = "config.json"
IMPORTED = "hf"  # folder of config.json in an imported checkpoint


def local_folder(name: str) -> Path:
    """The folder of config.json and tokenizer: `name`, or the folder hf/ in it if `name` is an imported checkpoint."""
    folder = Path(name)
    if not (folder / CONFIG).exists() and (folder / IMPORTED / CONFIG).exists():
        return folder / IMPORTED
    return folder
