"""Starts child processes that never run the user's program: from a script, a notebook, a REPL or a worker of a pool.

`multiprocessing` runs the user's script again in each child (spawn), or copies a process whose threads hold locks
(fork), and it refuses a parent that is itself a worker of a pool.  So this module starts a server as a separate
command.  The server imports modules of sft only, and forks a child for each request.  A process starts the server once,
which takes half a second.  A child then starts in a few hundredths of a second.

The server and all its children end with the process that started the server, also if that process is killed.  Server
and children ignore the signals that stop a run: such a signal often reaches a whole process group, and only the parent
decides when its children end.
"""

import atexit
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from fcntl import F_SETFL, fcntl
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

# The server imports these modules once, so that children start with them imported.
MODULES = ("sft.data.cache.workers", "sft.weights.serving.served_template")
_SERVER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from sft.data import fork_server; fork_server.serve()"
)
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_START, _WAIT = b"s", b"w"
_REQUEST = struct.Struct("=cq")  # start a child, or wait for the child with this pid
_ANSWER = struct.Struct("=q")  # the pid of the child, or its exit code
_LAST_LINES, _LAST_CHARACTERS = 3, 500
_MOST_STDERR = 1 << 20  # bytes of a child's stderr that are kept


class End(NamedTuple):
    """How a child ended.

    code           the exit code, or minus the number of the signal; None: the server has ended, too
    stderr         the last lines that the child wrote to stderr, as one line; empty if it wrote none
    is_oom_killed  whether the kernel killed a process of this cgroup for lack of memory since the child started; None:
                   the kernel does not count
    """

    code: int | None
    stderr: str
    is_oom_killed: bool | None

    def describe(self) -> str:
        """A predicate such as "was ended by SIGSEGV; its last lines: Fatal Python error"."""
        words = f"; its last lines: {self.stderr}" if self.stderr else ""
        if self.code is None:
            return f"was ended, and so was the server that started it{words}"
        if self.code >= 0:
            return f"ended with exit code {self.code}{words}"
        if self.code == -signal.SIGKILL and self.is_oom_killed:
            return f"was ended by SIGKILL, because memory ran out (oom_kill of the cgroup has risen){words}"
        return f"was ended by {signal_name(-self.code)}{words}"


class Child:
    """A child process that runs function(pipe, *arguments).  `pipe`: this process's end of the pipe

    The constructor starts the child.  It raises OSError if no process can be started.
    """

    def __init__(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._owner, self._stderr, self._num_oom_kills = os.getpid(), _memory_file(), _num_oom_kills()
        near, far = socket.socketpair()
        self.pipe = Connection(near.detach())
        try:
            with far:
                self._server, self._pid = _start([far.fileno(), self._stderr])
            with suppress(OSError):  # the child is dead; `end` says why
                self.pipe.send((_search_path(), os.getcwd()))
                self.pipe.send((function, arguments))
        except BaseException:  # also an interrupt must leave no open file
            self.pipe.close()
            os.close(self._stderr)
            raise

    def end(self, *, kill: bool) -> End:
        """Waits until the child ends, and returns how it ended.  With `kill`, kills the child first.  Call it once."""
        if os.getpid() != self._owner:  # a forked copy of this process is cleaned up
            return End(None, "", None)
        if kill:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self.pipe.close()
        code = self._server.ask(_WAIT, self._pid)
        before, now = self._num_oom_kills, _num_oom_kills()
        end = End(code, _last_lines(self._stderr), None if before is None or now is None else now > before)
        os.close(self._stderr)
        return end

    def forget_stderr(self) -> None:
        """Deletes what the child has written to stderr if it is more than 1 MiB.  Call it between two tasks."""
        if os.fstat(self._stderr).st_size > _MOST_STDERR:
            os.ftruncate(self._stderr, 0)


class _Server:
    """This process's side of a running server."""

    def __init__(self) -> None:
        self.pid, self._lock = os.getpid(), threading.Lock()
        self.control, far = socket.socketpair()
        self._stderr = _memory_file()
        command = [sys.executable, "-P", "-c", _SERVER, json.dumps(_search_path()), str(far.fileno())]
        with far:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=[far.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # a process that forks should have one thread
            )

    def ask(self, kind: bytes, pid: int = 0, descriptors: Sequence[int] = ()) -> int | None:
        """Sends a request of kind _START or _WAIT, and returns the answer; None if the server has ended.

        _START: starts a child with these file descriptors; the answer is its pid.  _WAIT: waits for the child `pid`;
        the answer is its exit code, or minus the number of the signal that ended it.
        """
        with self._lock:
            try:
                socket.send_fds(self.control, [_REQUEST.pack(kind, pid)], descriptors)
                content = self.control.recv(_ANSWER.size)
            except OSError:
                return None
        number: int | None = _ANSWER.unpack(content)[0] if len(content) == _ANSWER.size else None
        return number

    def stop(self) -> End:
        """End the server, which ends its children."""
        self.control.close()
        code = self._process.wait()
        end = End(code, _last_lines(self._stderr), None)
        os.close(self._stderr)
        return end


_server: _Server | None = None
_starting = threading.Lock()


def _start(descriptors: list[int]) -> tuple[_Server, int]:
    """Starts a child with these file descriptors; starts a server first if none runs.

    Returns the server and the child's pid.  Raises ChildProcessError if the server ends at once.
    """
    global _server
    with _starting:
        if _server is not None:
            if (pid := _server.ask(_START, descriptors=descriptors)) is not None:
                return _server, pid
            _server.stop()  # it was killed
        _server = _Server()
        if (pid := _server.ask(_START, descriptors=descriptors)) is not None:
            return _server, pid
        end, _server = _server.stop(), None
        raise ChildProcessError(f"the process that starts child processes {end.describe()}")


def _stop_at_exit() -> None:
    if _server is not None and _server.pid == os.getpid():
        _server.stop()


def _in_child() -> None:
    """Runs in each forked copy of this process: makes it forget the server, so that it starts a server of its own."""
    global _server, _starting
    if _server is not None:
        _server.control.close()
        _server._process.returncode = 0  # the copy is not its parent, and does not wait for it
        os.close(_server._stderr)
    _server, _starting = None, threading.Lock()


atexit.register(_stop_at_exit)
os.register_at_fork(after_in_child=_in_child)


def serve() -> None:
    """Runs the server: starts children until the parent closes the socket, then kills all children that still run."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[2]))
    for module in MODULES:
        import_module(module)
    children: set[int] = set()
    try:
        while True:
            request, descriptors, _, _ = socket.recv_fds(control, _REQUEST.size, 2)
            if len(request) < _REQUEST.size:
                return
            kind, pid = _REQUEST.unpack(request)
            if kind == _WAIT:
                answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                children.discard(pid)
            else:
                answer = _fork(control, *descriptors)
                children.add(answer)
            control.sendall(_ANSWER.pack(answer))
    except ConnectionError:  # the parent was killed
        pass
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os._exit(0)


def _fork(control: socket.socket, pipe: int, stderr: int) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            control.close()
            os.dup2(stderr, 2)
            os.close(stderr)
            _live(Connection(pipe))
            code = 0
        except EOFError:  # the parent has ended, or needs this child no more
            code = 0
        except BaseException:  # the child ends in any case; the parent shows the last lines of stderr
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(pipe)
    os.close(stderr)
    return pid


def _live(pipe: Connection) -> None:
    """Runs the function that the parent sends, with the parent's sys.path and working folder."""
    sys.path[:], folder = pipe.recv()
    os.chdir(folder)
    function, arguments = pipe.recv()
    function(pipe, *arguments)


def _search_path() -> list[str]:
    return [str(folder) for folder in sys.path]


def signal_name(number: int) -> str:
    """9 -> SIGKILL        99 -> signal 99"""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _memory_file() -> int:
    """An empty file without a name, in memory where the system can, to which each write appends."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("stderr")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    fcntl(file, F_SETFL, os.O_APPEND)
    return file


def _last_lines(file: int) -> str:
    start = max(0, os.fstat(file).st_size - 4 * _LAST_CHARACTERS)
    lines = os.pread(file, 4 * _LAST_CHARACTERS, start).decode(errors="replace").splitlines()
    text = " | ".join([line.strip() for line in lines if line.strip()][-_LAST_LINES:])
    return "".join(character if character.isprintable() else " " for character in text)[-_LAST_CHARACTERS:]


def _num_oom_kills() -> int | None:
    """The number of processes of this cgroup that the kernel has killed for lack of memory; None if it is unknown."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        old = [f"memory{path}/memory.oom_control" for _, names, path in groups if "memory" in names.split(",")]
        new = [f".{path}/memory.events" for _, names, path in groups if not names]
        # A container may see its own cgroup as the root.
        files = [Path("/sys/fs/cgroup", name) for name in (*old, *(["memory/memory.oom_control"] if old else []), *new)]
        return next((_count_in(file) for file in files if file.is_file()), None)
    except (OSError, ValueError):  # not Linux, or a cgroup that this process cannot read
        return None


def _count_in(file: Path) -> int | None:
    for line in file.read_text(encoding="ascii").splitlines():
        name, number = line.split()
        if name == "oom_kill":
            return int(number)
    return None
