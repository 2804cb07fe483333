"""Writes and reads run_state.json: the progress of a run and how its last start ended, for scripts and users.

`verdict` decides whether another start makes sense.  torchrun turns every exit code except 0 into 1, so a script that
restarts runs must read this file.  Rank 0 calls `begin`, `refuse`, `progress` and `end`; any rank may call `fail`.

The first failure of a start is also in run_state.failure.json until the next start.  Only one rank can create a file of
this name, so later failures do not replace the first.
"""

import json
import os
import socket
import time
import traceback as traces
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from sft.errors import MAY_SUCCEED, ConfigError, SftError
from sft.files.atomic_files import flush, replace_text
from sft.files.folder_files import CONFIG_BYTES, read_file
from sft.parallel.messages import message

FILE = "run_state.json"
FAILURE = "run_state.failure.json"
_MOST_REASON = 500  # characters, so that the file fits into its first block of 4096 bytes
MAX_STARTS = 3

Kind = Literal["running", "done", "preempted", "failed-retryable", "failed-fatal"]


@message
@dataclass(frozen=True)
class Status:
    """The content of run_state.json."""

    status: Kind
    step: int  # the last completed step at the time of the last write
    num_steps: int | None  # None: the run failed before the number was known
    started_at_step: int
    saved_step: int  # step of the newest checkpoint; until this start saves one, `started_at_step`
    start_id: str  # id of this start; calls with the id of an earlier start change nothing
    starts: int  # number of starts in a row from `started_at_step`
    reason: str | None  # one line; for a failure, rank and error
    traceback: str | None
    step_s: float | None  # duration of the last step
    save_s: float | None  # duration of the last save
    time: str  # when the file was written: UTC, ISO 8601
    host: str
    job: str | None


def read(folder: Path) -> Status | None:
    """The status of the run in this folder; None if there is none.  Raises ConfigError if the file is unreadable."""
    path = folder / FILE
    try:
        return parse(json.loads(read_file(path, CONFIG_BYTES)))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, not a Status, or too large
        raise ConfigError(
            f"{path} is not the state of a run: {error}.  The checkpoints do not depend on this file.  Remove it, and "
            f"the run starts from the newest checkpoint."
        ) from error


def begin(folder: Path, *, step: int) -> Status:
    """Record a start that continues after `step`.  Called before a rank can fail.  Raises ConfigError like `read`."""
    before = read(folder)
    in_a_row = before is not None and before.started_at_step == step and before.status != "done"
    status = Status(
        status="running",
        step=step,
        num_steps=before.num_steps if before else None,
        started_at_step=step,
        saved_step=step,
        start_id=_new_id(),
        starts=before.starts + 1 if before and in_a_row else 1,
        reason=None,
        traceback=None,
        step_s=before.step_s if before else None,
        save_s=before.save_s if before else None,
        **_now(),
    )
    _replace(folder, status)
    return status


def copy(folder: Path, status: Status) -> None:
    """Write the status of a start that was recorded elsewhere, in place of the one in this folder."""
    _replace(folder, status)


def refuse(folder: Path, error: SftError) -> None:
    """Record that a start was refused before it began.  Steps and counts of the previous start stay.

    A run that is done stays done: it has all its checkpoints, whatever a later start asks for.
    Called by the process that holds the lock of the folder.  Raises ConfigError like `read`, and OSError if the folder
    cannot be written.
    """
    before = read(folder) or _first(step=0, starts=0)
    if before.status == "done":
        return
    reason = _line(f"refused before it began: {type(error).__name__}: {error}")
    refused = replace(before, status="failed-fatal", start_id=_new_id(), reason=reason, traceback=None, **_now())
    _replace(folder, refused)


def progress(folder: Path, start_id: str | None, *, step: int, step_s: float, save_s: float) -> None:
    """Record that `step` was saved.  step_s, save_s: seconds that the last step and this save took"""
    _change(folder, start_id, step, saved_step=step, step_s=step_s, save_s=save_s)


def end(folder: Path, start_id: str | None, status: Kind, *, step: int, num_steps: int, reason: str | None) -> None:
    """Record that all ranks ended together after `step`.  status: done or preempted"""
    _change(folder, start_id, step, status=status, num_steps=num_steps, reason=_line(reason))


def fail(
    folder: Path, start_id: str | None, error: BaseException, *, rank: int, step: int, finished: Status | None = None
) -> None:
    """Record that rank `rank` ends with an error in or after `step`.  All ranks may call `fail` at once.

    Only the first failure of a start is recorded, because later ones, such as a reset connection, follow from it.
    The status of a run that ended without an error does not change.  Raises OSError if the folder cannot be written.

    finished: the status of a run that was done, and in which this start has changed nothing; the run then stays done
    """
    before = _known(folder, step)
    if before.status != "running" or _is_of_another(before, start_id):
        return
    # After a mistake of the user, another start would fail in the same way.  If a disk or rank failed, it may succeed.
    is_mistake = isinstance(error, SftError) and not isinstance(error, MAY_SUCCEED)
    failed = replace(
        before,
        status="failed-fatal" if is_mistake else "failed-retryable",
        step=step,
        reason=_line(f"rank {rank}: {type(error).__name__}: {error}"),
        traceback="".join(traces.format_exception(error)),
        **_now(),
    )
    if finished is not None:
        failed = replace(finished, start_id=before.start_id)
    own = folder / f"{FAILURE}.{uuid.uuid4().hex}"
    try:
        own.write_text(text_of(failed), encoding="utf-8")
        flush(own)
        os.link(own, folder / FAILURE)
    except FileExistsError:
        pass  # another rank has recorded its failure first
    except OSError:
        _overwrite(folder / FILE, replace(failed, traceback=None, reason=(failed.reason or "")[:_MOST_REASON]))
        raise
    finally:
        with suppress(OSError):
            own.unlink(missing_ok=True)
    _publish_failure(folder)


def verdict(status: Status | None) -> Literal["done", "go on", "stop"]:
    """Whether a script should start the run again: "done" and "stop" mean no, "go on" means yes.

    A killed run still has the status "running", and a run that never started has None; a script should start both.  It
    should stop after `MAX_STARTS` starts in a row from the same step if the last start saved nothing.
    """
    if status is None:
        return "go on"
    if status.status == "done":
        return "done"
    is_stuck = status.starts >= MAX_STARTS and status.saved_step <= status.started_at_step
    return "stop" if status.status == "failed-fatal" or is_stuck else "go on"


def describe(status: Status) -> str:
    """The status in words, in one or two lines:

    failed-retryable at step 12 of 100 (2026-01-31T12:00:00+00:00, host n1, job 7; start 2 in a row from step 10)
    rank 3: RuntimeError: CUDA error
    """
    of = "" if status.num_steps is None else f" of {status.num_steps}"
    job = f", job {status.job}" if status.job else ""
    start = f"start {status.starts} in a row" if status.starts > 1 else "started"
    head = (
        f"{status.status} at step {status.step}{of} ({status.time}, host {status.host}{job}; {start} from step "
        f"{status.started_at_step})"
    )
    return head if status.reason is None else f"{head}\n{status.reason}"


def _known(folder: Path, step: int) -> Status:
    """The status in the file; a minimal status if the file was removed or damaged during the run."""
    try:
        if status := read(folder):
            return status
    except ConfigError:
        pass
    return _first(step=step, starts=1)


def _first(*, step: int, starts: int) -> Status:
    """A status for a folder without a readable status."""
    return Status("running", step, None, step, step, "", starts, None, None, None, None, **_now())


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


def _replace(folder: Path, status: Status) -> None:
    """Write the status of a new start, and remove the failure of the previous start."""
    for leftover in folder.glob(f"{FAILURE}*"):  # left by the previous start, or by a rank that was killed in `fail`
        leftover.unlink(missing_ok=True)
    replace_text(folder / FILE, text_of(status), sync=True)


def _is_of_another(known: Status, start_id: str | None) -> bool:
    """Whether another start has begun in this folder since the caller's start."""
    return start_id is not None and known.start_id not in ("", start_id)


def _change(folder: Path, start_id: str | None, step: int, **changes: Any) -> None:
    """Change the status, unless another start has begun or a rank has failed meanwhile.  Called on rank 0."""
    before = _known(folder, step)
    if _is_of_another(before, start_id):
        return
    if not (folder / FAILURE).exists():
        replace_text(folder / FILE, text_of(replace(before, step=step, **changes, **_now())), sync=True)
    if (folder / FAILURE).exists():  # written since the check above
        _publish_failure(folder)


def _overwrite(path: Path, status: Status) -> None:
    """Write the status into the blocks that the file already has, because a full disk has no free blocks.

    A reader may see an incomplete status.  On a full disk, there is no other way to record that the run has ended.
    """
    content = text_of(status).encode()
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(file, content, 0)
            os.truncate(file, len(content))
            os.fsync(file)
        finally:
            os.close(file)


def _publish_failure(folder: Path) -> None:
    """Replace the status by the recorded failure.  All ranks may call this at once; each renames a copy of its own."""
    copy = folder / f"{FAILURE}.{uuid.uuid4().hex}"
    os.link(folder / FAILURE, copy)
    os.replace(copy, folder / FILE)
    copy.unlink(missing_ok=True)  # os.replace leaves both names if they belong to the same file
    flush(folder)


def _now() -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "host": socket.gethostname(),
        "job": os.environ.get("SLURM_JOB_ID"),
    }


def _line(text: str | None) -> str | None:
    return None if text is None else " ".join(text.split())


def text_of(status: Status) -> str:
    """The content of run_state.json."""
    return json.dumps(asdict(status), indent=2) + "\n"


def parse(values: Any) -> Status:
    """The status in a JSON value.  Raises ValueError if the value is not a status."""
    names = [field.name for field in fields(Status)]
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise ValueError(f"it must be an object with {', '.join(names)}")
    if values["status"] not in get_args(Kind):
        raise ValueError(f"status is {values['status']!r}, not one of {', '.join(get_args(Kind))}")
    for field in fields(Status):
        if field.name != "status" and not _is_valid(values[field.name], field.type):
            raise ValueError(f"{field.name} is {values[field.name]!r}, a value that no run writes")
    return Status(**values)


def _is_valid(value: object, kind: Any) -> bool:
    """Whether the value has type `kind` and is not negative.  Integers pass as floats: some JSON writers drop .0."""
    allowed = get_args(kind) or (kind,)
    if isinstance(value, bool):
        return False
    if isinstance(value, (int, float)):
        return value >= 0 and (isinstance(value, allowed) or float in allowed)
    return isinstance(value, allowed)
