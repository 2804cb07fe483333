"""Exports published checkpoints to Hugging Face folders while the run trains, as `checkpoint.export_hf` says.

    run.dir/hf_exports/
        iter_0000100/       export_hf = every: the checkpoint of step 100
        best_0000100/       export_hf = best: the best checkpoint; replaces the export of the previous best checkpoint
        last_0000200/       export_hf = last: the checkpoint of the last step
        last_0000200.log    the output of the export

An export is a process, `sft export`, which reads the published checkpoint, uses no GPU and ends with the run.  One
export runs at a time.  A folder gets its final name when it is complete.  Rank 0 uses this module.
"""

import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from sft.checkpoint import folders, manifest
from sft.checkpoint.train_state import TrainState
from sft.config import CheckpointConfig
from sft.console import Console
from sft.errors import CheckpointError, StorageError
from sft.files.file_digest import entry_of

FOLDER = "hf_exports"
CHECKPOINT_DIGEST = "checkpoint_sha256"  # fact in the manifest of an export: SHA-256 of the checkpoint's manifest
_NICENESS = 10  # lowers the priority of an export below that of the ranks on its node
# Environment variables of a rank, which an export must not inherit.
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Exports:
    """The exports of one run.  Methods may be called by any thread of rank 0."""

    def __init__(self, config: CheckpointConfig, run: Path, console: Console) -> None:
        self._mode, self._run, self._console = config.export_hf, run, console
        self._format = config.export_format
        self._prefix = "iter" if self._mode == "every" else self._mode
        self._changed = threading.Condition()  # guards all fields below
        self._steps: list[int] = []  # the step that is being exported, and the steps that follow
        self._failed: dict[int, str] = {}
        self._worker: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def resumed(self, state: TrainState, *, is_last: bool) -> None:
        """Remove temporary folders of a killed export, and make the exports that are due and missing.

        state: the state from which the run continues; is_last: whether its step is the last step of the run
        """
        if self._mode == "none":
            return
        for leftover in self._folder.glob("*.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for path in folders.published(self._run / "checkpoints"):
            step = folders.step_of(path)
            assert step is not None
            if step <= state.step:
                self.published(step, is_best=step == state.best_step, is_last=is_last and step == state.step)

    def published(self, step: int, *, is_best: bool, is_last: bool) -> None:
        """Export the published checkpoint of `step` if it is due and has not been exported."""
        is_due = {"none": False, "every": True, "best": is_best, "last": is_last}[self._mode]
        if not is_due or self._is_exported(step):
            return
        with self._changed:
            if self._mode == "best":
                del self._steps[1:]  # exports of earlier best checkpoints that have not begun
            if step not in self._steps:
                self._steps.append(step)
            self._failed.pop(step, None)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="exports", daemon=True)
                self._worker.start()

    def in_use(self) -> Collection[int]:
        """The steps whose checkpoints must not be removed, because their exports are running, waiting or failed."""
        with self._changed:
            return {*self._steps, *self._failed}

    def is_busy(self, *, wait_s: float) -> bool:
        """Wait until all exports are done, at most `wait_s` seconds.  Returns whether some are still left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._steps, wait_s)
            return bool(self._steps)

    def num_bytes(self) -> int:
        """The number of bytes that the running export has written."""
        return sum(file.stat().st_size for file in self._folder.glob("*.tmp-*/*"))

    def stop(self) -> None:
        """End the running export.  The next start of the run makes it again."""
        with self._changed:
            self._is_stopped = True
            self._steps.clear()
            if self._process is not None:
                self._process.kill()

    def refuse_failures(self) -> None:
        """Raise StorageError if an export failed."""
        with self._changed:
            failures = [f"step {step}: {reason}" for step, reason in sorted(self._failed.items())]
        if failures:
            raise StorageError(
                f"all steps are done and saved, but {len(failures)} of the exports to {self._folder} failed.  "
                f"{'  '.join(failures)}  To make them again, repeat the command of the run, or use sft export."
            )

    @property
    def _folder(self) -> Path:
        return self._run / FOLDER

    def _target(self, step: int) -> Path:
        return self._folder / f"{self._prefix}_{step:07d}"

    def _is_exported(self, step: int) -> bool:
        """Whether there is an export of the checkpoint that this step has now.

        If the run resumed from an earlier step, an older checkpoint of the same step may have been exported.
        """
        checkpoint = self._run / "checkpoints" / folders.name_of(step) / manifest.NAME
        try:
            exported = manifest.read(self._target(step))
            return exported is not None and exported.facts.get(CHECKPOINT_DIGEST) == entry_of(checkpoint).sha256
        except (OSError, CheckpointError):
            return False

    def _work(self) -> None:
        """Make exports until none is left.

        Runs in one thread, because an export process ends when the thread that started it ends.
        """
        while True:
            with self._changed:
                if not self._steps:
                    self._worker = None
                    return
                step = self._steps[0]
            try:
                failure = self._export(step)
            except OSError as error:
                failure = f"{type(error).__name__}: {error}."
            with self._changed:
                if failure and not self._is_stopped:
                    self._failed[step] = failure
                    self._console.say(
                        f"WARNING: the checkpoint of step {step} was not exported: {failure}  Training goes on."
                    )
                self._steps = [other for other in self._steps if other != step]
                self._changed.notify_all()

    def _export(self, step: int) -> str | None:
        """Export the checkpoint of `step`.  Returns the reason if that fails, else None."""
        target, started = self._target(step), time.monotonic()
        self._folder.mkdir(exist_ok=True)
        self._remove(target)  # an export of an older checkpoint of this step
        log = target.with_name(f"{target.name}.log")
        command = [sys.executable, "-m", "sft", "export", "--end-with", str(os.getpid())]
        command += [str(self._run / "checkpoints" / folders.name_of(step)), str(target)]
        command += ["--format", self._format]
        environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
        with log.open("wb") as output:
            with self._changed:
                if self._is_stopped:
                    return None
                self._process = process = subprocess.Popen(
                    command,
                    env={**environment, "CUDA_VISIBLE_DEVICES": ""},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a signal to the run does not end the export
                )
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
            code = process.wait()
        if code != 0:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return f"{lines[-1] if lines else f'exit code {code}'}  ({log})"
        if self._prefix != "iter":  # `best` and `last` keep one export
            for other in self._folder.glob(f"{self._prefix}_*"):
                if other.is_dir() and other != target:
                    self._remove(other)
            with self._changed:
                self._failed.clear()
        self._console.say(f"exported step {step} to {target} in {time.monotonic() - started:.1f} s")
        return None

    def _remove(self, export: Path) -> None:
        """Remove an export and its log.  Renames the folder first, so that only complete exports have a final name."""
        if export.is_dir():
            renamed = export.with_name(f"{export.name}.tmp-{secrets.token_hex(4)}")
            os.rename(export, renamed)
            shutil.rmtree(renamed, ignore_errors=True)
        export.with_name(f"{export.name}.log").unlink(missing_ok=True)
