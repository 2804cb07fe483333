"""Starts ranks without waiting for their imports: forks a process that has already imported everything that a rank
imports.

    server = rank_server()          # the server of this test process
    pid = server.fork("sft", ["train", ...], environ, out=folder / "out", err=folder / "err")
    server.code(pid)                # its exit code (-9: it was killed), or None while it runs

A rank begins in the state that `python -m sft` has after its imports: own session, own environment, output in files.
The server is `python -m tests.rank_server`.  It has one thread, reads JSON requests from stdin, one per line, and ends
with the process that started it.
"""

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TIMEOUT_S = 240.0  # limit for the end of the server; it does not wait for ranks that still run
_ENVIRON, _ROOT = dict(os.environ), Path(__file__).resolve().parents[1]  # values from before any test changes them


def default_signals() -> None:
    """Restores default handlers of signals in a new process: `nohup`, and a shell that starts a job in the background,
    make child processes ignore these signals."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


class RankServer:
    """The test process's connection to a server.  Several threads may use it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.rank_server"]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env={**_ENVIRON, "PYTHONPATH": str(_ROOT), **threads},
            stdin=-1,
            stdout=-1,
            text=True,
            start_new_session=True,
            preexec_fn=default_signals,
        )
        self._lock = threading.Lock()
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def fork(
        self,
        module: str,
        words: Sequence[str],
        environ: Mapping[str, str],
        *,
        out: Path | str,
        err: Path | str,
        folder: str | None = None,
        python: str = sys.executable,
    ) -> int:
        """Start `python -m module words` in `folder`; None: the working folder of the caller.  Returns the pid.

        The output of the process is appended to the files `out` and `err`.  python: `sys.executable` of the process
        """
        files = {"out": str(out), "err": str(err), "folder": folder or os.getcwd(), "python": python}
        return int(self._ask(module=module, words=[*words], environ={**environ}, **files))

    def code(self, pid: int) -> int | None:
        """The exit code of a process, or minus the number of the signal that ended it; None while it runs."""
        code: int | None = self._ask(of=pid)
        return code

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=TIMEOUT_S)

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, f"the rank server ended with {self._process.wait()}"
        return json.loads(answer)


@functools.cache
def rank_server() -> RankServer:
    """The server of this process, started at the first call; it ends with this process."""
    server = RankServer()
    atexit.register(server.close)
    return server


def serve() -> None:
    """Answer requests until the end of stdin."""
    import torch.utils.tensorboard  # noqa: F401

    import sft.api.rank  # noqa: F401

    assert os.listdir("/proc/self/task") == [str(os.getpid())], "a fork has none of the other threads"
    gc.freeze()  # after this, a fork copies fewer pages
    codes: dict[int, int] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "module" in request:
            answer: int | None = os.fork()
            if answer == 0:
                _become(request)
            codes.pop(answer or 0, None)  # the system reuses pids
        else:
            answer = _code(request["of"], codes)
        print(json.dumps(answer), flush=True)


def _become(request: dict[str, Any]) -> None:
    try:
        os.setsid()
        os.chdir(request["folder"])
        for number, path in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(path, flags, 0o644), number)
        # the server's streams may be of a file, and take a pipe for one, too
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", 1, errors="backslashreplace", closefd=False)
        os.environ.clear()
        os.environ.update(request["environ"])
        sys.argv, sys.path[0], sys.executable = ["sft", *request["words"]], request["folder"], request["python"]
        # otherwise all ranks would draw the same unseeded numbers, and so would a run and its continuation
        np.random.seed()
        code = 0
        try:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        sys.stdout.flush()
        os._exit(code)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(99)


def _code(pid: int, codes: dict[int, int]) -> int | None:
    if pid not in codes:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended == 0:
            return None
        codes[pid] = os.waitstatus_to_exitcode(status)
    return codes[pid]


if __name__ == "__main__":
    serve()
