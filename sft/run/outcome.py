"""Defines the outcome of one start of a run, which `sft.train` returns.  Other processes read run_state.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOPPED = 75  # exit code (EX_TEMPFAIL) of a run that was asked to stop and saved a checkpoint


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one start of a run.  The outcomes of all ranks are equal, except for times in `last`.

    folder     run.dir
    step       the last completed step
    num_steps  number of steps of the whole run
    stopped    the reason why the run stopped before its end, such as "SIGTERM"; None if the run is done.  A stopped run
               has saved a checkpoint, and continues when it is trained again
    last       the record of the last step that this start trained, with the names and units of metrics.jsonl
               (docs/reference/metrics.md), such as last["lm loss"]; None if this start trained no step
    """

    folder: Path
    step: int
    num_steps: int
    stopped: str | None
    last: Mapping[str, Any] | None

    @property
    def is_done(self) -> bool:
        return self.stopped is None

    @property
    def exit_code(self) -> int:
        """The exit code of `sft train`: 0 if the run is done, 75 if it should be started again."""
        return 0 if self.is_done else STOPPED


def closing_line(outcome: Outcome) -> str:
    """The last line of the log: where the files of the run are, or why the run stopped."""
    if outcome.stopped is None:
        files = "checkpoints/, tensorboard/, metrics.jsonl, seen.jsonl, recipe.yaml, data.json and run_state.json"
        return f"done: {outcome.folder}/ holds {files}"
    return (
        f"stopped after step {outcome.step} of {outcome.num_steps} ({outcome.stopped}); the same command resumes the "
        f"run.  The exit code is {STOPPED}, which torchrun reports as a failure"
    )
