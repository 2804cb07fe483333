"""Lets one process of each node do work for all ranks on that node, before process groups exist.

The process with LOCAL_RANK 0 works while it holds a lock on a file in the temporary folder of the node, and writes the
result, or its error, into this file.  The others wait for the lock and read the file.  The name of the file depends on
the start of the run, so the result of an earlier start is not used.
"""

import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sft.errors import ConfigError

_IDENTITY = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)
_SECONDS_TO_BEGIN = 300.0  # how long others wait until the process with LOCAL_RANK 0 begins
_SECONDS_EARLIER = 60.0  # a process accepts results that were written up to this long before its own start
_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_KEPT = 86_400.0  # older files of results are removed


def once_per_node(task: str, work: Callable[[], str]) -> str:
    """The result of `work`, which one process of the node does.  A process outside of a run does the work itself.

    task: names the work; every process of the node asks for the same tasks
    Raises the ConfigError of the process that works, on all processes.
    """
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is None or os.environ.get("LOCAL_WORLD_SIZE") == "1":
        return work()
    path = _file(task)
    answer = _work(path, work) if local_rank == "0" else _wait(path, task)
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["result"]


def _work(path: Path, work: Callable[[], str]) -> dict[str, str]:
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        try:
            answer = {"result": work()}
        except ConfigError as error:
            answer = {"error": str(error)}
        file.write(json.dumps(answer))
    return answer  # closing the file has released the lock


def _wait(path: Path, task: str) -> dict[str, str]:
    import psutil

    oldest = psutil.Process().create_time() - _SECONDS_EARLIER
    deadline = time.monotonic() + _SECONDS_TO_BEGIN
    while time.monotonic() < deadline:
        with path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # the process with LOCAL_RANK 0 is working
                deadline = time.monotonic() + _SECONDS_TO_BEGIN
            else:
                file.seek(0)
                text = file.read()
                if text and os.fstat(file.fileno()).st_mtime >= oldest:
                    answer: dict[str, str] = json.loads(text)
                    return answer
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    raise ConfigError(
        f"the process with LOCAL_RANK 0 of this node did not begin to {task} within {_SECONDS_TO_BEGIN:.0f} s.  Start "
        "all processes of a node together, with torchrun or srun, and with one temporary folder (TMPDIR)."
    )


def _file(task: str) -> Path:
    folder = Path(tempfile.gettempdir()) / f"sft-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to another user.  Set TMPDIR to a folder of your own.")
    for old in folder.iterdir():
        if time.time() - old.stat().st_mtime > _SECONDS_KEPT:
            old.unlink(missing_ok=True)
    parts = [os.environ.get(name, "") for name in _IDENTITY]
    if "TORCHELASTIC_RUN_ID" in os.environ:  # starts of torchrun may share the run ID, but not the parent process
        parts.append(str(os.getppid()))
    return folder / hashlib.sha256(json.dumps([task, *parts]).encode()).hexdigest()[:32]
