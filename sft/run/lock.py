"""One run in a folder at a time: run.lock says who, and is renewed while it lives.

Decides which lock is alive and which was left by a run that is gone, and how a left one is taken.  Does not decide
what a run does that has lost its lock: the trainer asks `held` before it saves.

The file is never written anew: beats go into the file that was opened, so that a run that wakes up after another one
took its place renews a file that nobody sees any more.  Whoever takes a left lock first gets hold of a name that only
one can have (`_claim`), and under it looks again.
"""

import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import psutil

from sft.errors import ConfigError

LOCK = "run.lock"
_BEAT = b', "beat": '


@dataclass(frozen=True)
class _Holder:
    host: str
    machine: str  # this boot of it, and the process ids in use: a container may share its host's name, not its ids
    pid: int
    started: float  # in seconds, see `_started`
    since: str  # for people, UTC
    job: str | None
    restart: int
    id: str

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}" + (f", job {self.job}" if self.job else "") + f", since {self.since}"


class RunLock:
    """The run's own folder, for as long as the context lasts.  Rank 0 holds it.

        with RunLock(folder, tell=console.say) as lock:
            ...
            if lock.held():
                save()

    Entering raises ConfigError where another run is alive in the folder, and says with `tell` when a lock that was
    left is taken.  `heartbeat_s`: seconds between signs of life; `stale_s`: seconds without one, watched from here,
    after which a run on another host counts as gone (no clocks are compared).
    """

    def __init__(
        self, folder: Path, *, tell: Callable[[str], None], heartbeat_s: float = 10.0, stale_s: float = 60.0
    ) -> None:
        self._path, self._tell = folder / LOCK, tell
        self._heartbeat_s, self._stale_s = heartbeat_s, stale_s
        self._me = _myself()
        self._identity = json.dumps(asdict(self._me))[:-1].encode()
        self._file = -1
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run.lock", daemon=True)

    def __enter__(self) -> "RunLock":
        mine = self._path.with_name(f"{LOCK}.{self._me.id}")
        try:
            mine.write_bytes(self._identity + _BEAT + _beat(0) + b"}\n")
            try:
                while not _link(mine, self._path):
                    if (left := self._left(self._path)) is not None:
                        self._take(mine, self._path, left)
                self._file = os.open(mine, os.O_WRONLY)
            finally:
                mine.unlink()
        except OSError as error:
            raise ConfigError(f"run.dir = {self._path.parent} cannot be locked: {error}.") from error
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if os.getpid() != self._me.pid:  # a fork of ours that ends by an exception
            return
        self._is_over.set()
        self._thread.join()
        os.close(self._file)
        claim = _claim(self._path, self._identity)
        try:
            # Under the claim, as a taker would: between looking and removing, the lock might become another's.
            if _link(self._path, claim):
                if self._is_mine():
                    self._path.unlink()
                claim.unlink()
        except OSError:  # gone by hand, or the disk is: the next run finds a lock that was left
            pass

    def held(self) -> bool:
        """Whether the folder is still ours: False if another run took us for gone, and in a fork."""
        return os.getpid() == self._me.pid and self._is_mine()

    def _is_mine(self) -> bool:
        return _stands(self._identity, self._path)

    def _beat(self) -> None:
        beat = 0
        while not self._is_over.wait(self._heartbeat_s):
            beat += 1
            try:
                os.pwrite(self._file, _beat(beat), len(self._identity + _BEAT))
                os.fsync(self._file)  # to the server: other hosts look there
            except OSError:  # told by those who save
                pass

    def _take(self, mine: Path, path: Path, left: bytes) -> None:
        """Put our file in the place of the one that was `left`, unless somebody is before us."""
        claim = _claim(path, left)
        if not _link(mine, claim):
            # Held for an instant only, or by one that was killed in it: then that claim is what is left, and taken.
            if (of_claim := self._left(claim)) is None:
                return
            self._take(mine, claim, of_claim)
            if not _stands(self._identity, claim):
                return
        if _stands(_identity(left), path):
            os.rename(claim, path)
        else:
            claim.unlink()

    def _left(self, path: Path) -> bytes | None:
        """What stands there, if its run is gone; None if it changed hands meanwhile.  ConfigError if it is alive."""
        content = _read(path)
        if content is None:
            return None
        holder = _holder(content)
        why = self._why_gone(holder) if holder else None
        if why is None:
            if holder and holder.machine == self._me.machine:
                self._refuse(str(holder))
            who = str(holder) if holder else "unreadable"
            self._tell(f"{path.name} ({who}): watching for {self._stale_s:g} s whether that run is alive")
            if self._changes(path):
                if (now := _read(path)) is None or (_holder(now) and _identity(now) != _identity(content)):
                    return None
                self._refuse(who)
            why = f"no sign of life for {self._stale_s:g} s"
        if path == self._path:
            self._tell(f"{path.name}: taken over from {holder or 'an unreadable lock'}: {why}")
        return content

    def _why_gone(self, holder: _Holder) -> str | None:
        if holder.machine == self._me.machine and _started(holder.pid) != holder.started:
            return "that process is gone"
        if holder.job is not None and holder.job == self._me.job and holder.restart < self._me.restart:
            return "the job was requeued since"
        return None

    def _changes(self, path: Path) -> bool:
        """Whether the file is renewed, replaced or removed within `stale_s`."""
        before, until = _stamp(path), time.monotonic() + self._stale_s
        while time.monotonic() < until:
            time.sleep(min(1.0, self._stale_s / 20))
            if _stamp(path) != before:
                return True
        return False

    def _refuse(self, who: str) -> None:
        raise ConfigError(
            f"run.dir = {self._path.parent} is in use by another run ({who}), and two runs would write over each "
            f"other's checkpoints.  Stop that run, or choose another run.dir.  If no such run exists, remove "
            f"{self._path}."
        )


def _myself() -> _Holder:
    restart = os.environ.get("SLURM_RESTART_COUNT", "")
    started = _started(os.getpid())
    assert started is not None
    return _Holder(
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        started=started,
        since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        job=os.environ.get("SLURM_JOB_ID"),
        restart=int(restart) if restart.isdigit() else 0,
        id=uuid.uuid4().hex,
    )


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _started(pid: int) -> float | None:
    """When a process was started, in seconds; None: it is gone.

    On Linux since the boot, as the kernel keeps it: the time of day that psutil makes of it moves with the clock.
    """
    if not Path("/proc/self/stat").exists():
        return float(psutil.Process(pid).create_time()) if psutil.pid_exists(pid) else None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    is_dead = fields[0] in "ZX"  # dead, and not yet waited for
    return None if is_dead else int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _holder(content: bytes) -> _Holder | None:
    """None: garbage."""
    try:
        values = json.loads(content)
        del values["beat"]
        holder = _Holder(**values)
        is_sound = isinstance(holder.pid, int) and isinstance(holder.restart, int) and isinstance(holder.machine, str)
    except (ValueError, TypeError, KeyError):
        return None
    return holder if is_sound else None


def _beat(count: int) -> bytes:
    """Of the same length for every count, so that one can be written over another."""
    return f"{count:>12}".encode()


def _identity(content: bytes) -> bytes:
    """What stays the same from beat to beat; of garbage, all."""
    return content.partition(_BEAT)[0]


def _claim(path: Path, left: bytes) -> Path:
    """The name that allows to change `path` while `left` stands there."""
    return path.with_name(f"{LOCK}.after-{hashlib.sha256(path.name.encode() + _identity(left)).hexdigest()[:16]}")


def _link(file: Path, name: Path) -> bool:
    """Give the file one more name, unless another has it; whether it has that name now."""
    try:
        os.link(file, name)
    except FileExistsError:  # NFS says so, too, when it did the work and its first answer was lost
        return _stamp(name) is not None and os.path.samefile(file, name)
    return True


def _stands(identity: bytes, path: Path) -> bool:
    """Whether the lock of that run is what is there."""
    content = _read(path)
    return content is not None and _identity(content) == identity


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _stamp(path: Path) -> tuple[bytes, int] | None:
    try:
        return path.read_bytes(), path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
