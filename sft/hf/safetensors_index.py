"""Reads the index of a Hugging Face folder, which says in which safetensors file each tensor is."""

from pathlib import Path

from sft.errors import CheckpointError
from sft.files.folder_files import LIST_BYTES, read_json
from sft.hf.hub import INDEX, SHARD, SINGLE


def read_index(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, from the index; None if one file has all tensors.

    Raises CheckpointError if there are no weights, if the index is damaged or cannot be read, or if both forms exist.
    """
    single, index = (folder / SINGLE).exists(), (folder / INDEX).exists()
    if single and index:
        raise CheckpointError(
            f"{folder} has both {SINGLE} and {INDEX}, but only one of them may exist.  Remove the wrong file."
        )
    if not single and not index:
        pickles = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
        has = (
            f"has {pickles[0]}, a pickle file.  Pickle files can run code, so this trainer does not open them"
            if pickles
            else "has no weights"
        )
        raise CheckpointError(
            f"{folder} {has}: expected {SINGLE}, or {INDEX} and the files that it names.  transformers converts the "
            "weights: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OTHER)."
        )
    if single:
        return None
    try:
        names: dict[str, str] = read_json(folder, INDEX, LIST_BYTES)["weight_map"]
        if not names or not all(isinstance(name, str) for pair in names.items() for name in pair):
            raise ValueError("weight_map does not map names to names")
    except OSError as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read: {error.strerror}.") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / INDEX} is damaged ({type(error).__name__}: {error}).") from None
    for name in names.values():
        if not SHARD.fullmatch(name):
            shown = repr(name[:80])
            raise CheckpointError(f"{folder / INDEX} names {shown}, which is not a safetensors file of this folder.")
    return names
