"""Runs `sft` with faults: python -m tests.faults.inject train RECIPE ...

Wraps functions of sft or of its libraries.  The fault happens before or after a chosen call on a chosen rank; sft
itself has no code for it.  The environment variable SFT_FAULTS lists the faults as JSON:

    SFT_FAULTS='[{"at": "sft.checkpoint.folders:publish", "do": "kill", "rank": 0, "call": 2}]'

at     module:name.name of the wrapped function; every caller that looks it up by this name meets the wrapper
when   whether the fault happens before (default) or after the call
rank   the rank of the fault; null (default): all ranks
call   number of the call, from 1 (default) on, among the calls in this process that match
step   the fault happens only during this step of training
match  only calls count whose printed arguments contain this regular expression
every  the fault also happens at all later calls
do     kill, kill-all, stop, term, usr1, int, hup, quit, exit-0, sleep (s: seconds), full, memory, error, missing: the
       fault; or a name in `_TURNS`, whose function replaces the call

Every fault that strikes adds a line to the file SFT_FAULTS_LOG, so that a test can check that it struck.
"""

import errno
import functools
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULTS, LOG = "SFT_FAULTS", "SFT_FAULTS_LOG"
_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "usr1": signal.SIGUSR1,
    "int": signal.SIGINT,
    "hup": signal.SIGHUP,
    "quit": signal.SIGQUIT,
}
_ERRORS: dict[str, Callable[[], BaseException]] = {
    "full": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "memory": lambda: MemoryError("injected"),
    "error": lambda: RuntimeError("injected"),
    "missing": lambda: FileNotFoundError(errno.ENOENT, "not seen yet"),
}
_now = {"step": 0}  # the current training step, as reported to the watchdog


def arm(faults: list[dict[str, Any]]) -> None:
    """Wraps the functions that the faults of this rank name."""
    rank = int(os.environ.get("RANK", "0"))
    Path(f"{os.environ[LOG]}.pid.{rank}").write_text(str(os.getpid()))
    if any("step" in fault for fault in faults):
        _wrap("sft.run.lifecycle:Lifecycle.phase", _follow_step)
    for index, fault in enumerate(faults):
        if fault.get("rank") in (None, rank):
            _wrap(fault["at"], functools.partial(_disturbed, index, fault))


def _wrap(at: str, make: Callable[[Any], Any]) -> None:
    module, _, path = at.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, functools.wraps(getattr(owner, name))(make(getattr(owner, name))))


def _follow_step(phase: Any) -> Any:
    def wrapper(self: Any, name: str) -> Any:
        if found := re.search(r"step (\d+)", name):
            _now["step"] = int(found[1])
        return phase(self, name)

    return wrapper


def _disturbed(index: int, fault: dict[str, Any], function: Any) -> Any:
    lock, calls = threading.Lock(), 0

    def is_due(args: Any) -> bool:
        nonlocal calls
        if "step" in fault and fault["step"] != _now["step"]:
            return False
        if "match" in fault and not re.search(fault["match"], repr(args)):
            return False
        with lock:
            calls += 1
            return calls == fault.get("call", 1) or (fault.get("every", False) and calls > fault.get("call", 1))

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        due = is_due((args, kwargs))
        if due and fault["do"] in _TURNS:
            _tell(index, fault)
            return _TURNS[fault["do"]](function, *args, **kwargs)
        is_after = fault.get("when") == "after"
        if due and not is_after:
            _strike(index, fault)
        result = function(*args, **kwargs)
        if due and is_after:
            _strike(index, fault)
        return result

    return wrapper


def _strike(index: int, fault: dict[str, Any]) -> None:
    _tell(index, fault)
    do = fault["do"]
    if do == "kill-all":
        _kill_all()
    elif do in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[do])
    elif do == "exit-0":
        os._exit(0)
    elif do == "sleep":
        time.sleep(fault["s"])
    else:
        raise _ERRORS[do]()


def _tell(index: int, fault: dict[str, Any]) -> None:
    line = {"fault": index, "do": fault["do"], "rank": int(os.environ.get("RANK", "0")), "step": _now["step"]}
    handle = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, (json.dumps(line) + "\n").encode())
    os.close(handle)


def _kill_all() -> None:
    """Kills all ranks nearly at once: the other ranks first, then this one."""
    mine = os.getpid()
    for file in Path(os.environ[LOG]).parent.glob(f"{Path(os.environ[LOG]).name}.pid.*"):
        if (pid := int(file.read_text())) != mine:
            os.kill(pid, signal.SIGKILL)
    os.kill(mine, signal.SIGKILL)


def _nan_loss(function: Any, *args: Any, **kwargs: Any) -> Any:
    objective, rows = function(*args, **kwargs)
    return objective + float("nan"), rows


def _inf_gradient(function: Any, chunks: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes the gradient of one weight on this rank infinite; megatron-core then reduces it over all ranks."""
    next(chunks[0].parameters()).main_grad.view(-1)[0] = float("inf")
    return function(chunks, *args, **kwargs)


_TURNS: dict[str, Callable[..., Any]] = {
    "nan-loss": _nan_loss,
    "inf-gradient": _inf_gradient,
    "no-room": lambda function, path: function(path)._replace(free=1000),
    "much-room": lambda function, path: function(path)._replace(free=1 << 50),
    "an-hour-back": lambda function: function() - 3600.0,
    # the listing of a folder on a node that does not see yet what other nodes wrote
    "nothing-there": lambda function, *args: [],
    "skip": lambda function, *args, **kwargs: None,
}


def main() -> None:
    """Runs sft with the faults; never returns."""
    arm(json.loads(os.environ.get(FAULTS, "[]")))
    from sft.cli import run

    run()


if __name__ == "__main__":
    sys.argv[0] = "sft"
    main()
