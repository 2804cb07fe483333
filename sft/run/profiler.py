"""Records CUDA memory history and Chrome traces of the steps and ranks that a recipe chooses.

    RUN/memory_snapshots/step_3/HOST-rank1-pp0-dp0-cp1-tp0-ep0.pickle
    RUN/memory_snapshots/step_7_oom/...          step 7 ran out of memory; step_7_error: step 7 raised another error
    RUN/traces/step_3/HOST-rank1-pp0-dp0-cp1-tp0-ep0.json.gz

Every rank makes its own folders, because nodes need not share a file system.  An error of the profiler is reported in
one line and never ends the run.
"""

import errno
import gzip
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import torch

from sft.config import MemoryProfile, ProfileConfig, TorchProfile
from sft.console import Console
from sft.files.atomic_files import replacing
from sft.parallel.position import Position


class Profiler:
    """A context for a whole run, including the building of the model.  Writes a snapshot if an error ends the run."""

    def __init__(self, config: ProfileConfig, folder: Path, position: Position, console: Console) -> None:
        self._config, self._folder, self._position, self._console = config, folder, position, console
        self._snapshots = _steps(config.memory, position)  # steps that this rank records
        self._traces = _steps(config.torch, position)
        if position.device.type != "cuda":
            self._snapshots = frozenset()
        self._last = max(self._snapshots, default=0)  # no history is recorded after this step
        self._recording = False
        self._step = 0  # the last step that began; 0 before the first step of this process

    def __enter__(self) -> "Profiler":
        self._remove_leftovers()
        for line in self._announcements():
            self._console.say(line)
        if self._snapshots:
            torch.cuda.memory._record_memory_history(max_entries=self._config.memory.max_entries)
            self._recording = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._recording and isinstance(error, Exception):
            ending = "oom" if isinstance(error, torch.OutOfMemoryError) else "error"
            self._snapshot(f"step_{self._step}_{ending}")
        self._stop()

    def _remove_leftovers(self) -> None:
        """Remove temporary files that this rank left in earlier starts, when it was killed while it wrote."""
        for kind in ("memory_snapshots", "traces"):
            for file in (self._folder / kind).glob(f"*/.*-rank{self._position.rank}-*.tmp-*"):
                with self._best_effort(f"{file} was not removed"):
                    file.unlink()

    def _announcements(self) -> Iterator[str]:
        """The lines that rank 0 prints before the first step."""
        snapshots, traces = self._config.memory.steps or [], self._config.torch.steps or []
        if snapshots and self._position.device.type != "cuda":
            yield "profile.memory: nothing is recorded, because a run on the CPU uses no CUDA memory"
        elif snapshots:
            yield f"profile.memory: history until step {max(snapshots)} is written to {self._folder}/memory_snapshots/"
            if early := [str(step) for step in traces if step < max(snapshots)]:
                yield f"profile.torch: recording memory slows down these traced steps: {', '.join(early)}"
        if traces:
            yield f"profile.torch: traces are written to {self._folder}/traces/"

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A context for a step with its evaluation and save.  Records the trace or snapshot that the recipe asks for.

        number: the step, counted from 1 over the whole run
        """
        self._step = number
        if number > self._last:  # a resumed run may begin after the last snapshot
            self._stop()
        with self._trace(number) if number in self._traces else nullcontext():
            yield
        if number in self._snapshots:
            self._snapshot(f"step_{number}")
        if number >= self._last:
            self._stop()

    @contextmanager
    def _trace(self, number: int) -> Iterator[None]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._position.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as trace:
            yield
        self._write("traces", f"step_{number}", ".json.gz", partial(_export, trace))

    def _snapshot(self, step: str) -> None:
        self._write("memory_snapshots", step, ".pickle", torch.cuda.memory._dump_snapshot)

    def _stop(self) -> None:
        if self._recording:
            self._recording = False
            with self._best_effort("recording of memory history did not stop"):
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, kind: str, step: str, suffix: str, save: Callable[[str], None]) -> None:
        """Write a temporary file and rename it, so that a file with its final name is complete."""
        path = self._folder / kind / step / (name(self._position) + suffix)
        with self._best_effort(f"{path} was not written"), replacing(path) as temporary:
            save(str(temporary))

    @contextmanager
    def _best_effort(self, failure: str) -> Iterator[None]:
        """A context that prints an error instead of raising it, so that it neither ends the run nor hides another
        error.

        failure: the beginning of the printed line
        """
        try:
            yield
        except Exception as error:  # torch's profiler may raise any error
            why = " ".join(f"{type(error).__name__}: {error}".split())
            with suppress(OSError):
                print(f"rank {self._position.rank}: {failure}: {why}", file=sys.stderr, flush=True)


def _export(trace: torch.profiler.profile, path: str) -> None:
    """Write the trace as gzip.  Raises OSError if the disk is full.

    If torch compressed the trace, it would first write the text into the system's temporary folder, and not report if
    that disk is full.
    """
    text = Path(f"{path}.json")
    try:
        trace.export_chrome_trace(str(text))
        if not text.exists() or not _ends(text):
            raise OSError(errno.ENOSPC, "torch could not write the trace, as on a full disk")
        with text.open("rb") as plain, gzip.open(path, "wb") as packed:
            shutil.copyfileobj(plain, packed)
    finally:
        for file in (text, Path(f"{text}.tmp")):  # torch writes the second one, and renames it when it is complete
            file.unlink(missing_ok=True)


def _ends(text: Path) -> bool:
    """Whether the text of a trace is complete.  torch does not report if its last write fails."""
    with text.open("rb") as file:
        file.seek(-min(16, text.stat().st_size), os.SEEK_END)
        return file.read().rstrip().endswith(b"}")


def name(position: Position) -> str:
    """The name of a file of this rank, from the host, the rank and its position: node-7-rank3-pp0-dp0-cp1-tp1-ep0"""
    host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())
    at = f"pp{position.pp_rank}-dp{position.dp_rank}-cp{position.cp_rank}-tp{position.tp_rank}-ep{position.ep_rank}"
    return f"{host}-rank{position.rank}-{at}"


def _steps(chosen: MemoryProfile | TorchProfile, position: Position) -> frozenset[int]:
    """The steps that this rank records."""
    if chosen.ranks == "stage":
        is_chosen = position.dp_rank == position.cp_rank == position.tp_rank == 0
    else:
        is_chosen = chosen.ranks == "all" or position.rank in chosen.ranks
    return frozenset(chosen.steps or ()) if is_chosen else frozenset()
