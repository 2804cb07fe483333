"""The sample log, seen.jsonl, records which samples each optimizer step used.

    {"step": 3, "epoch": 0, "batch": 2, "samples": [4, 17, 23], "chain": "9f2c..."}

`chain` is the SHA-256 of the previous chain and of this line's epoch, batch and samples.  Two runs with the same last
chain trained on the same samples in the same order.  Checkpoints contain the chain.  The chain does not depend on the
layout.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from sft.errors import ConfigError, StorageError
from sft.files.atomic_files import append, why_not_written
from sft.files.folder_files import LIST_BYTES, UnsafeFileError, open_file
from sft.parallel.collectives import broadcast_from_rank0

_COPY_BYTES = 1 << 20


def link(chain: str, epoch: int, batch: int, samples: Iterable[int]) -> str:
    """The chain digest after a global batch of these samples.

    chain: the chain digest before the batch; epoch, batch: counted from 0
    The result does not depend on the division of the samples into packs, or on their assignment to ranks.
    """
    entry = json.dumps([chain, epoch, batch, sorted(samples)], separators=(",", ":"))
    return hashlib.sha256(entry.encode("ascii")).hexdigest()


class SampleLog:
    """The sample log of one run, on rank 0.

    step, chain: the last completed step, and the chain digest after it
    The constructor removes lines of later steps, which a killed run left.  It adds a line with "gap" if lines before
    `step` are missing, for example because the checkpoint comes from another folder, or because the machine lost its
    last writes.

    The constructor raises OSError if the file cannot be opened, and ConfigError if `path` is not a regular file.
    `write` raises StorageError.
    """

    def __init__(self, path: Path, step: int, chain: str) -> None:
        # Writes a new file, because a run that hung and lost its lock may still append to the old file.
        copy = path.with_name(path.name + ".tmp")
        with _opened(path) as old, copy.open("wb") as new:
            end, last = _whole_until(old, step)
            old.seek(0)
            while content := old.read(min(_COPY_BYTES, end - old.tell())):
                new.write(content)
        os.replace(copy, path)
        self._file = path.open("ab", buffering=0)
        if last != chain:
            self._put({"step": step, "gap": "lines before this step are missing", "chain": chain})

    @staticmethod
    def open(path: Path, step: int, chain: str, group: dist.ProcessGroup) -> "SampleLog | None":
        """The log on rank 0, None on the other ranks.  Collective over `group`."""
        opened: list[SampleLog] = []
        broadcast_from_rank0(lambda: opened.append(SampleLog(path, step, chain)), group)
        return opened[0] if opened else None

    def write(self, step: int, epoch: int, batch: int, samples: Iterable[int], chain: str) -> None:
        """Add the line of a step.  chain: the chain digest after it.  Raises StorageError."""
        row = {"step": step, "epoch": epoch, "batch": batch, "samples": sorted(samples), "chain": chain}
        try:
            self._put(row)
        except OSError as error:
            path = Path(self._file.name)
            why = why_not_written(path.parent, error)
            raise StorageError(
                f"the samples of step {step} cannot be written to {path}: {why}.  The last checkpoint is complete."
            ) from error

    def sync(self) -> None:
        """Flush all lines to disk.  Called before a checkpoint is saved."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _put(self, row: dict[str, Any]) -> None:
        append(self._file, json.dumps(row).encode("ascii") + b"\n")


def _opened(path: Path) -> IO[bytes]:
    """The file at `path`, open for reading.  It is created if it does not exist."""
    try:
        return open_file(path)
    except FileNotFoundError:
        return path.open("w+b")
    except UnsafeFileError as error:
        raise ConfigError(f"{error}.  Remove it; the run then begins a new log of its samples.") from None


def _whole_until(file: IO[bytes], step: int) -> tuple[int, str]:
    """The byte offset at which the lines up to `step` end, and the chain digest of the last of them.

    Stops at the first damaged line.
    """
    file.seek(0)
    end, chain = 0, ""
    while line := file.readline(LIST_BYTES):  # the part of a longer line has no newline, so it counts as damaged
        try:
            row = json.loads(line)
            its_step, its_chain = int(row["step"]), str(row["chain"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            break
        if its_step > step or not line.endswith(b"\n"):
            break
        end, chain = end + len(line), its_chain
    return end, chain
