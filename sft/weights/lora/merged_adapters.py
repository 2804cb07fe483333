"""Reads and writes merged_adapters.json, which lists the adapters merged into weights, so that none is merged twice.

    {"format": "sft merged adapters 1",
     "adapters": [{"checkpoint": "runs/a/checkpoints/iter_0000100", "step": 100, "base": SHA-256, "sha256": SHA-256}]}

`base` is the digest of the frozen weights beside which the adapters were trained (`base_digest.py`), before the merge.
`sha256` is the digest of the checkpoint's manifest.  The manifest of a PEFT folder with the same adapters has the same
digest.  transformers and inference servers do not read merged_adapters.json.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sft.checkpoint import manifest
from sft.errors import CheckpointError
from sft.files.folder_files import CONFIG_BYTES, read_json
from sft.weights.background_exports import CHECKPOINT_DIGEST

NAME = "merged_adapters.json"
FORMAT = "sft merged adapters 1"


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The adapters of one checkpoint, which are merged into weights."""

    checkpoint: str  # path of the checkpoint of the adapters
    step: int
    base: str  # digest of the frozen weights beside which the adapters were trained, before the merge
    sha256: str | None  # digest of the checkpoint's manifest; None if it has none


def read(folder: Path) -> list[Merged]:
    """The adapters merged into the weights of a folder, oldest first.  Raises CheckpointError for a damaged file."""
    path = folder / NAME
    if not path.exists():
        return []
    try:
        content = read_json(folder, NAME, CONFIG_BYTES)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        return [Merged(**entry) for entry in content["adapters"]]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}).  Copy it again.") from None


def write(folder: Path, adapters: Sequence[Merged]) -> None:
    """Write merged_adapters.json into the folder of the merged weights.  adapters: oldest first"""
    content = {"format": FORMAT, "adapters": [asdict(entry) for entry in adapters]}
    (folder / NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def refuse(folder: Path, base: str | None, subject: str) -> None:
    """Raise CheckpointError if adapters that were trained beside `base` are merged into the weights of `folder`.

    base: digest of the frozen weights beside which the adapters of `subject` were trained
    """
    for entry in read(folder):
        if entry.base == base:
            raise CheckpointError(
                f"{subject} has adapters of the weights {entry.base[:12]}, and {folder} holds these weights with "
                f"adapters merged already: those of {entry.checkpoint} (step {entry.step}).  They would be added "
                "twice.  Name the folder of the weights before the merge."
            )


def refuse_adapter(folder: Path, adapter: Path) -> None:
    """Raise CheckpointError if the adapters in the export `adapter` are merged into the weights of `folder`."""
    holds = read(folder)
    exported = manifest.read(adapter) if holds else None
    digest = exported and exported.facts.get(CHECKPOINT_DIGEST)
    for entry in holds:
        if digest and entry.sha256 == digest:
            raise CheckpointError(
                f"{adapter} has the adapters of {entry.checkpoint} (step {entry.step}), which {folder} holds, merged "
                "into its weights.  They would be added twice.  Name the folder of the weights before the merge."
            )
