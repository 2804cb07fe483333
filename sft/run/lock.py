"""Allows one run at a time in a folder.  The file run.lock names the run that is alive (the holder of the lock).

This module decides whether the holder of a lock is alive, and how a stale lock is replaced.  The saver calls `held`
before it publishes a checkpoint, and does not publish without the lock.

The holder writes heartbeats into the file that it opened, and never creates the file again.  So a run that hung and
lost its lock does not write into the lock of the next run.  Before a run replaces a stale lock, it makes a hard link
with a name that only one process can get (`_claim`), and then reads the lock again.
"""

import hashlib
import json
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from sft.errors import ConfigError
from sft.files.atomic_files import unusable

LOCK = "run.lock"
_BEAT = b', "beat": '


@dataclass(frozen=True)
class Holder:
    """The process that holds the lock, as run.lock stores it."""

    host: str
    machine: str  # host, boot and PID namespace; a container may have its host's name, but other process ids
    pid: int
    started: float  # start time in seconds, see `_start_time`
    since: str  # start time in UTC, for users
    job: str | None
    restart: int
    id: str

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}" + (f", job {self.job}" if self.job else "") + f", since {self.since}"


class RunLock:
    """Locks the folder of the run while the context lasts.  Rank 0 holds the lock.

    report       gets a line when a stale lock is replaced
    heartbeat_s  seconds between two heartbeats
    stale_s      a run on another host counts as ended after this many seconds without a heartbeat, by this process's
                 clock
    Entering the context raises ConfigError if another run is alive in the folder or if the folder cannot be locked, and
    StorageError if the disk is full or fails.
    """

    def __init__(
        self, folder: Path, *, report: Callable[[str], None], heartbeat_s: float = 10.0, stale_s: float = 60.0
    ) -> None:
        self._path, self._report = folder / LOCK, report
        self._heartbeat_s, self._stale_s = heartbeat_s, stale_s
        self._me = this_process()
        self._identity = json.dumps(asdict(self._me))[:-1].encode()
        self._file = -1
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="run.lock", daemon=True)

    def __enter__(self) -> "RunLock":
        own = self._path.with_name(f"{LOCK}.{self._me.id}")
        try:
            own.write_bytes(self._identity + _BEAT + _counter(0) + b"}\n")
            try:
                while not _link(own, self._path):
                    if (stale := self._stale_content(self._path)) is not None:
                        self._replace(own, self._path, stale)
                self._file = os.open(own, os.O_WRONLY)
            finally:
                own.unlink()
            self._sweep()
        except OSError as error:
            raise unusable(f"run.dir = {self._path.parent} cannot be locked", self._path.parent, error) from error
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if os.getpid() != self._me.pid:  # a forked child that ends with an exception
            return
        self._is_over.set()
        self._thread.join()
        os.close(self._file)
        claim = _claim(self._path, self._identity)
        with suppress(OSError):  # a user removed the file, or the disk failed: the next run may find a stale lock
            # Needs the claim, because another run could replace the lock after the read and before the removal.
            if _link(self._path, claim):
                if self._is_mine():
                    self._path.unlink()
                claim.unlink()

    def held(self) -> bool:
        """Whether this process still holds the lock.  False if another run replaced it, and in a forked child."""
        return os.getpid() == self._me.pid and self._is_mine()

    def _sweep(self) -> None:
        """Remove the files of processes that were killed while they took or removed the lock."""
        for path in self._path.parent.glob(f"{LOCK}.*"):
            if (content := _read(path)) and (holder := parsed(content)) and self._why_gone(holder):
                path.unlink(missing_ok=True)

    def _is_mine(self) -> bool:
        return _has_identity(self._path, self._identity)

    def _renew(self) -> None:
        count = 0
        while not self._is_over.wait(self._heartbeat_s):
            count += 1
            with suppress(OSError):  # the saver reports errors of the disk
                os.pwrite(self._file, _counter(count), len(self._identity + _BEAT))
                os.fsync(self._file)  # sends the heartbeat to the file server, from which other hosts read

    def _replace(self, own: Path, path: Path, stale: bytes) -> None:
        """Replace the lock with content `stale` by the file `own`, unless another process does so first."""
        claim = _claim(path, stale)
        if not _link(own, claim):
            # Another process owns the claim for a short time.  If that process was killed, the claim itself is stale.
            if (stale_claim := self._stale_content(claim)) is None:
                return
            self._replace(own, claim, stale_claim)
            if not _has_identity(claim, self._identity):
                return
        if _has_identity(path, _identity(stale)):
            os.rename(claim, path)
        else:
            claim.unlink()

    def _stale_content(self, path: Path) -> bytes | None:
        """The content of a lock whose run has ended; None if the lock has changed or vanished.

        Waits up to `stale_s` for a heartbeat of a run on another machine.  Raises ConfigError if the run is alive.
        """
        content = _read(path)
        if content is None:
            return None
        holder = parsed(content)
        why = self._why_gone(holder) if holder else None
        if why is None:
            if holder and holder.machine == self._me.machine:
                self._refuse(str(holder))
            who = str(holder) if holder else "unreadable"
            self._report(f"{path.name} ({who}): waiting {self._stale_s:g} s for a heartbeat of that run")
            if self._changes(path):
                if (now := _read(path)) is None or (parsed(now) and _identity(now) != _identity(content)):
                    return None
                self._refuse(who)
            why = f"no heartbeat for {self._stale_s:g} s"
        if path == self._path:
            self._report(f"{path.name}: taken over from {holder or 'an unreadable lock'}: {why}")
        return content

    def _why_gone(self, holder: Holder) -> str | None:
        if has_ended(holder, self._me.machine):
            return "that process has ended"
        if holder.job is not None and holder.job == self._me.job and holder.restart < self._me.restart:
            return "the job was requeued since then"
        return None

    def _changes(self, path: Path) -> bool:
        """Watch the lock file for up to `stale_s`.  Returns whether the file was renewed, replaced or removed."""
        before, end = _stamp(path), time.monotonic() + self._stale_s
        while time.monotonic() < end:
            time.sleep(min(1.0, self._stale_s / 20))
            if _stamp(path) != before:
                return True
        return False

    def _refuse(self, who: str) -> None:
        raise ConfigError(
            f"run.dir = {self._path.parent} is in use by another run ({who}), and two runs would overwrite each "
            f"other's checkpoints.  Stop that run, or choose another run.dir.  If no such run exists, remove "
            f"{self._path}."
        )


def is_gone(folder: Path) -> bool:
    """Whether this machine knows that the run that last began in the folder has ended.

    A run without a lock has ended.  The result is False for a lock of another machine or container, and for a damaged
    lock, because the run may be alive.  Raises OSError if the lock cannot be read, and ConfigError if it is not a file.
    """
    content = _read(folder / LOCK)
    if content is None:
        return True
    holder = parsed(content)
    return holder is not None and has_ended(holder, _machine())


def has_ended(holder: Holder, machine: str) -> bool:
    return holder.machine == machine and _start_time(holder.pid) != holder.started


def this_process() -> Holder:
    restart = os.environ.get("SLURM_RESTART_COUNT", "")
    started = _start_time(os.getpid())
    assert started is not None
    return Holder(
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


def _start_time(pid: int) -> float | None:
    """The start time of a process in seconds; None if the process has ended.

    On Linux, the time counts from boot.  Elsewhere, psutil gives the time of day, which changes when the clock is set.
    """
    if not Path("/proc/self/stat").exists():
        return float(psutil.Process(pid).create_time()) if psutil.pid_exists(pid) else None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    is_dead = fields[0] in "ZX"  # Z: a zombie has ended, but its parent has not waited for it
    return None if is_dead else int(fields[19]) / os.sysconf("SC_CLK_TCK")


def parsed(content: bytes) -> Holder | None:
    """The holder that the content of a lock names; None if the content is not a lock."""
    try:
        values = json.loads(content)
        del values["beat"]
        holder = Holder(**values)
        is_sound = isinstance(holder.pid, int) and isinstance(holder.restart, int) and isinstance(holder.machine, str)
    except (ValueError, TypeError, KeyError):
        return None
    return holder if is_sound else None


def _counter(count: int) -> bytes:
    """A heartbeat.  It has the same length for every count, so that one heartbeat can overwrite another."""
    return f"{count:>12}".encode()


def _identity(content: bytes) -> bytes:
    """The part of a lock that heartbeats do not change; the whole content if it is not a lock."""
    return content.partition(_BEAT)[0]


def _claim(path: Path, stale: bytes) -> Path:
    """The path of a claim.  The process that makes this file may replace or remove `path` while it contains `stale`."""
    return path.with_name(f"{LOCK}.after-{hashlib.sha256(path.name.encode() + _identity(stale)).hexdigest()[:16]}")


def _link(file: Path, name: Path) -> bool:
    """Hard-link the file to `name`, unless another file has this name.  Returns whether the file has the name now."""
    try:
        os.link(file, name)
    except FileExistsError:  # NFS also reports this error if it made the link, but its first answer was lost
        return _stamp(name) is not None and os.path.samefile(file, name)
    return True


def _has_identity(path: Path, identity: bytes) -> bool:
    content = _read(path)
    return content is not None and _identity(content) == identity


def _read(path: Path) -> bytes | None:
    """The content of a lock; None if there is no lock.  Raises ConfigError if the name is not that of a plain file."""
    stamp = _stamp(path)
    return None if stamp is None else stamp[0]


def _stamp(path: Path) -> tuple[bytes, int] | None:
    """The content of a lock and the time of its last change in ns; None and errors as for `_read`."""
    try:
        kind = stat.S_IFMT(path.lstat().st_mode)
        if kind != stat.S_IFREG:  # reading a pipe would wait for a writer
            name = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder"}.get(kind, "no plain file")
            raise ConfigError(f"{path} is {name}, so it is not the lock of a run.  Remove it, and start the run again.")
        return path.read_bytes(), path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
