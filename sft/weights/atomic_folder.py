"""Creates a folder atomically: writes it under a temporary name in the same parent, and renames it at the end.

`COMPANIONS` lists the small files that a conversion copies together with the weights.
"""

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sft.console import size
from sft.errors import CheckpointError, StorageError
from sft.files.atomic_files import flush, unusable
from sft.files.folder_files import LIST_BYTES, UnsafeFileError, copy, matching

# Files that are copied in addition to config.json.  Weights of other formats and code are not copied.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
_OVERHEAD_BYTES = 16 << 20  # size of indexes, headers and companions, which `num_bytes` does not include


def refuse_existing(target: Path) -> None:
    """Raise CheckpointError if `target` exists, even as a broken link."""
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists; nothing was written.  Name a folder that does not exist.")


@contextmanager
def new_folder(target: Path, num_bytes: int) -> Iterator[Path]:
    """A context manager for an empty folder, which is renamed to `target` at the end, or removed after an error.

    num_bytes: size of the large files that the block writes
    Raises StorageError if the disk has no room, and CheckpointError if the target exists, or if the block raises
    UnsafeFileError.  For an OSError in the block, raises StorageError if another try may succeed, else CheckpointError.
    """
    refuse_existing(target)
    parent = target.absolute().parent
    temporary = parent / f"{target.name}.tmp-{secrets.token_hex(4)}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if free < (needed := num_bytes + _OVERHEAD_BYTES):
            raise StorageError(
                f"{target} needs {size(needed)}, but {parent} has {size(free)} free; nothing was written.  Make room "
                "there, or name a folder on another disk."
            )
        temporary.mkdir()
        yield temporary
        for folder, _, names in os.walk(temporary, topdown=False):
            for name in names:
                flush(Path(folder, name))
            flush(Path(folder))
        if os.path.lexists(target):
            raise CheckpointError(f"{target} was created by another process at the same time; nothing was written.")
        os.rename(temporary, target)
        flush(parent)
    except BaseException as error:  # also an interrupt must leave no temporary folder
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise unusable(f"{target} was not written", parent, error, CheckpointError) from error
        if isinstance(error, UnsafeFileError):
            raise CheckpointError(f"{target} was not written: {error}.") from error
        raise


def copy_companions(source: Path, target: Path, patterns: Iterable[str] = COMPANIONS) -> list[str]:
    """Copy the files in `source` that match one of `patterns` to `target`.  Returns their names.

    Raises UnsafeFileError if one of these files is not a regular file in `source`.
    """
    copied = []
    for pattern in patterns:
        for path in matching(source, pattern, LIST_BYTES):
            name = str(path.relative_to(source))
            copy(source, name, target)
            copied.append(name)
    return copied
