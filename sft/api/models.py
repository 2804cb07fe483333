"""`sft.export`: writes a checkpoint as a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sft.console import Console

if TYPE_CHECKING:
    from sft.config.checkpoint import ExportFormat


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A folder that transformers, PEFT and inference servers load.

    folder      the new folder, or its URL
    checkpoint  the checkpoint that was converted
    num_bytes   bytes of all files of the folder
    """

    folder: Path | str
    checkpoint: Path
    num_bytes: int


def export(
    source: str | Path,
    target: str | Path,
    *,
    hf: str | Path | None = None,
    verify: Literal["full", "size"] = "full",
    dtype: Literal["float32", "float16", "bfloat16"] | None = None,
    format: "ExportFormat | None" = None,
    merged: bool | None = None,
    quiet: bool = False,
) -> Exported:
    """Convert a checkpoint to the new Hugging Face folder `target`, to s3://BUCKET/PATH or to hf://OWNER/NAME, in one
    process without a GPU.

    source: a checkpoint; or a run or a folder of checkpoints, whose newest checkpoint is converted
    hf: folder or hub name of the original model, for a checkpoint that does not name it
    verify: compare the SHA-256 (full) or only the sizes of the checkpoint's files with its manifest
    dtype: type of the trained tensors; None: the type that each has in the original model
    format: bf16 (not quantised), as_source, fp8_block, mxfp4, nvfp4 or int4; None follows checkpoint.export_format
    merged: True adds LoRA adapters to the weights, False writes the adapters alone, None follows lora.export
    quiet: print only warnings

    Raises ConfigError or CheckpointError if there is no checkpoint, if it is damaged or of another model, or if the
    target exists, and StorageError if the disk has too little room.  Then nothing was written.
    """
    from sft.files.object_store import is_url
    from sft.hf.hub_weights import model_folder
    from sft.weights.export.export_hf import export_hf
    from sft.weights.export.remote_export import export_to_url

    like = None if hf is None else model_folder(str(hf))
    console, options = Console(0, is_quiet=quiet), dict(like=like, dtype=dtype, format=format, merged=merged)
    if is_url(str(target)):
        checkpoint, num_bytes = export_to_url(Path(source), str(target), console, verify=verify, **options)
        return Exported(folder=str(target), checkpoint=checkpoint, num_bytes=num_bytes)
    folder = Path(target)
    checkpoint = export_hf(Path(source), folder, console, verify=verify, **options)
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Exported(folder=folder, checkpoint=checkpoint, num_bytes=num_bytes)
