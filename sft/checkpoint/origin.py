"""Records the checkpoint `checkpoint.resume = PATH` from which a run began, and decides whether a PATH names it again.

A repeated command continues from the run's own checkpoints, because going back to PATH would lose their steps.  Paths
change when a folder moves or is mounted at another point.  So a checkpoint is recognised by the digest of its manifest.
Without digests, an equal path means the same checkpoint, and another step in the path's name means another checkpoint.
Any other path decides nothing, and the run is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.checkpoint import folders, manifest
from sft.checkpoint.folders import MARKER
from sft.errors import CheckpointError
from sft.parallel.messages import message


@message
@dataclass(frozen=True, kw_only=True)
class RunOrigin:
    """The checkpoint of checkpoint.resume = PATH from which a run began.  All values are JSON types."""

    path: str  # the absolute path when the run began, with links resolved
    written: str | None  # the value of checkpoint.resume; None in checkpoints of earlier versions
    step: int | None  # the step of the checkpoint; None if it is unknown
    manifest: str | None  # SHA-256 of manifest.json; None if there is none (Megatron-LM) or an earlier version saved

    @staticmethod
    def of(checkpoint: Path, written: str, step: int) -> "RunOrigin":
        """The origin of a run that resumes from `checkpoint`.

        written: the value of checkpoint.resume, a path of this checkpoint or of its folder; step: the checkpoint's step
        """
        resolved, digest = str(Path(written).resolve()), manifest.digest(checkpoint)
        return RunOrigin(path=resolved, written=written, step=step, manifest=digest)

    @staticmethod
    def read(stored: Mapping[str, Any] | str | None) -> "RunOrigin | None":
        """The origin that a checkpoint stores.  Earlier versions stored only the absolute path."""
        if isinstance(stored, str):
            return RunOrigin(path=stored, written=None, step=folders.step_of(Path(stored)), manifest=None)
        return None if stored is None else RunOrigin(**stored)

    def is_named_by(self, path: Path, own_step: int) -> bool:
        """Whether `path`, a checkpoint or a folder of checkpoints, is this origin or contains it.

        own_step: step of the newest checkpoint of the run, for the error message
        Raises CheckpointError if this cannot be decided, if `path` does not exist, or if the path of the origin now
        holds another checkpoint.
        """
        is_one = (path / MARKER).is_file()
        digests = {named: manifest.digest(named) for named in ([path] if is_one else folders.published(path))}
        if self.manifest is not None and self.manifest in digests.values():
            return True
        if str(path) == self.written or str(path.resolve()) == self.path:
            if is_one and self.manifest is not None and digests[path] is not None:
                raise self._refusal(path, own_step, "that path now holds another checkpoint")
            return True
        if not path.exists():
            raise self._refusal(path, own_step, f"that path does not exist in {Path.cwd()}")
        same_step = [digest for named, digest in digests.items() if is_one or folders.step_of(named) == self.step]
        if self.manifest is not None and same_step and None not in same_step:
            return False  # the checkpoint of the same step has another digest
        step = folders.step_of(path.resolve())
        if is_one and None not in (step, self.step) and step != self.step:
            return False
        raise self._refusal(path, own_step, "nothing shows whether that path is the same checkpoint or another one")

    def _refusal(self, path: Path, own_step: int, why: str) -> CheckpointError:
        began = f"{self.path}{'' if self.step is None else f' (step {self.step})'}"
        return CheckpointError(
            f"checkpoint.resume = {path}, but this run began from {began}, and {why}.  Going back to it could give up "
            f"the steps of the run, which has saved step {own_step}.  To continue from its own checkpoints, use "
            "checkpoint.resume=auto.  To begin from another checkpoint, choose another run.dir."
        )
