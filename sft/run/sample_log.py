"""seen.jsonl, the sample log: which samples each optimizer step trained on, so that anybody can check "each once".

    {"step": 3, "epoch": 0, "batch": 2, "samples": [4, 17, 23], "chain": "9f2c..."}

`chain` is the SHA-256 of the previous chain and of this line's other values but the step: two runs with the same last
chain trained on the same samples in the same order.  The run's state holds it, so checkpoints do too.  It does not
depend on the layout.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from sft.atomic_files import why_not_written
from sft.errors import StorageError
from sft.parallel.collectives import broadcast_from_rank0

_COPY_BYTES = 1 << 20


def link(chain: str, epoch: int, batch: int, samples: Iterable[int]) -> str:
    """The chain after a global batch (both counted from 0) of these samples.

    It holds no boundaries of packs: the same samples, shared out differently among ranks, give the same chain.
    """
    entry = json.dumps([chain, epoch, batch, sorted(samples)], separators=(",", ":"))
    return hashlib.sha256(entry.encode("ascii")).hexdigest()


class SampleLog:
    """The file of one run.  For rank 0.  Raises OSError where it cannot be opened, StorageError where not written.

    `step` and `chain` are those of the last step done.  Lines of later steps, which a killed run left, are removed.
    Where the lines do not lead up to `step` (a checkpoint of another folder, a machine that lost its last writes), a
    line with "gap" says so.
    """

    def __init__(self, path: Path, step: int, chain: str) -> None:
        # A new file: a run that lost this folder while it hung may still have the old one open, and append to it.
        copy = path.with_name(path.name + ".tmp")
        with path.open("a+b") as old, copy.open("wb") as new:
            end, last = _whole_until(old, step)
            old.seek(0)
            while content := old.read(min(_COPY_BYTES, end - old.tell())):
                new.write(content)
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
            path = Path(self._file.name)
            why = why_not_written(path.parent, error)
            raise StorageError(
                f"the samples of step {step} cannot be written to {path}: {why}.  The last checkpoint is whole."
            ) from error

    def sync(self) -> None:
        """Have the disk hold all lines.  Call it before a checkpoint of the last step."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _put(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row).encode("ascii") + b"\n")
        self._file.flush()


def _whole_until(file: IO[bytes], step: int) -> tuple[int, str]:
    """Where the lines up to `step` end, in bytes, and the chain there.  Stops at the first damaged line."""
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
