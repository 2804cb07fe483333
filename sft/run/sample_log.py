"""seen.jsonl: which samples each optimizer step trained on, so that "every sample once" can be checked by anybody.

    {"step": 3, "epoch": 0, "batch": 2, "samples": [4, 17, 23], "chain": "9f2c..."}

`chain` is the SHA-256 of the chain before and of this line's other values: two runs with the same last chain have
seen the same samples in the same steps.  It is a value of the run's state, so checkpoints carry it; the layout does
not enter into it.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from sft.errors import StorageError
from sft.parallel.collectives import broadcast_from_rank0

_PIECE = 1 << 20


def link(chain: str, epoch: int, batch: int, samples: Iterable[int]) -> str:
    """The chain after a global batch (both counted from 0) of these samples.

    The ends of packs do not enter: how a batch is shared out among ranks is not which samples it has.
    """
    told = json.dumps([chain, epoch, batch, sorted(samples)], separators=(",", ":"))
    return hashlib.sha256(told.encode("ascii")).hexdigest()


class SampleLog:
    """The file of one run.  For rank 0.  Raises OSError where it cannot be opened, StorageError where not written.

    step and chain are those of the last step done: lines of later steps are of a run that was cut off, and are removed.
    Where the file does not lead up to there (another folder's checkpoint, a machine that lost its last writes), a line
    says so.
    """

    def __init__(self, path: Path, step: int, chain: str) -> None:
        # A file of its own: a run that lost this folder while it hung may still have the old one open, and add to it.
        copy = path.with_name(path.name + ".tmp")
        with path.open("a+b") as old, copy.open("wb") as new:
            end, last = _whole_until(old, step)
            old.seek(0)
            while piece := old.read(min(_PIECE, end - old.tell())):
                new.write(piece)
        os.replace(copy, path)
        self._file = path.open("ab")
        if last != chain:
            self._put({"step": step, "gap": "the lines before do not lead up to this step", "chain": chain})

    @staticmethod
    def open(path: Path, step: int, chain: str) -> "SampleLog | None":
        """The log on rank 0, None on the others.  Collective."""
        opened: list[SampleLog] = []
        broadcast_from_rank0(lambda: opened.append(SampleLog(path, step, chain)))
        return opened[0] if opened else None

    def write(self, step: int, epoch: int, batch: int, samples: Iterable[int], chain: str) -> None:
        row = {"step": step, "epoch": epoch, "batch": batch, "samples": sorted(samples), "chain": chain}
        try:
            self._put(row)
        except OSError as error:
            raise StorageError(
                f"the samples of step {step} cannot be written to {self._file.name}: {error}.  The last checkpoint is "
                f"whole."
            ) from error

    def sync(self) -> None:
        """On the disk: before a checkpoint that leads on from here."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _put(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row).encode("ascii") + b"\n")
        self._file.flush()


def _whole_until(file: IO[bytes], step: int) -> tuple[int, str]:
    """Where the lines up to `step` end, and the chain there; at the first line that is not whole at the latest."""
    file.seek(0)
    end, chain = 0, ""
    for line in file:
        try:
            row = json.loads(line)
            its_step, its_chain = int(row["step"]), str(row["chain"])
        except (ValueError, KeyError, TypeError, OverflowError):
            break
        if its_step > step or not line.endswith(b"\n"):
            break
        end, chain = end + len(line), its_chain
    return end, chain
